"""What the three stages share: claim, work under limits, lay blame, clean up, finish.

A stage never raises: it writes an outcome and returns its reference, so that the chain goes on.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent import futures
from typing import Any, TypeVar

import redis
import structlog
from celery import Task
from kombu.exceptions import KombuError

from rollout.schema import ErrorInfo, Stage, State
from rollout.trajectory import FinishReason
from sandbox.client import SandboxClient
from sandbox.errors import SandboxError
from sandbox.spec import Fate
from services import logs
from services.queues import INIT, Ref
from services.queues import describe as describe_ref
from services.state.rollouts import Claim, Finish
from workers import process as processes
from workers.absence import unstarted
from workers.agent.router import BackendRouter
from workers.errors import (
    AgentFault,
    DeadlinePassed,
    HandlerError,
    StageError,
    TaskError,
    UnknownHandler,
    describe,
    from_sandbox,
    laid,
    time_limit,
)
from workers.handlers.base import AgentHandler, Context
from workers.patience import RedisAway, wait_for
from workers.process import CANCEL, LOST, OVERDUE, SHUTDOWN, Held, WorkerProcess
from workers.sandboxes import Sandboxes

log = structlog.get_logger("stage")

CLEANUP_S = 20.0
BACK = ("handback", "elsewhere")
"""Outcomes that give a rollout back as it is."""
FULL, STOPPED, PASSED_OVER = "full", "stopped", "passed over"
"""Why INIT takes nothing now, although somebody may wait."""
PUT_BACK_S = 1.0
"""For a message of INIT to wait in its slot for room, before it is left to other nodes."""
FATE_S = 5.0
"""Most seconds that cleaning up may hold a finished stage."""


C = TypeVar("C", bound=Context)


class StageRun:
    """One stage of one rollout on this worker, from claim to finish."""

    def __init__(self, process: WorkerProcess, held: Held, claim: Claim) -> None:
        self.process = process
        self.held = held
        self.claim = claim
        self.log = log.bind(
            rollout_id=claim.rollout_id,
            tenant=claim.tenant,
            attempt=claim.attempt,
            stage=claim.stage.value,
            fence=claim.fence,
        )
        self.sandboxes = Sandboxes(
            process.host,
            process.store,
            process.settings,
            process.tenants,
            tenant=claim.tenant,
            rollout_id=claim.rollout_id,
            attempt=claim.attempt,
            fence=claim.fence,
            deadline_in_s=claim.deadline_in_s,
        )

    @property
    def has_sandbox(self) -> bool:
        return self.sandboxes.booted or self.claim.sandbox is not None

    def context(self, kind: type[C], handler: AgentHandler[Any], **more: Any) -> C:
        """What the handler gets in this stage.

        Raises:
            TaskError: The task does not fit the handler's model.
        """
        claim = self.claim
        return kind(
            rollout_id=claim.rollout_id,
            group_id=claim.group_id,
            index=claim.index,
            attempt=claim.attempt,
            task=handler.check_task(claim.request.task),
            request=claim.request,
            log=self.log,
            sandbox=SandboxClient(claim.sandbox_socket) if claim.sandbox_socket else None,
            **more,
        )

    def router(self) -> BackendRouter:
        """What the rollout's model calls go through."""
        claim, process = self.claim, self.process
        return BackendRouter(
            claim.rollout_id,
            process.placements,
            process.http(),
            fence=claim.fence,
            # Each tenant has its own groups: one of the same name elsewhere is another one.
            group_id=f"{claim.tenant}/{claim.group_id}" if claim.group_id != claim.rollout_id else None,
            policy_version=claim.request.policy_version,
            wait_s=process.settings.backend_wait_s,
        )

    async def fate(self) -> Fate | None:
        """What the host knows of the end of the rollout's sandbox. Never raises."""
        sandbox_id = self.sandboxes.own_id or (self.claim.sandbox and self.claim.sandbox.id)
        if not sandbox_id:
            return None
        try:
            async with asyncio.timeout(FATE_S):
                return await self.process.host.fate(sandbox_id)
        except Exception as error:
            self.log.warning("the sandbox host does not say how the sandbox ended", error=str(error))
            return None

    async def blame(self, error: SandboxError) -> StageError:
        """A failure of the rollout's sandbox, laid to whom the host's knowledge of its end points at."""
        return from_sandbox(error, await self.fate())

    async def clean_up(self) -> None:
        """Release what the attempt holds on this node. Never raises: the host's own limit is behind."""
        if not self.has_sandbox:
            return
        try:
            async with asyncio.timeout(CLEANUP_S):
                await self.sandboxes.release()
        except Exception as error:
            self.log.warning("sandbox not released; the host's time limit will end it", error=str(error))

    def laid(self, error: Exception) -> Exception:
        """The error as somebody's, see `workers.errors.laid`."""
        if isinstance(error, StageError | SandboxError):
            return error
        return laid(error, self.process.handlers.get(self.claim.request.handler))

    def init_nodes(self) -> set[str]:
        """The nodes that do INIT now."""
        workers = self.process.fleet.workers()
        return {worker.node for worker in workers if Stage.INIT.value in worker.stages}

    def retry_delay(self) -> float:
        return self.process.settings.retry_delay_s * 2 ** (self.claim.attempt - 1)


Body = Callable[[StageRun], Awaitable[Finish]]
"""A stage's own work. What it raises is turned into an outcome here."""


def error_fields(error: ErrorInfo) -> dict[str, str]:
    """Fields of the record that say what went wrong, and that the sample is not to be trained on."""
    return {
        "error": error.model_dump_json(),
        "blame": error.blame.value,
        "drop": "1",
        "drop_reason": f"{error.blame.value}: {error.type}",
        "reward": "",
    }


def failed(run: StageRun, error: Exception) -> dict[str, str]:
    """Say in the log that the stage failed; the record's fields that say so too."""
    info = describe(run.laid(error), run.claim.stage)
    run.log.warning("stage failed", blame=info.blame.value, error=info.message, type=info.type)
    return error_fields(info) | {"finish_reason": FinishReason.ERROR.value}


def failure(run: StageRun, error: Exception) -> Finish:
    """The outcome of a failed stage: another attempt where that may help, else the end."""
    if isinstance(error, AgentFault):  # RUN and EVAL score those; in INIT no agent has done anything yet
        error = TaskError(str(error))
    if isinstance(error, UnknownHandler):
        # An older release, say, in the middle of an upgrade: whoever knows the handler takes it.
        return Finish("elsewhere", failed(run, error), delay_s=run.process.settings.retry_delay_s)
    error = run.laid(error)
    fields = failed(run, error)
    retry = isinstance(error, StageError) and error.retry
    return Finish("again" if retry else State.FAILED, fields, delay_s=run.retry_delay() if retry else None)


def _interrupted(run: StageRun) -> Finish | None:
    """The outcome of a stage that was interrupted from outside; None: it is not ours any more."""
    reason = run.held.reason
    if reason == CANCEL:
        return Finish(State.CANCELLED)
    if reason == OVERDUE:
        info = describe(DeadlinePassed("the deadline of the rollout passed"), run.claim.stage)
        return Finish(State.TIMED_OUT, error_fields(info) | {"finish_reason": FinishReason.TIME_LIMIT.value})
    if reason == SHUTDOWN:
        return Finish("handback")
    return None


async def work(run: StageRun, body: Body) -> Finish | None:
    """The body under the rollout's deadline; every end becomes an outcome."""
    claim = run.claim
    try:
        async with time_limit(claim.deadline_in_s, DeadlinePassed, "the deadline of the rollout passed"):
            outcome = await body(run)
        run.held.decided = True
    except DeadlinePassed:
        run.held.reason = run.held.reason or OVERDUE
        outcome = _interrupted(run)
    except asyncio.CancelledError:
        if run.held.reason is None:
            # Nobody asked for it: the handler let a cancel of its own escape.
            outcome = failure(run, HandlerError("the handler raised CancelledError"))
        else:
            # The request has been heard; the task goes on to clean up.
            asyncio.current_task().uncancel()
            outcome = _interrupted(run)
    except Exception as error:
        run.held.decided = True
        blamed = await run.blame(error) if isinstance(error, SandboxError) else error
        outcome = await unstarted(run, error, failure(run, blamed))
    run.held.decided = True
    await _clean_up(run, outcome)
    return outcome


async def _clean_up(run: StageRun, outcome: Finish | None) -> None:
    """Release what the next stage does not need."""
    keeps_sandbox = outcome is not None and outcome.next in (State.READY, State.EVALUATING)
    # An EVAL that is handed back is done again on the same sandbox.
    keeps_sandbox |= outcome is not None and outcome.next in BACK and run.claim.stage is Stage.EVAL
    if not keeps_sandbox:
        await run.clean_up()


def run_stage(task: Task, ref: Ref, stage: Stage, body: Body) -> Ref:
    """Do one stage of the rollout that the message names, if it is ours to do."""
    process = processes.current()
    try:
        claim, held = _take(process, ref, stage)
        put_back_at = time.monotonic() + PUT_BACK_S
        while claim in (FULL, STOPPED) and process.admission.wait_for_room(put_back_at - time.monotonic()):
            claim, held = _take(process, ref, stage)
    except (redis.RedisError, RedisAway) as error:
        # The reaper rings again; the claim, if it was made after all, runs out with its lease.
        log.error("Redis does not answer", rollout_id=ref["id"], stage=stage.value, error=str(error))
        return _stop_chain(task, ref)
    if not isinstance(claim, Claim):
        log.debug("message dropped", rollout_id=ref["id"], stage=stage.value, why=claim)
        if claim == PASSED_OVER:
            time.sleep(PUT_BACK_S)  # for other nodes to take the message
        if claim in (FULL, STOPPED, PASSED_OVER):
            process.dispatcher.send(INIT, [ref])
        return _stop_chain(task, ref)
    _tell_monitors(process, task, ref, claim)
    # The coroutine on the event loop inherits this context, and so do the handler and its libraries.
    with logs.context(
        rollout_id=claim.rollout_id,
        attempt=claim.attempt,
        stage=stage.value,
        fence=claim.fence,
        tenant=claim.tenant,
    ):
        return _run_stage(task, ref, StageRun(process, held, claim), body)


def _take(process: WorkerProcess, ref: Ref, stage: Stage) -> tuple[Claim | str, Held | None]:
    """Claim and enter what was claimed, or say why there is nothing."""
    with process.claiming() as cancelled:
        claim = _claim(process, ref, stage)
        return claim, process.hold(claim, cancelled) if isinstance(claim, Claim) else None


def _claim(process: WorkerProcess, ref: Ref, stage: Stage) -> Claim | str:
    """The stage of the rollout that the message names; of INIT, that of the one whose turn it is.

    Waits for Redis: a claim that was made and not heard of would cost the rollout its lease.
    """
    token = secrets.token_hex(8)
    if stage is not Stage.INIT:
        claim = process.store.claim
        return wait_for(
            lambda: claim(ref["id"], ref["attempt"], stage, process.name, token), process.stopping
        )
    admission = process.admission
    if not admission.is_open:
        return STOPPED
    most_on_node, most_without_sandbox = admission.bounds()
    claim = wait_for(
        lambda: process.store.claim_next(
            ref["id"],
            ref["attempt"],
            process.name,
            node=process.settings.node,
            most_on_node=most_on_node,
            most_without_sandbox=most_without_sandbox,
            token=token,
        ),
        process.stopping,
    )
    if claim == FULL:
        admission.found_full()
    return claim


def _run_stage(task: Task, ref: Ref, run: StageRun, body: Body) -> Ref:
    process, held = run.process, run.held
    try:
        try:
            outcome = process.run(held, work(run, body))
        except futures.CancelledError:
            # It was interrupted before its first step.
            outcome = _interrupted(run)
            asyncio.run_coroutine_threadsafe(_clean_up(run, outcome), process.loop).result()
        # The work is done and would be lost: an outcome waits for a Redis that is away, or full, for as long
        # as it may count. It holds its slot meanwhile, so that no more wait than there are slots.
        entered = LOST
        if outcome is not None:
            finish = process.store.finish
            entered = wait_for(lambda: finish(run.claim, outcome), process.stopping, held.ends_at)
    except (redis.RedisError, RedisAway) as error:
        # The reaper rings again once the lease has run out.
        run.log.error("Redis does not answer", error=str(error))
        return _stop_chain(task, ref)
    finally:
        process.let_go(held)
    return _after(task, ref, run, entered, outcome)


def _after(task: Task, ref: Ref, run: StageRun, entered: str, outcome: Finish | None) -> Ref:
    """Go on with the chain, or stop it and tidy up."""
    claim = run.claim
    if entered in (State.READY, State.EVALUATING) and outcome.next == entered:
        node = run.process.settings.node if run.has_sandbox else None
        return _ref(claim, node)
    _stop_chain(task, ref)
    if entered == LOST:
        run.log.warning("outcome refused: the rollout is not ours any more")
    elif outcome.next in BACK and outcome.delay_s is None and entered in (State.QUEUED, State.EVALUATING):
        stage, node = ("init", None) if entered == State.QUEUED else ("eval", claim.node)
        run.process.dispatcher.send(stage, [_ref(claim, node)])
    else:
        run.log.info("rollout " + entered)
    if entered in (LOST, State.CANCELLED) and run.has_sandbox:
        # A cancel can arrive after the body decided to keep the sandbox for the next stage.
        asyncio.run_coroutine_threadsafe(run.clean_up(), run.process.loop).result(CLEANUP_S + 5)
    return ref


def _ref(claim: Claim, node: str | None) -> Ref:
    return Ref(id=claim.rollout_id, attempt=claim.attempt, node=node, handler=claim.request.handler)


def _tell_monitors(process: WorkerProcess, task: Task, ref: Ref, claim: Claim) -> None:
    """Have Flower show what the task works on, where its message did not say.

    One of INIT may have brought another rollout than it names, and the reaper knows no handlers.
    """
    told = describe_ref(_ref(claim, ref["node"]))
    if told == describe_ref(ref):
        return
    # Not `task.send_event`: it would overtake the consumer's own events, which are sent in bundles.
    events = getattr(process.consumer, "event_dispatcher", None)
    if events is None or not events.enabled:
        return
    try:
        events.send("task-started", uuid=task.request.id, args=told)
    except (KombuError, redis.RedisError) as error:
        log.debug("monitors were not told", error=str(error))


def _stop_chain(task: Task, ref: Ref) -> Ref:
    """Keep Celery from sending the next stage: there is none, or somebody else's message brings it."""
    task.request.chain = None
    return ref


def outcome_fields(
    *,
    finish_reason: FinishReason | None = None,
    metrics: dict[str, float] | None = None,
    **more: Any,
) -> dict[str, str]:
    """Fields of the record, as strings."""
    fields = {name: str(value) for name, value in more.items() if value is not None}
    if finish_reason is not None:
        fields["finish_reason"] = finish_reason.value
    if metrics:
        # JSON has no place for others, and a reader none for null.
        fields["metrics"] = json.dumps({name: one for name, one in metrics.items() if math.isfinite(one)})
    return fields
