"""One Celery message of a stage: claim what it brings, do the stage, enter its outcome, go on with the chain.

A stage never raises: it writes an outcome and returns its reference, so that the chain goes on.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent import futures

import redis
import structlog
from celery import Task
from kombu.exceptions import KombuError

from rollout.schema import Stage, State
from services import logs
from services.queues import INIT, Ref
from services.queues import describe as describe_ref
from services.state.rollouts import Claim, Finish
from workers import process as processes
from workers.held import LOST, Held
from workers.patience import RedisAway, wait_for
from workers.process import WorkerProcess
from workers.stage import BACK, CLEANUP_S, Body, StageRun, clean_up, interrupted, work

log = structlog.get_logger("stage")

FULL, STOPPED, PASSED_OVER = "full", "stopped", "passed over"
"""Why INIT takes nothing now, although somebody may wait."""
PUT_BACK_S = 1.0
"""For a message of INIT to wait in its slot for room, before it is left to other nodes."""


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
            process.services.dispatcher.send(INIT, [ref])
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
        return _run_stage(process, task, ref, StageRun(process.services, held, claim), body)


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
            lambda: claim(ref["id"], ref["attempt"], stage, process.services.name, token), process.stopping
        )
    admission = process.admission
    if not admission.is_open:
        return STOPPED
    most_on_node, most_without_sandbox = admission.bounds()
    claim = wait_for(
        lambda: process.store.claim_next(
            ref["id"],
            ref["attempt"],
            process.services.name,
            node=process.settings.node,
            most_on_node=most_on_node,
            most_without_sandbox=most_without_sandbox,
            token=token,
        ),
        process.stopping,
    )
    if claim == FULL:
        admission.ring()
    return claim


def _run_stage(process: WorkerProcess, task: Task, ref: Ref, run: StageRun, body: Body) -> Ref:
    held = run.held
    try:
        try:
            outcome = process.run(held, work(run, body))
        except futures.CancelledError:
            # It was interrupted before its first step.
            outcome = interrupted(run)
            asyncio.run_coroutine_threadsafe(clean_up(run, outcome), process.loop).result()
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
    return _after(process, task, ref, run, entered, outcome)


def _after(
    process: WorkerProcess, task: Task, ref: Ref, run: StageRun, entered: str, outcome: Finish | None
) -> Ref:
    """Go on with the chain, or stop it and tidy up."""
    claim = run.claim
    if entered in (State.READY, State.EVALUATING) and outcome.next == entered:
        node = process.settings.node if run.has_sandbox else None
        return _ref(claim, node)
    _stop_chain(task, ref)
    if entered == LOST:
        run.log.warning("outcome refused: the rollout is not ours any more")
    elif outcome.next in BACK and outcome.delay_s is None and entered in (State.QUEUED, State.EVALUATING):
        stage, node = ("init", None) if entered == State.QUEUED else ("eval", claim.node)
        process.services.dispatcher.send(stage, [_ref(claim, node)])
    else:
        run.log.info("rollout " + entered)
    if entered in (LOST, State.CANCELLED) and run.has_sandbox:
        # A cancel can arrive after the body decided to keep the sandbox for the next stage.
        asyncio.run_coroutine_threadsafe(run.clean_up(), process.loop).result(CLEANUP_S + 5)
    return ref


def _ref(claim: Claim, node: str | None) -> Ref:
    return Ref(id=claim.rollout_id, attempt=claim.attempt, node=node, handler=claim.request.handler)


def _tell_monitors(process: WorkerProcess, task: Task, ref: Ref, claim: Claim) -> None:
    """Have Flower show what the task works on, where its message did not say.

    One of INIT may have brought another rollout than it names, and the reaper knows no handlers.
    """
    description = describe_ref(_ref(claim, ref["node"]))
    if description == describe_ref(ref):
        return
    # Not `task.send_event`: it would overtake the consumer's own events, which are sent in bundles.
    events = getattr(process.consumer, "event_dispatcher", None)
    if events is None or not events.enabled:
        return
    try:
        events.send("task-started", uuid=task.request.id, args=description)
    except (KombuError, redis.RedisError) as error:
        log.debug("monitors were not told", error=str(error))


def _stop_chain(task: Task, ref: Ref) -> Ref:
    """Keep Celery from sending the next stage: there is none, or somebody else's message brings it."""
    task.request.chain = None
    return ref
