"""`/v1/policies`: which weights the backends serve of each policy, and their exchange.

`/v1/policy` is that of `default`.
"""

from __future__ import annotations

from flask import Blueprint, Response

from rollout.schema import DEFAULT_POLICY, Backend
from rollout.schema.policy import PolicyList, PolicyRequest, PolicyStatus, PolicyUpdate
from services.engines.labels import misfit
from services.gateway.context import gateway
from services.gateway.http import Wait, operation, reply
from services.gateway.problems import ApiProblem, invalid
from services.state.api_keys import SHARED, TRAIN, TRAIN_DEFAULT, Scope
from services.state.policy.store import UpdateConflict, path_of

blueprint = Blueprint("policy", __name__, url_prefix="/v1")
SEEN, SEEN_DEFAULT = (Scope.READ, TRAIN), (Scope.READ, TRAIN_DEFAULT)


@blueprint.get("/policies")
@operation(scope=SHARED)
def list_policies() -> PolicyList:
    """Every policy: its backends, current weights and updates."""
    gate = gateway()
    backends = gate.backends.list()
    return PolicyList(policies=[_status(name, backends) for name in sorted(gate.policy.names())])


@blueprint.get("/policies/<name>")
@operation(scope=SEEN)
def show_named(name: str) -> PolicyStatus:
    """Current weights of a policy, update under way, latest updates."""
    return _status(_known(name), gateway().backends.list())


@blueprint.get("/policy")
@operation(scope=SEEN_DEFAULT)
def show() -> PolicyStatus:
    """Current policy, update under way, latest updates."""
    return _status(DEFAULT_POLICY, gateway().backends.list())


@blueprint.post("/policies/<name>")
@operation(409, answers={200: PolicyUpdate, 202: PolicyUpdate}, scope=TRAIN)
def update_named(name: str, body: PolicyRequest) -> Response:
    """Bring new weights to the LLM backends that serve a policy; the RUN workers do it."""
    return _update(_known(name), body)


@blueprint.post("/policy")
@operation(409, answers={200: PolicyUpdate, 202: PolicyUpdate}, scope=TRAIN_DEFAULT)
def update(body: PolicyRequest) -> Response:
    """Bring new weights to the LLM backends; the RUN workers do it."""
    return _update(DEFAULT_POLICY, body)


@blueprint.delete("/policies/<name>")
@operation(409, answers={204: None}, scope=TRAIN)
def forget_named(name: str) -> Response:
    """Forget a policy's weights, once no backend serves them; one without backends goes altogether."""
    return _forget(_known(name))


@blueprint.delete("/policy")
@operation(409, answers={204: None}, scope=TRAIN_DEFAULT)
def forget() -> Response:
    """Forget the current weights, once no backend serves them: backends of any weights take rollouts then."""
    return _forget(DEFAULT_POLICY)


@blueprint.get("/policies/<name>/updates/<update_id>")
@operation(scope=SEEN)
def get_named(name: str, update_id: str, wait: Wait) -> PolicyUpdate:
    """One update of a policy; with `wait`, answers when it has ended or when the wait is over."""
    return _get(_known(name), update_id, wait)


@blueprint.get("/policy/updates/<update_id>")
@operation(scope=SEEN_DEFAULT)
def get(update_id: str, wait: Wait) -> PolicyUpdate:
    """One update of the policy; with `wait`, answers when it has ended or when the wait is over."""
    return _get(DEFAULT_POLICY, update_id, wait)


def _known(name: str) -> str:
    """A policy's name, if there is one of it."""
    if name != DEFAULT_POLICY and name not in (names := gateway().policy.names()):
        detail = f"there is no policy {name!r}; there are: {', '.join(sorted(names))}"
        raise ApiProblem(404, "No such policy", detail)
    return name


def _status(name: str, backends: list[Backend]) -> PolicyStatus:
    serving = sorted(backend.id for backend in backends if name in backend.served)
    return gateway().policy.status(name).model_copy(update={"backends": serving})


def _update(name: str, body: PolicyRequest) -> Response:
    gate = gateway()
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


def _forget(name: str) -> Response:
    gate = gateway()
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


def _get(name: str, update_id: str, wait: float) -> PolicyUpdate:
    policy_update = gateway().policy.wait(update_id, wait, name)
    if policy_update is None:
        detail = f"there is no update {update_id!r}; GET {path_of(name)} lists the latest"
        raise ApiProblem(404, "No such update", detail)
    return policy_update


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
