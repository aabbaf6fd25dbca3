"""`/v1/backends`: the LLM servers that rollouts run on."""

from __future__ import annotations

from typing import Annotated, Literal

from flask import Blueprint, Response
from pydantic import BaseModel, WithJsonSchema

from rollout.schema import Backend, BackendRequest, DrainRequest
from services.engines.address import root
from services.engines.describe import DescribeError, describe
from services.gateway.context import gateway
from services.gateway.http import operation, query
from services.gateway.problems import ApiProblem, invalid
from services.state.api_keys import SHARED, Scope

blueprint = Blueprint("backends", __name__, url_prefix="/v1")

DRAIN = DrainRequest()
Force = Annotated[
    Literal["true", "false"], query("false: not while in use.", "true"), WithJsonSchema({"type": "boolean"})
]


class BackendList(BaseModel):
    """All LLM backends."""

    backends: list[Backend]


@blueprint.get("/backends")
@operation(scope=SHARED)
def list_backends() -> BackendList:
    """LLM backends, their load, health and weights."""
    return BackendList(backends=gateway().backends.list())


@blueprint.post("/backends")
@operation(409, status=201, scope=Scope.OPERATE)
def add(body: BackendRequest) -> Backend:
    """Register an LLM backend, or describe it anew; what it serves is read from the server itself."""
    return register(body)


def register(request: BackendRequest) -> Backend:
    """Ask a server what it serves and have rollouts use it.

    Raises:
        ApiProblem: 400 when it does not answer as an LLM server; 409 when its URL has another id.
    """
    known, store = _known(request), gateway().backends
    given: dict[str, object] = {"id": known.id if known else request.id}
    if known is not None and request.policies is None:
        # Of one alone the model is told anew.
        given["policies"] = known.policies if len(known.served) > 1 else dict.fromkeys(known.served)
    try:
        backend = describe(request.model_copy(update=given))
    except DescribeError as error:
        raise invalid(error.field, error.message) from None
    return store.put(backend, drain=request.drain)


@blueprint.get("/backends/<backend_id>")
@operation(scope=SHARED)
def get(backend_id: str) -> Backend:
    """One LLM backend."""
    return _existing(backend_id)


@blueprint.post("/backends/<backend_id>/drain")
@operation(scope=Scope.OPERATE)
def drain(backend_id: str, body: DrainRequest = DRAIN) -> Backend:
    """Let an LLM backend take no new rollouts, or (`{"drain": false}`) again some; those on it go on."""
    if not gateway().backends.drain(backend_id, body.drain):
        raise _absent(backend_id)
    return _existing(backend_id)


@blueprint.delete("/backends/<backend_id>")
@operation(409, answers={204: None}, scope=Scope.OPERATE)
def remove(backend_id: str, force: Force) -> Response:
    """Forget an LLM backend; its rollouts move at their next call."""
    if force == "false" and (live := _existing(backend_id).live_rollouts):
        raise ApiProblem(
            409,
            "Backend in use",
            f"backend {backend_id!r} has {live} live rollouts: drain it and wait, or send force=true to move "
            "them",
        )
    if not gateway().backends.remove(backend_id):
        raise _absent(backend_id)
    return Response(status=204)


def _known(request: BackendRequest) -> Backend | None:
    """The backend that is described anew, by its URL or id: a server with two ids would be loaded twice."""
    url = root(request.url)
    for backend in gateway().backends.list():
        if root(backend.url) == url:
            if request.id in (None, backend.id):
                return backend
            raise ApiProblem(
                409,
                "Backend exists",
                f"{url} is registered as {backend.id!r}: remove that first, or leave out id",
            )
    return gateway().backends.get(request.id) if request.id is not None else None


def _existing(backend_id: str) -> Backend:
    backend = gateway().backends.get(backend_id)
    if backend is None:
        raise _absent(backend_id)
    return backend


def _absent(backend_id: str) -> ApiProblem:
    detail = f"there is no backend {backend_id!r}; GET /v1/backends lists those there are"
    return ApiProblem(404, "No such backend", detail)
