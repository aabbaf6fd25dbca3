"""The Celery application: `celery -A workers.app worker -Q run` joins the RUN fleet, and so on."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import redis
import structlog
from celery import Task, signals
from celery.worker.control import control_command
from kombu import Exchange, Queue

from rollout.schema import Stage
from services import logs
from services.queues import (
    EVAL,
    RUN,
    STAGE_TASK,
    TASK_CLEANUP,
    TASK_EVALUATE,
    TASK_INIT,
    TASK_RUN,
    Ref,
    make_celery,
    queue_for,
)
from services.settings import settings
from services.state.redis import connect
from workers import events, process
from workers.arrival import carried
from workers.chores.memory import go_on
from workers.evaluate import evaluate
from workers.init import init
from workers.run import run_turns
from workers.sandboxes import release_attempts
from workers.stage import CLEANUP_S
from workers.task import run_stage

log = structlog.get_logger("worker")
app = make_celery(settings())
events.bundle(app)


class StageTask(Task):
    """A stage's task, whose chain goes on by the short way."""

    def apply_async(self, args: Sequence[Ref], *_: Any, root_id: str, parent_id: str, **__: Any) -> None:
        """Send the message of the stage that follows; Celery calls it when a stage has ended."""
        stage = next(stage for stage, task in STAGE_TASK.items() if task == self.name)
        process.current().services.dispatcher.send(stage, args[0], root_id, parent_id)


@app.task(name=TASK_INIT, bind=True)
def init_task(self: Task) -> Ref:
    """INIT of the rollout whose turn it is."""
    return run_stage(self, Stage.INIT, init)


@app.task(name=TASK_RUN, bind=True, base=StageTask)
def run_task(self: Task, ref: Ref) -> Ref:
    """RUN of one rollout."""
    return run_stage(self, Stage.RUN, carried(run_turns), ref)


@app.task(name=TASK_EVALUATE, bind=True, base=StageTask)
def evaluate_task(self: Task, ref: Ref) -> Ref:
    """EVAL of one rollout."""
    return run_stage(self, Stage.EVAL, carried(evaluate), ref)


@app.task(name=TASK_CLEANUP)
def cleanup_task(ref: Ref) -> None:
    """Release the sandboxes of an attempt that ended outside a stage."""
    worker = process.current()
    with worker.slot():
        done = asyncio.run_coroutine_threadsafe(
            release_attempts(worker.services.host, ref["id"], ref["attempt"]), worker.loop
        )
        done.result(CLEANUP_S)


@signals.setup_logging.connect
def _logging(**_: Any) -> None:
    logs.configure(settings())


@signals.celeryd_after_setup.connect
def _look_for_redis(**_: Any) -> None:
    """Say what a worker lacks that was started by hand without an address: Celery itself tries for ever."""
    try:
        if not os.environ.get("ROLLOUT_REDIS_URL"):
            with connect(settings().redis_url, max_connections=1, retries=0) as client:
                client.ping()
    except redis.RedisError as error:
        log.error(
            "ROLLOUT_REDIS_URL is not set, and no Redis answers at the default address: set it to the one "
            "that the gateway and the other workers have",
            default=settings().redis_url,
            error=str(error),
        )


@signals.celeryd_after_setup.connect
def _node_queues(sender: str, instance: Any, **_: Any) -> None:
    """A worker of RUN or EVAL also serves its own node's queue, where the sandboxes' sockets are."""
    pool = instance.pool_cls if isinstance(instance.pool_cls, str) else instance.pool_cls.__module__
    if pool.rsplit(".", 1)[-1] not in ("thread", "threads", "solo"):
        raise SystemExit(
            f"pool {pool!r} cannot carry rollouts: a worker process has one event loop; use -P threads"
        )
    queues = instance.app.amqp.queues
    for stage in (RUN, EVAL):
        if stage in queues.consume_from:
            name = queue_for(stage, settings().node)
            queues.select_add(Queue(name, Exchange(name), routing_key=name))


@signals.worker_ready.connect
def _start(sender: Any, **_: Any) -> None:
    consumed = sender.app.amqp.queues.consume_from
    stages = [stage for stage in Stage if stage in consumed]
    try:
        worker = process.start(app, settings(), sender.hostname, stages, sender.pool.num_processes)
        worker.consumer = sender
        signal.signal(signal.SIGUSR2, lambda *_: setattr(worker, "grace_s", min(worker.grace_s, HURRY_S)))
        # What is there now stays to the end: neither full collections nor the end need look at it.
        gc.collect()
        gc.freeze()
    except Exception as error:
        # Celery would log it and go on as a worker that is ready but can do nothing.
        log.exception("the worker cannot start")
        raise SystemExit(f"the worker cannot start: {error}") from error


@control_command(args=[("slots", int)], signature="<slots>")
def set_slots(state: Any, slots: int | None = None, **_: Any) -> dict[str, str]:
    """Have the worker carry so many rollouts at once, up to what it was started with (-c).

    The threads pool neither grows nor shrinks, and `pool_grow` fails on it. But its threads are started as
    they are needed, and the consumer asks for a message only while less is in hand than `max_concurrency`,
    the field that Celery's own autoscaler sets. So a worker started with `-c MOST` is given fewer slots, and
    up to MOST again, without losing what it holds: over a lowered limit it finishes what it has and takes
    nothing new.
    """
    consumer = state.consumer
    most = consumer.pool.num_processes
    if not isinstance(slots, int) or not 1 <= slots <= most:
        return {
            "error": f"set_slots {slots}: from 1 to {most}, with which this worker was started; for more, "
            "start it with a larger -c or start another one; to have it take nothing, end it with SIGTERM"
        }
    try:
        services = process.current().services
    except RuntimeError:
        return {"error": "the worker is still starting; try again when it is ready"}
    before = services.slots
    consumer.controller.max_concurrency = slots
    services.slots = slots
    try:
        services.announce()
    except redis.RedisError as error:
        # The next announcement, seconds from now, says it.
        log.warning("announcement failed", error=str(error))
    log.info("slots changed", before=before, now=slots, most=most)
    return {"ok": f"{slots} slots (of {most}), {before} before"}


HURRY_S = 1.0
"""For rollouts once a worker stops that got SIGUSR2: its node is about to be taken away."""
_stopper: threading.Thread | None = None
LEAVE_S = 5.0
"""How long a stopping worker has to take itself off the list of live ones; else it counts for seconds."""


@signals.worker_shutdown.connect
def _end(**_: Any) -> None:
    if _stopper is None:
        _stop()  # a shutdown by control command, or after an error: no signal came before it
    if _stopper is not None:
        _stopper.join(LEAVE_S)
    go_on()


@signals.worker_shutting_down.connect
def _stop(**_: Any) -> None:
    # Celery goes on to wait for its threads, which end once `stop` has handed their rollouts back.
    try:
        worker = process.current()
    except RuntimeError:
        return
    global _stopper
    _stopper = threading.Thread(target=worker.stop, name="stop", daemon=True)
    _stopper.start()
