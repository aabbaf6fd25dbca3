"""Calls of the compatible APIs that submit one rollout and are answered when it has ended.

Such a call waits as a long-poll does: parked, without a thread. It is dispatched again when it goes on, so
what the first dispatch read and decided is kept with the waiter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import redis
import structlog

from rollout.adapters.base import usable
from rollout.schema import FieldError, HandlerInfo, Rollout, RolloutRequest, new_id
from services.dispatch import IdConflict
from services.gateway.auth import caller
from services.gateway.context import Gateway, gateway
from services.gateway.problems import ApiProblem, over_quota
from services.gateway.tasks import check_submission
from services.gateway.waiting import Interest, waiter
from services.state.jobs import JobStore, digest_of
from services.state.tenants import QuotaExceeded

log = structlog.get_logger("gateway")

PATIENCE_S = 3600.0
"""Seconds past its deadline for which a call waits for a rollout; by then the reaper has ended it."""
STOPS_RETRY_S = 2


@dataclass(frozen=True)
class Call:
    """A rollout that somebody waits for."""

    rollout_id: str
    tenant: str
    deadline_s: float
    job: str | None = None
    """The key of its job in Redis; None: nobody can ask for it again."""
    replayed: bool = False
    """Whether the rollout had ended before this call: it is of an earlier one, which may be long ago."""


def begin(
    request: RolloutRequest, job: str | None = None, *, before: Callable[[str], None] = lambda _: None
) -> Call:
    """Submit a rollout, or find the one that the job stands for.

    Args:
        request: Without an id.
        job: As `JobStore.key` has it; None = there is none, so a client that hangs up cancels the rollout.
        before: Is told the rollout's id before it is submitted.

    Raises:
        ApiProblem: It was refused, and nothing was enqueued; 409 for a job with another body.
    """
    gate, tenant = gateway(), caller().tenant
    check_submission([("", request)])
    rollout_id, ended = new_id(), False
    if job is not None:
        body = digest_of(request.model_dump_json())
        known = gate.jobs.claim(job, rollout_id, body, request.limits.deadline_s)
        if known.body != body:
            message = "this id is in use for a job with another body; choose another id"
            field = FieldError(field="job_id", message=message)
            raise ApiProblem(409, "Id in use", f"job_id: {message}", [field])
        rollout_id, ended = known.rollout_id, known.ended
    before(rollout_id)
    try:
        # Also if it is there already: whoever claimed it may have ended before it was submitted.
        gate.dispatcher.submit([request.model_copy(update={"id": rollout_id})], tenant)
    except IdConflict as error:
        raise ApiProblem(409, "Id in use", str(error)) from None
    except QuotaExceeded as error:
        raise over_quota(error) from None
    return Call(rollout_id, tenant.name, request.limits.deadline_s, job, ended)


def finish(call: Call, *, replay_s: float) -> tuple[Rollout, bool]:
    """Wait for the end of a rollout, without a thread where the server can.

    Args:
        replay_s: Seconds for which its job stands for it from now on, if it is not dropped.

    Returns:
        The rollout, and whether it is a replay: under the same job somebody was given it before, or it had
            ended before this call.

    Raises:
        ApiProblem: 503 when the gateway stops, or has no room for another call that waits; 404 when the
            rollout is past its retention.
    """
    gate = gateway()
    if call.job is None:
        waiter().on_hangup = lambda: abandon(gate, call)
    ended = partial(gate.rollouts.ended, call.rollout_id, call.tenant)
    try:
        interest = Interest(rollout_id=call.rollout_id)
        if not gate.waiting.wait(ended, call.deadline_s + PATIENCE_S, interest):
            what = "the rollout is cancelled, because without an id nobody can ask for it; send it again"
            if call.job is not None:
                what = "the rollout goes on; send the same id again"
            raise ApiProblem(503, "Gateway stops", what, retry_after_s=STOPS_RETRY_S)
    except (ApiProblem, redis.RedisError):
        if call.job is None:
            abandon(gate, call)
        raise
    rollout = gate.rollouts.get(call.rollout_id, tenant=call.tenant)
    if rollout is None:
        raise ApiProblem(404, "No such rollout", f"rollout {call.rollout_id!r} is past its retention")
    if call.job is None:
        return rollout, False
    first = gate.jobs.answered(call.job, call.rollout_id, 0.0 if rollout.drop else replay_s)
    return rollout, call.replayed or not first


def abandon(gate: Gateway, call: Call) -> None:
    """Cancel what nobody will ask for. Never raises."""
    try:
        gate.dispatcher.cancel(call.rollout_id, call.tenant)
    except Exception as error:
        # Limits of its own end it, if later.
        log.warning("a rollout that nobody waits for goes on", rollout_id=call.rollout_id, error=str(error))


def lacking(rollout: Rollout) -> str | None:
    """Why a rollout is no sample though it was not dropped; None = it is one, or it was dropped."""
    if rollout.drop or (rollout.trajectory is not None and usable(rollout)):
        return None
    if rollout.trajectory is None:
        return "the trajectory is not kept any more"
    return "the model was not called once, so there is nothing that the reward could teach"


def handlers() -> dict[str, HandlerInfo]:
    """Handlers that the caller may name: whether there are others is none of its business."""
    may_use = caller().tenant.may_use
    return {name: info for name, info in gateway().tasks.handlers().items() if may_use("handlers", name)}


def key_of(api: str, *parts: str) -> str:
    """The key in Redis of a job of the caller's."""
    return JobStore.key(caller().tenant.name, api, *parts)
