"""A stage in its slot; INIT of one rollout after the other, while their messages wait.

Celery takes longer to bring the next message of a wave than INIT of many a rollout takes. So the end of one
and the claim of the next are one call of Redis, which takes a message off the queue, as Celery would.
"""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

import redis
from celery import Task

from rollout.schema import State
from services import logs
from services.messages import message
from services.queues import INIT, TASK_INIT, TASK_RUN, Ref, describe, route
from services.state.rollouts.store import Claim, Finish
from services.version import STAMP
from workers.patience import RedisAway
from workers.process import WorkerProcess
from workers.stage import Body, StageRun, interrupted, work


def ref_to(claim: Claim, node: str | None) -> Ref:
    """What the message of the stage that follows carries."""
    handler = claim.request.handler
    return Ref(id=claim.rollout_id, attempt=claim.attempt, node=node, handler=handler, stamp=STAMP)


async def in_turn(
    process: WorkerProcess, task: Task, run: StageRun, body: Body
) -> tuple[StageRun | None, Finish | None, str]:
    """Do a stage of a rollout, and INIT of those after it.

    Returns:
        The last one, its outcome, which is yet to be entered, and the name of its task for monitors. Once all
        have been entered: None, and why there is no further one.
    """
    name, root, began = task.request.id, None, time.monotonic()
    try:
        while True:
            with logs.context(**run.names):
                outcome = await work(run, body) if run.held.reason is None else interrupted(run)
            if outcome is None or outcome.next != State.READY or not process.may_go_on():
                return run, outcome, name
            ref = ref_to(run.claim, process.settings.node if run.has_sandbox else None)
            # No monitor has seen the message that is taken: its task gets a name here.
            next_name = str(uuid4())
            most_on_node, most_without_sandbox = process.admission.bounds()
            call = process.store.go_on(
                run.claim,
                outcome,
                message(process.services.app, TASK_RUN, (ref,), root or task.request.root_id, name),
                route(TASK_RUN, (ref,), None, None)["queue"],
                queue=INIT,
                owner=process.services.name,
                node=process.settings.node,
                token=next_name,
                most_on_node=most_on_node,
                most_without_sandbox=most_without_sandbox,
            )
            with process.claiming() as cancelled:
                try:
                    answer = await process.services.placements.send(call, patient=False)
                except (redis.RedisError, RedisAway, asyncio.CancelledError):
                    return run, outcome, name
                entered, claim = process.store.went_on(answer)
                if entered != State.READY:
                    return run, outcome, name
                process.let_go(run.held)
                tell, taken_s = process.tell, time.monotonic() - began
                tell("task-succeeded", name, result=describe(ref), runtime=taken_s)
                if not isinstance(claim, Claim):
                    return None, None, claim
                run = StageRun(process.services, process.hold(claim, cancelled), claim)
            name = root = next_name
            began = time.monotonic()
            tell("task-received", name, name=TASK_INIT, args="()", kwargs="{}", root_id=name)
            tell("task-started", name)
            tell("task-claimed", name, args=describe(ref_to(claim, None)))
    except BaseException:
        process.let_go(run.held)
        raise
