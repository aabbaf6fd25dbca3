"""`/v1/backends`: the LLM servers that rollouts run on."""

from __future__ import annotations

from flask import Blueprint, Response, jsonify
from pydantic import ValidationError

from rollout.schema import BackendRequest
from services.gateway.context import body_json, gateway
from services.gateway.engines import describe
from services.gateway.problems import ApiProblem, from_validation

blueprint = Blueprint("backends", __name__, url_prefix="/v1")


@blueprint.get("/backends")
def list_backends() -> Response:
    """All backends with their load."""
    return jsonify(backends=[backend.model_dump() for backend in gateway().backends.list()])


@blueprint.post("/backends")
def add() -> Response:
    """Register a server; what it serves is read from the server itself."""
    try:
        wanted = BackendRequest.model_validate(body_json())
    except ValidationError as error:
        raise from_validation(error) from None
    backend = gateway().backends.put(describe(wanted))
    return Response(backend.model_dump_json(), status=201, content_type="application/json")


@blueprint.delete("/backends/<backend_id>")
def remove(backend_id: str) -> Response:
    """Forget a server. It gets no new rollouts; those on it go on there while it answers."""
    if not gateway().backends.remove(backend_id):
        raise ApiProblem(404, "No such backend", f"there is no backend {backend_id!r}")
    return Response(status=204)
