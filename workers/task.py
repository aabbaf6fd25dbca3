"""One Celery message of a stage: claim what it brings, do the stage, enter its outcome, go on with the chain.

A stage does not fail: whatever happens in it becomes an outcome. It returns the reference that the next stage
gets, or raises Celery's `Ignore`, and then none follows: the rollout has ended, or another message brings it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace

import redis
import structlog
from celery import Task
from celery.exceptions import Ignore

from rollout.schema import TERMINAL_STATES, Stage, State
from services import logs
from services.queues import Ref, describe
from services.state.rollouts.store import Claim, Finish
from services.version import STAMP
from workers import events
from workers import process as processes
from workers.held import LOST, Held
from workers.patience import RedisAway, wait_for
from workers.process import WorkerProcess
from workers.stage import BACK, CLEANUP_S, Body, StageRun, releases
from workers.wave import in_turn, ref_to, turn

log = structlog.get_logger("stage")

FULL, STOPPED, PASSED_OVER = "full", "stopped", "passed over"
"""Why INIT takes nothing now, although somebody may wait."""
PUT_BACK_S = 1.0
"""For a message of INIT to wait in its slot for room, before it is left to other nodes."""
REDIS_AWAY = "Redis does not answer"


def run_stage(task: Task, stage: Stage, body: Body, ref: Ref | None = None) -> Ref:
    """Do one stage of the rollout that the message names; INIT, whose messages name none, of the next one.

    Raises:
        Ignore: The chain ends here. Monitors are told why.
    """
    process = processes.current()
    with process.slot():
        return _carry(process, task, stage, body, ref)


def _carry(process: WorkerProcess, task: Task, stage: Stage, body: Body, ref: Ref | None) -> Ref:
    if ref is not None and ref.get("stamp", STAMP) > STAMP + 1:
        log.error("message of a release too new to work beside; upgrade this worker", rollout_id=ref["id"])
        raise _chain_ends(process, task.request.id, "too new")
    try:
        claim, held = _take(process, stage, ref)
        put_back_at = time.monotonic() + PUT_BACK_S
        while claim in (FULL, STOPPED) and process.admission.wait_for_room(put_back_at - time.monotonic()):
            claim, held = _take(process, stage, ref)
    except (redis.RedisError, RedisAway) as error:
        # The reaper rings again; the claim, if it was made after all, runs out with its lease.
        log.error(REDIS_AWAY, rollout_id=ref and ref["id"], stage=stage.value, error=str(error))
        raise _chain_ends(process, task.request.id, REDIS_AWAY) from error
    if not isinstance(claim, Claim):
        log.debug("message dropped", rollout_id=ref and ref["id"], stage=stage.value, why=claim)
        if claim == PASSED_OVER:
            time.sleep(PUT_BACK_S)  # for other nodes to take the message
        if claim in (FULL, STOPPED, PASSED_OVER):
            process.services.dispatcher.ring()
        raise _chain_ends(process, task.request.id, claim)
    if ref is None:
        events.tell(process.consumer, "task-claimed", task.request.id, args=describe(ref_to(claim, None)))
    return _run_stage(process, task, StageRun(process.services, held, claim), body)


def _take(process: WorkerProcess, stage: Stage, ref: Ref | None) -> tuple[Claim | str, Held | None]:
    """Claim and enter what was claimed, or say why there is nothing."""
    with process.claiming() as cancelled:
        claim = _claim(process, stage, ref)
        return claim, process.hold(claim, cancelled) if isinstance(claim, Claim) else None


def _claim(process: WorkerProcess, stage: Stage, ref: Ref | None) -> Claim | str:
    """The stage of the rollout that the message names; of INIT, that of the one whose turn it is.

    Waits for Redis: a claim that was made and not heard of would cost the rollout its lease.
    """
    token, name = secrets.token_hex(8), process.services.name
    if ref is not None:
        claim = process.store.claim
        return wait_for(lambda: claim(ref["id"], ref["attempt"], stage, name, token), process.stopping)
    admission = process.admission
    if not admission.is_open:
        return STOPPED
    ask = turn(process)
    claim = wait_for(lambda: process.store.claim_next(**ask, token=token), process.stopping)
    if claim == FULL:
        admission.ring()
    return claim


def _run_stage(process: WorkerProcess, task: Task, run: StageRun, body: Body) -> Ref:
    doing = asyncio.run_coroutine_threadsafe(in_turn(process, task.request, run, body), process.loop)
    last, outcome, name = doing.result()
    if last is None:
        if name == FULL:
            process.admission.ring()
        raise Ignore(name)
    with logs.context(**last.names):
        return _end(process, name, last, outcome)


def _end(process: WorkerProcess, name: str, run: StageRun, outcome: Finish | None) -> Ref:
    """Enter the outcome, and go on with the chain or end it."""
    try:
        # The work is done and would be lost: an outcome waits for a Redis that is away, or full, for as long
        # as it may count. It holds its slot meanwhile, so that no more wait than there are slots.
        entered = LOST
        if (outcome := _let_go(process, run, outcome)) is not None:
            finish = process.store.finish
            entered = wait_for(lambda: finish(run.claim, outcome), process.stopping, run.held.ends_at)
    except (redis.RedisError, RedisAway) as error:
        # The reaper rings again once the lease has run out.
        run.log.error(REDIS_AWAY, error=str(error))
        raise _chain_ends(process, name, REDIS_AWAY) from error
    finally:
        process.let_go(run.held)
    return _after(process, name, run, entered, outcome)


def _let_go(process: WorkerProcess, run: StageRun, outcome: Finish | None) -> Finish | None:
    """Release what nobody needs once the stage has ended so; None: the rollout is not ours any more.

    The outcome is noted first: a worker that slept would take the sandbox from whoever goes on in it, and of
    one that is lost in between nobody could do the stage again.
    """
    if outcome is None or not releases(run, outcome):
        return outcome
    decide = process.store.decide
    if not wait_for(lambda: decide(run.claim, outcome), process.stopping, run.held.ends_at):
        return None
    asyncio.run_coroutine_threadsafe(run.clean_up(), process.loop).result()
    return replace(outcome, trajectory=None)


def _after(process: WorkerProcess, name: str, run: StageRun, entered: str, outcome: Finish | None) -> Ref:
    """Go on with the chain, or end it and tidy up."""
    claim = run.claim
    if entered in (State.READY, State.EVALUATING) and outcome.next == entered:
        return ref_to(claim, process.settings.node if run.has_sandbox else None)
    if entered == State.RUNNING:
        if not run.held.moving:  # else who has it leave sends the message
            process.services.dispatcher.send(Stage.RUN, ref_to(claim, claim.node))
    elif entered == LOST:
        run.log.warning("outcome refused: the rollout is not ours any more")
    elif outcome.next in BACK and outcome.delay_s is None and entered in (State.QUEUED, State.EVALUATING):
        stage = Stage.INIT if entered == State.QUEUED else Stage.EVAL
        process.services.dispatcher.send(stage, ref_to(claim, claim.node))
    else:
        run.log.info("rollout " + entered)
    if entered in (LOST, State.CANCELLED) and run.has_sandbox:
        # A cancel can arrive after the body decided to keep the sandbox for the next stage.
        cleaning = run.clean_up(ours=entered == State.CANCELLED)
        asyncio.run_coroutine_threadsafe(cleaning, process.loop).result(CLEANUP_S + 5)
    if claim.stage is Stage.EVAL and entered in TERMINAL_STATES:
        return ref_to(claim, claim.node)  # the end of a whole chain
    raise _chain_ends(process, name, entered)


def _chain_ends(process: WorkerProcess, name: str, why: str) -> Ignore:
    """What to raise so that Celery sends no next stage, once monitors have been told why."""
    events.tell(process.consumer, "task-stopped", name, result=why)
    return Ignore(why)
