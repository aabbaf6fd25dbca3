"""A stage in its slot; INIT of one rollout after the other, while their messages wait.

Celery takes longer to bring the next message of a wave than INIT of many a rollout takes. So the end of one
and the claim of the next are one call of Redis, which takes a message off the queue, as Celery would.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any
from uuid import uuid4

import redis
from celery.app.task import Context

from rollout.schema import Stage, State
from services import logs
from services.messages import message
from services.queues import INIT, TASK_INIT, TASK_RUN, Ref, describe, route
from services.state.rollouts.store import Claim, Finish
from services.version import STAMP
from workers import events
from workers.held import LOST
from workers.patience import RedisAway
from workers.process import WorkerProcess
from workers.stage import Body, StageRun, interrupted, work


def ref_to(claim: Claim, node: str | None) -> Ref:
    """What the message of the stage that follows carries."""
    handler = claim.request.handler
    return Ref(id=claim.rollout_id, attempt=claim.attempt, node=node, handler=handler, stamp=STAMP)


def turn(process: WorkerProcess) -> dict[str, Any]:
    """What INIT's next claim asks for."""
    most_on_node, most_without_sandbox = process.admission.bounds()
    return {
        "owner": process.services.name,
        "node": process.settings.node,
        "most_on_node": most_on_node,
        "most_without_sandbox": most_without_sandbox,
    }


def may_go_on(process: WorkerProcess) -> bool:
    """Whether a slot that has ended INIT takes the next rollout itself: no other queue waits for it."""
    services = process.services
    return (
        services.stages == [Stage.INIT]
        and INIT in services.app.amqp.queues.consume_from
        and process.tasks <= services.slots
        and process.admission.is_open
    )


async def in_turn(
    process: WorkerProcess, request: Context, run: StageRun, body: Body
) -> tuple[StageRun | None, Finish | None, str]:
    """Do a stage of a rollout, and INIT of those after it.

    Args:
        request: Of the task; `Task.request` is another one in each thread.

    Returns:
        The last one, its outcome, which is yet to be entered, and the name of its task for monitors. Once all
        have been entered: None, and why there is no further one.
    """
    name, root, began = request.id, request.root_id, time.monotonic()
    tell = partial(events.tell, process.consumer)
    try:
        while True:
            run.held.task = asyncio.current_task()
            with logs.context(**run.names):
                outcome = await work(run, body) if run.held.reason is None else interrupted(run)
            if outcome is None or outcome.next != State.READY or not may_go_on(process):
                return run, outcome, name
            ref = ref_to(run.claim, process.settings.node if run.has_sandbox else None)
            next_name = str(uuid4())  # no monitor has seen the message that is taken
            call = process.store.go_on(
                run.claim,
                outcome,
                message(process.services.app, TASK_RUN, (ref,), root, name),
                next_queue=route(TASK_RUN, (ref,), None, None)["queue"],
                queue=INIT,
                token=next_name,
                **turn(process),
            )
            with process.claiming() as cancelled:
                try:
                    answer = await process.services.placements.send(call, patient=False)
                except (redis.RedisError, RedisAway, asyncio.CancelledError):
                    return run, outcome, name
                claim = process.store.went_on(answer)
                if claim in (State.CANCELLED, LOST):
                    return run, outcome, name
                process.let_go(run.held)
                tell("task-succeeded", name, result=repr(ref), runtime=time.monotonic() - began)
                if not isinstance(claim, Claim):
                    return None, None, claim
                run = StageRun(process.services, process.hold(claim, cancelled), claim)
            name, root, began = next_name, next_name, time.monotonic()
            tell("task-received", name, name=TASK_INIT, args="()", kwargs="{}", root_id=name)
            tell("task-started", name)
            tell("task-claimed", name, args=describe(ref_to(claim, None)))
    except BaseException:
        process.let_go(run.held)
        raise
