"""`/v1/policy`: which weights the backends serve, and their exchange."""

from __future__ import annotations

from flask import Blueprint, Response

from rollout.schema import Backend
from rollout.schema.base import DEFAULT_POLICY
from rollout.schema.policy import PolicyRequest, PolicyStatus, PolicyUpdate
from services.gateway.context import gateway
from services.gateway.http import Wait, operation, reply
from services.gateway.problems import ApiProblem, invalid
from services.state.api_keys import TRAIN_DEFAULT, Scope
from services.state.policy.store import UpdateConflict

blueprint = Blueprint("policy", __name__, url_prefix="/v1")
SEEN = (Scope.READ, TRAIN_DEFAULT)


@blueprint.get("/policy")
@operation(scope=SEEN)
def show() -> PolicyStatus:
    """Current policy, update under way, latest updates."""
    return gateway().policy.status()


@blueprint.post("/policy")
@operation(409, answers={200: PolicyUpdate, 202: PolicyUpdate}, scope=TRAIN_DEFAULT)
def update(body: PolicyRequest) -> Response:
    """Bring new weights to the LLM backends; the RUN workers do it."""
    gate = gateway()
    most = gate.settings.max_wait_s
    if body.wait > most:
        raise invalid("wait", f"{body.wait:g} is more than {most:g}; ask for the rest at its own address")
    targets = _targets(body, gate.backends.list())
    _check_adapter(body, DEFAULT_POLICY, targets)
    try:
        made, _ = gate.policy.create(body, targets)
    except UpdateConflict as error:
        raise ApiProblem(409, "Another update is under way", str(error)) from None
    if body.wait:
        made = gate.policy.wait(made.id, body.wait) or made
    return reply(made, 200 if made.state.ended else 202)


@blueprint.delete("/policy")
@operation(409, answers={204: None}, scope=TRAIN_DEFAULT)
def forget() -> Response:
    """Forget the current weights, once no backend serves them: backends of any weights take rollouts then."""
    try:
        serving = gateway().policy.forget()
    except UpdateConflict as error:
        raise ApiProblem(409, "An update is under way", str(error)) from None
    if serving:
        there = ", ".join(serving)
        raise ApiProblem(
            409, "Weights in use", f"{there} serve the current weights: update them, or remove them first"
        )
    return Response(status=204)


@blueprint.get("/policy/updates/<update_id>")
@operation(scope=SEEN)
def get(update_id: str, wait: Wait) -> PolicyUpdate:
    """One update of the policy; with `wait`, answers when it has ended or when the wait is over."""
    policy_update = gateway().policy.wait(update_id, wait)
    if policy_update is None:
        detail = f"there is no update {update_id!r}; GET /v1/policy lists the latest"
        raise ApiProblem(404, "No such update", detail)
    return policy_update


def _check_adapter(request: PolicyRequest, policy: str, targets: list[Backend]) -> None:
    """Refuse the name of another policy's adapter: loaded under it, that one would have these weights."""
    for backend in targets if request.lora else ():
        for other, model in backend.served.items():
            if other != policy and model == request.lora.name:
                raise invalid(
                    "lora.name", f"{model!r} is what backend {backend.id!r} serves policy {other!r} under"
                )


def _targets(request: PolicyRequest, known: list[Backend]) -> list[Backend]:
    """The backends that an update is for."""
    if request.backends is not None:
        unknown = sorted(set(request.backends) - {backend.id for backend in known})
        if unknown:
            there = ", ".join(sorted(backend.id for backend in known)) or "none"
            raise invalid("backends", f"unknown: {', '.join(unknown)}; there are: {there}")
        known = [backend for backend in known if backend.id in request.backends]
    if not known:
        raise ApiProblem(
            409, "No backends", "no LLM backend is registered; add one with POST /v1/backends and ask again"
        )
    return known
