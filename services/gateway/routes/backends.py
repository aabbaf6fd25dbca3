"""`/v1/backends`: the LLM servers that rollouts run on."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify
from pydantic import ValidationError

from rollout.schema import Backend, BackendRequest, DrainRequest
from services.engines.address import root
from services.engines.describe import DescribeError, describe
from services.gateway.bodies import body_json
from services.gateway.context import choice, gateway, reject_unknown_parameters
from services.gateway.problems import ApiProblem, from_validation, invalid

blueprint = Blueprint("backends", __name__, url_prefix="/v1")


@blueprint.get("/backends")
def list_backends() -> Response:
    """All backends with their load, health and weights."""
    reject_unknown_parameters()
    return jsonify(backends=[backend.model_dump(mode="json") for backend in gateway().backends.list()])


@blueprint.post("/backends")
def add() -> Response:
    """Register a server, or describe it anew; what it serves is read from the server itself."""
    reject_unknown_parameters()
    try:
        wanted = BackendRequest.model_validate(body_json())
    except ValidationError as error:
        raise from_validation(error) from None
    return _json(register(wanted), 201)


def register(wanted: BackendRequest) -> Backend:
    """Ask a server what it serves and have rollouts use it.

    Raises:
        ApiProblem: 400 when it does not answer as an LLM server; 409 when its URL has another id.
    """
    wanted = wanted.model_copy(update={"id": _known_id(wanted)})
    try:
        backend = describe(wanted)
    except DescribeError as error:
        raise invalid(error.field, error.message) from None
    return gateway().backends.put(backend)


@blueprint.get("/backends/<backend_id>")
def one(backend_id: str) -> Response:
    """One backend."""
    reject_unknown_parameters()
    return _json(_existing(backend_id))


@blueprint.post("/backends/<backend_id>/drain")
def drain(backend_id: str) -> Response:
    """Let a backend take no new rollouts (or, with `{"drain": false}`, again some); those on it go on."""
    reject_unknown_parameters()
    try:
        wanted = DrainRequest.model_validate(body_json(empty={}))
    except ValidationError as error:
        raise from_validation(error) from None
    if not gateway().backends.drain(backend_id, wanted.drain):
        raise _absent(backend_id)
    return _json(_existing(backend_id))


@blueprint.delete("/backends/<backend_id>")
def remove(backend_id: str) -> Response:
    """Forget a server; its rollouts move at their next call. `force=false` refuses while there are any."""
    reject_unknown_parameters("force")
    if choice("force", ("true", "false"), "true") == "false":
        backend = _existing(backend_id)
        if backend.live_rollouts:
            raise ApiProblem(
                409,
                "Backend in use",
                f"backend {backend_id!r} has {backend.live_rollouts} live rollouts: drain it and wait, or "
                "send force=true to move them",
            )
    if not gateway().backends.remove(backend_id):
        raise _absent(backend_id)
    return Response(status=204)


def _known_id(wanted: BackendRequest) -> str | None:
    """The id under which a URL is registered already: a server with two ids would be loaded twice."""
    url = root(wanted.url)
    for backend in gateway().backends.list():
        if root(backend.url) == url and backend.id != wanted.id:
            if wanted.id is None:
                return backend.id
            raise ApiProblem(
                409,
                "Backend exists",
                f"{url} is registered as {backend.id!r}: remove that first, or leave out id",
            )
    return wanted.id


def _existing(backend_id: str) -> Backend:
    backend = gateway().backends.get(backend_id)
    if backend is None:
        raise _absent(backend_id)
    return backend


def _absent(backend_id: str) -> ApiProblem:
    detail = f"there is no backend {backend_id!r}; GET /v1/backends lists those there are"
    return ApiProblem(404, "No such backend", detail)


def _json(backend: Backend, status: int = 200) -> Response:
    return Response(backend.model_dump_json(), status=status, content_type="application/json")
