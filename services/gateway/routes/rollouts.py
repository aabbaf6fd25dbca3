"""`/v1/rollouts`: submit, get, list, cancel."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from flask import Blueprint, Response
from pydantic import Field

from rollout import schema
from rollout.schema import (
    AgentAccess,
    Blame,
    CancelResponse,
    CheckpointList,
    FieldError,
    ForkRequest,
    Rollout,
    RolloutId,
    RolloutPage,
    RolloutRequest,
    State,
    SubmitRequest,
    SubmitResponse,
)
from rollout.schema.base import MAX_INT53, Items, Strict
from services.dispatch import IdConflict
from services.gateway.agents import AgentDoor, is_external, so_far
from services.gateway.answers import Answer
from services.gateway.auth import caller
from services.gateway.context import gateway
from services.gateway.forks import requests_of
from services.gateway.http import MAX_PAGE, Include, Limit, Tag, Tenant, Wait, operation, query
from services.gateway.problems import ApiProblem, absent, invalid
from services.gateway.waiting import Interest
from services.state.api_keys import Scope
from services.state.rollouts import listing

blueprint = Blueprint("rollouts", __name__, url_prefix="/v1")


class CancelRequest(Strict):
    """Which rollouts to cancel: exactly one of the fields."""

    ids: Annotated[Items[RolloutId], Field(max_length=MAX_PAGE)] | None = None
    group_id: RolloutId | None = None
    tag: schema.Tag | None = None


@blueprint.post("/rollouts")
@operation(404, 409, 429, status=202, scope=Scope.SUBMIT)
def submit(body: ForkRequest | SubmitRequest | RolloutRequest) -> SubmitResponse:
    """Submit one request or many, or forks of rollouts; all or none."""
    single = not isinstance(body, SubmitRequest)
    requests = requests_of([body], None) if single else requests_of(body.requests, "requests")
    gate = gateway()
    door = AgentDoor(gate.redis, gate.settings) if any(map(is_external, requests)) else None
    try:
        submitted = gate.dispatcher.submit(requests, caller().tenant)
    except IdConflict as error:
        wrong = set(error.ids)
        fields = [
            FieldError(
                field="id" if single else f"requests.{position}.id",
                message="this id is in use with another body or by somebody else; choose another id",
            )
            for position, item in enumerate(requests)
            if wrong & set(item.rollout_ids()[1])
        ]
        raise ApiProblem(409, "Id in use", f"{error}; nothing was enqueued", fields) from None
    if door is not None:
        door.tell(requests, submitted)
    return SubmitResponse(rollouts=submitted)


@blueprint.get("/rollouts/<rollout_id>")
@operation(429, answers={200: Rollout}, arrays=True)
def get(rollout_id: str, wait: Wait, include: Include, tenant: Tenant) -> Response:
    """One rollout; with `wait`, answers when it has ended or when the wait is over."""
    gate = gateway()
    if wait:
        ended = partial(gate.rollouts.ended, rollout_id, tenant)
        gate.waiting.wait(ended, wait, Interest(rollout_id=rollout_id))
    answer = Answer()
    return answer.send(read(answer, rollout_id, tenant, include))


def read(answer: Answer, rollout_id: str, tenant: str | None, include: Include = "trajectory") -> Rollout:
    """A rollout to be put into an answer; of one in RUN with its turns so far.

    Raises:
        ApiProblem: 404; it is not there, or not the tenant's.
    """
    rollouts = answer.rollouts([rollout_id], trajectory=include == "trajectory", tenant=tenant)
    if not rollouts:
        # Also somebody else's: a 403 would say that it exists.
        raise absent(rollout_id)
    (rollout,) = rollouts
    if include == "trajectory" and rollout.state is State.RUNNING:
        gate, driven = gateway(), rollout.request.agent is not None
        rollout.trajectory = so_far(gate.redis, rollout) if driven else gate.rollouts.so_far(rollout)
    return rollout


@blueprint.get("/rollouts/<rollout_id>/agent")
@operation(409, 410, scope=Scope.SUBMIT)
def agent(rollout_id: str, tenant: Tenant) -> AgentAccess:
    """Where a program that drives the rollout from elsewhere finds the model, and its keys now."""
    gate, rollout = gateway(), read(Answer(), rollout_id, tenant, "summary")
    if not is_external(rollout.request):
        detail = f"rollout {rollout_id!r} is not driven from elsewhere: it has no agent.harness 'external'"
        raise ApiProblem(409, "Driven here", detail)
    if rollout.state.terminal:
        detail = f"rollout {rollout_id!r} is {rollout.state.value}, and its keys ended with it"
        raise ApiProblem(410, "Ended", detail)
    return AgentDoor(gate.redis, gate.settings).access(rollout_id, rollout.attempt)


@blueprint.get("/rollouts/<rollout_id>/checkpoints")
@operation()
def checkpoints(rollout_id: str, tenant: Tenant) -> CheckpointList:
    """The turns of a rollout from which forks can go on."""
    read(Answer(), rollout_id, tenant, "summary")
    # What carrying out a fork takes besides is not shown: a model gives the fields of its field's type alone.
    return CheckpointList(checkpoints=gateway().checkpoints.list(rollout_id))


@blueprint.get("/rollouts")
@operation()
def list_rollouts(
    state: Annotated[State | None, query("Only this state.")],
    handler: Annotated[str | None, query("Only this handler.")],
    group_id: Annotated[str | None, query("Only this group.")],
    tag: Tag,
    policy_version: Annotated[str | None, query("Only those that weights of this version sampled from.")],
    blame: Annotated[Blame | None, query("Only failures that are laid to this.")],
    drop: Annotated[bool | None, query("Only those that are dropped, or those that are not.")],
    reward_min: Annotated[float | None, query("Only rewards from this one on.", allow_inf_nan=False)],
    reward_max: Annotated[float | None, query("Only rewards up to this one.", allow_inf_nan=False)],
    limit: Limit,
    cursor: Annotated[int, query("Where the last page ended.", 0, ge=0, le=MAX_INT53)],
    tenant: Tenant,
) -> RolloutPage:
    """List rollouts, the newest first, by any of the filters."""
    filters = {"state": state, "handler": handler, "group_id": group_id, "tag": tag, "tenant": tenant}
    filters |= {"policy_version": policy_version, "blame": blame, "drop": drop}
    filters |= {"reward_min": reward_min, "reward_max": reward_max}
    gate = gateway()
    rollouts, more = listing.page(gate.redis, gate.rollouts, cursor, limit, **filters)
    return RolloutPage(rollouts=rollouts, cursor=None if more is None else str(more))


@blueprint.post("/rollouts/<rollout_id>/cancel")
@operation(scope=Scope.SUBMIT)
def cancel(rollout_id: str, tenant: Tenant) -> dict[str, Any]:
    """Cancel one rollout. Twice, or after the end, is harmless and says so."""
    word, state = gateway().dispatcher.cancel(rollout_id, tenant)
    if word == "gone":
        raise absent(rollout_id)
    return {
        "id": rollout_id,
        "state": state,
        "cancelling": word == "cancelling",
        "already_ended": word == "ended",
    }


@blueprint.post("/rollouts/cancel")
@operation(scope=Scope.SUBMIT)
def cancel_many(body: CancelRequest, tenant: Tenant) -> CancelResponse:
    """Cancel by ids, group or tag; ids that are unknown are named."""
    if len(body.model_fields_set) != 1:
        raise invalid("(body)", "give exactly one of ids, group_id, tag")
    gate, ids = gateway(), body.ids
    if ids is None:
        if tenant is None:
            raise invalid("tenant", "name one tenant: groups and tags are each tenant's own")
        ids = gate.rollouts.ids(group_id=body.group_id, tag=body.tag, tenant=tenant, limit=10**9)
    words = [word for word, _ in gate.dispatcher.cancel_many(ids, tenant)]
    return CancelResponse(
        cancelled=words.count("cancelled") + words.count("cancelling"),
        already_ended=words.count("ended"),
        unknown=words.count("gone"),
        unknown_ids=[name for name, word in zip(body.ids or (), words, strict=False) if word == "gone"],
    )
