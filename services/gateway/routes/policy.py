"""`/v1/policies`: which weights the backends serve of each policy, and their exchange.

`/v1/policy` is that of `default`.
"""

from __future__ import annotations

from collections.abc import Mapping

from flask import Blueprint, Response

from rollout.schema import DEFAULT_POLICY, Backend
from rollout.schema.policy import PolicyList, PolicyRequest, PolicyStatus, PolicyUpdate
from services.engines.labels import misfit
from services.gateway.context import gateway
from services.gateway.http import Wait, operation, reply
from services.gateway.problems import ApiProblem, invalid
from services.state.api_keys import SHARED, TRAIN, Scope
from services.state.backends.waits import Waits, waits
from services.state.policy.store import UpdateConflict, path_of

blueprint = Blueprint("policy", __name__, url_prefix="/v1")

SEEN = (Scope.READ, TRAIN)
DEFAULT = {"name": DEFAULT_POLICY}


@blueprint.get("/policies")
@operation(scope=SHARED)
def list_policies() -> PolicyList:
    """Every policy: its backends, current weights and updates."""
    gate = gateway()
    about = gate.backends.list(), waits(gate.redis)
    return PolicyList(policies=[_status(name, *about) for name in sorted(gate.policy.names())])


@blueprint.get("/policies/<name>")
@blueprint.get("/policy", endpoint="show_default", defaults=DEFAULT)
@operation(scope=SEEN)
def show(name: str) -> PolicyStatus:
    """Current weights of a policy, update under way, latest updates."""
    gate = gateway()
    return _status(_known(name), gate.backends.list(), waits(gate.redis))


@blueprint.post("/policies/<name>")
@blueprint.post("/policy", endpoint="update_default", defaults=DEFAULT)
@operation(409, answers={200: PolicyUpdate, 202: PolicyUpdate}, scope=TRAIN)
def update(name: str, body: PolicyRequest) -> Response:
    """Bring new weights to the LLM backends that serve a policy; the RUN workers do it."""
    gate, name = gateway(), _known(name)
    most = gate.settings.max_wait_s
    if body.wait > most:
        raise invalid("wait", f"{body.wait:g} is more than {most:g}; ask for the rest at its own address")
    try:
        made, _ = gate.policy.create(body, _targets(name, body, gate.backends.list(policy=name)), name)
    except UpdateConflict as error:
        raise ApiProblem(409, "Another update is under way", str(error)) from None
    if body.wait:
        made = gate.policy.wait(made.id, body.wait, name) or made
    return reply(made, 200 if made.state.ended else 202)


@blueprint.delete("/policies/<name>")
@blueprint.delete("/policy", endpoint="forget_default", defaults=DEFAULT)
@operation(409, answers={204: None}, scope=TRAIN)
def forget(name: str) -> Response:
    """Forget a policy's weights, once no backend serves them: backends of any weights take rollouts then.

    A policy that no backend serves is forgotten altogether.
    """
    gate, name = gateway(), _known(name)
    gone = name != DEFAULT_POLICY and not gate.backends.list(policy=name)
    try:
        serving = gate.policy.forget(name, gone=gone)
    except UpdateConflict as error:
        raise ApiProblem(409, "An update is under way", str(error)) from None
    if serving:
        there = ", ".join(serving)
        raise ApiProblem(
            409, "Weights in use", f"{there} serve the current weights: update them, or remove them first"
        )
    return Response(status=204)


@blueprint.get("/policies/<name>/updates/<update_id>")
@blueprint.get("/policy/updates/<update_id>", endpoint="get_default", defaults=DEFAULT)
@operation(scope=SEEN)
def get(name: str, update_id: str, wait: Wait) -> PolicyUpdate:
    """One update of a policy; with `wait`, answers when it has ended or when the wait is over."""
    policy_update = gateway().policy.wait(update_id, wait, _known(name))
    if policy_update is None:
        detail = f"there is no update {update_id!r}; GET {path_of(name)} lists the latest"
        raise ApiProblem(404, "No such update", detail)
    return policy_update


def _known(name: str) -> str:
    if name != DEFAULT_POLICY and name not in (names := gateway().policy.names()):
        detail = f"there is no policy {name!r}; there are: {', '.join(sorted(names))}"
        raise ApiProblem(404, "No such policy", detail)
    return name


def _status(name: str, backends: list[Backend], waiting: Mapping[tuple[str, str], Waits]) -> PolicyStatus:
    its = [of_tenant for (policy, _), of_tenant in waiting.items() if policy == name]
    more = {
        "backends": sorted(backend.id for backend in backends if name in backend.served),
        "waiting": sum(of_tenant.waiting for of_tenant in its),
        "longest_wait_s": max((of_tenant.longest_s for of_tenant in its), default=0.0),
    }
    return gateway().policy.status(name).model_copy(update=more)


def _targets(name: str, request: PolicyRequest, known: list[Backend]) -> list[Backend]:
    """The backends that an update is for, all of which serve the policy."""
    # A server that tells no token ids takes no weights from here either.
    known = [backend for backend in known if backend.api != "chat"]
    if request.backends is not None:
        unknown = sorted(set(request.backends) - {backend.id for backend in known})
        if unknown:
            there = ", ".join(sorted(backend.id for backend in known)) or "none"
            of = "" if name == DEFAULT_POLICY else f" for policy {name!r}"
            raise invalid("backends", f"unknown: {', '.join(unknown)}; there are{of}: {there}")
        known = [backend for backend in known if backend.id in request.backends]
    if not known:
        of = "" if name == DEFAULT_POLICY else f" that serves policy {name!r} and takes weights"
        raise ApiProblem(
            409,
            "No backends",
            f"no LLM backend{of} is registered; add one with POST /v1/backends and ask again",
        )
    for backend in known:
        if wrong := misfit(backend.of(name), request):
            raise invalid(*wrong)
    return known
