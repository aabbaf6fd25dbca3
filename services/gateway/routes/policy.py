"""`/v1/policy`: which weights the backends serve, and their exchange."""

from __future__ import annotations

from flask import Blueprint, Response
from pydantic import BaseModel, ValidationError

from rollout.policy import PolicyRequest, PolicyUpdate
from rollout.schema import Backend
from services.gateway.bodies import body_json
from services.gateway.context import gateway, number, reject_unknown_parameters
from services.gateway.problems import ApiProblem, from_validation, invalid
from services.state.policy import UpdateConflict

blueprint = Blueprint("policy", __name__, url_prefix="/v1")


def _json(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status=status, content_type="application/json")


def _answer(update: PolicyUpdate) -> Response:
    return _json(update, 200 if update.state.ended else 202)


@blueprint.get("/policy")
def show() -> Response:
    """Current policy, update under way, and the latest ones."""
    return _json(gateway().policy.status())


@blueprint.post("/policy")
def update() -> Response:
    """Ask for new weights; the RUN workers bring them to the backends."""
    reject_unknown_parameters()
    try:
        wanted = PolicyRequest.model_validate(body_json())
    except ValidationError as error:
        raise from_validation(error) from None
    gate = gateway()
    most = gate.settings.max_wait_s
    if wanted.wait > most:
        raise invalid("wait", f"{wanted.wait:g} is more than {most:g}; ask for the rest at its own address")
    try:
        made, _ = gate.policy.create(wanted, _targets(wanted, gate.backends.list()))
    except UpdateConflict as error:
        raise ApiProblem(409, "Another update is under way", str(error)) from None
    if wanted.wait:
        made = gate.policy.wait(made.id, wanted.wait) or made
    return _answer(made)


@blueprint.get("/policy/updates/<update_id>")
def get(update_id: str) -> Response:
    """One update; with `wait`, answers when it has ended or when the wait is over."""
    reject_unknown_parameters("wait")
    gate = gateway()
    wait = number("wait", 0.0, low=0.0, high=gate.settings.max_wait_s)
    found = gate.policy.wait(update_id, wait)
    if found is None:
        detail = f"there is no update {update_id!r}; GET /v1/policy lists the latest"
        raise ApiProblem(404, "No such update", detail)
    return _json(found)


def _targets(wanted: PolicyRequest, known: list[Backend]) -> list[Backend]:
    """The backends that an update is for."""
    if wanted.backends is not None:
        unknown = sorted(set(wanted.backends) - {backend.id for backend in known})
        if unknown:
            there = ", ".join(sorted(backend.id for backend in known)) or "none"
            raise invalid("backends", f"unknown: {', '.join(unknown)}; there are: {there}")
        known = [backend for backend in known if backend.id in wanted.backends]
    if not known:
        raise ApiProblem(
            409, "No backends", "no LLM backend is registered; add one with POST /v1/backends and ask again"
        )
    return known
