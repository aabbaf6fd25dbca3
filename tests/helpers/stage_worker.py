"""A worker's real process object on a real Redis, without Celery: a test gives it its messages."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

from celery.exceptions import Ignore

from rollout.schema import RolloutRequest, Stage, State
from rollout.trajectory import FinishReason, Trajectory
from services.dispatch import _expand
from services.queues import make_celery
from services.settings import Settings
from services.state import keys
from services.state.rollouts.store import Finish
from workers import process as processes
from workers.evaluate import evaluate
from workers.handlers.base import AgentHandler, AnyTask, EvalContext, InitContext, Reward, RunContext
from workers.held import CANCEL, LOST, OVERDUE, SHUTDOWN
from workers.init import init
from workers.process import WorkerProcess
from workers.run import run_turns
from workers.task import run_stage

NODE = "n"
BODIES = {Stage.INIT: init, Stage.RUN: run_turns, Stage.EVAL: evaluate}
NEXT = {Stage.INIT: State.READY, Stage.RUN: State.EVALUATING, Stage.EVAL: State.COMPLETED}
_BOX = {"id": "s", "runtime": "r", "image": "i", "node": NODE, "isolation_missing": []}
SANDBOX = {"sandbox": json.dumps({"record": _BOX, "socket": "/s"}), "node": NODE}


class Host:
    """A sandbox host that only notes whose sandboxes it is to end."""

    def __init__(self):
        self.released = []

    async def release_owner(self, owner):
        self.released.append(owner)


class Told(AgentHandler[AnyTask]):
    """Does what its task says."""

    name = "told"
    uses_model = False

    async def init(self, ctx: InitContext[AnyTask]) -> None:
        ctx.metrics["of_init"] = 1.0
        await asyncio.sleep(ctx.request.task.get("init_s", 0.0))

    async def run(self, ctx: RunContext[AnyTask]) -> FinishReason:
        ctx.metrics["no_number"] = float("nan")
        await asyncio.sleep(ctx.request.task.get("run_s", 0.0))
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[AnyTask]) -> Reward:
        return Reward(1.0)


class Asking(Told):
    """Has a place on a backend, and goes wrong before it asks the model anything."""

    name = "asking"
    uses_model = True

    async def run(self, ctx: RunContext[AnyTask]) -> FinishReason:
        raise ValueError("broken")


class Worker:
    """A worker of some stages on one Redis; a test gives it its messages."""

    def __init__(self, url, stages=tuple(Stage), **settings):
        settings = Settings(redis_url=url, node=NODE, **settings)
        self.process = WorkerProcess(make_celery(settings), settings, "w", [*stages], 4)
        self.services = self.process.services
        self.services.redis.flushall()
        self.services.host = self.host = Host()
        self.store, self.redis, self.loop = self.process.store, self.services.redis, self.process.loop
        for handler in (Told, Asking):
            self.services.handlers.add(handler)

    def submit(self, handler="told", **fields):
        (new,) = _expand(RolloutRequest(handler=handler, **fields))
        self.store.submit([new])
        return new.id

    def does(self, stage, rollout_id, body=None, attempt=1):
        """One message of a stage; whether the chain is whole after it, and says whose it is."""
        task = SimpleNamespace(request=SimpleNamespace(id="task", root_id="task"))
        named = None if stage is Stage.INIT else {"id": rollout_id, "attempt": attempt, "node": None}
        try:
            ref = run_stage(task, stage, body or BODIES[stage], named)
        except Ignore:
            return False
        handler = self.redis.hget(keys.record(rollout_id), "handler")
        assert (ref["id"], ref["attempt"], ref["handler"]) == (rollout_id, attempt, handler)
        return True

    def brings_to(self, stage, rollout_id, *, boxed=False):
        """Have all stages before this one done, with a sandbox if it is to be `boxed`."""

        async def body(run):
            if boxed:
                await asyncio.to_thread(self.store.note, rollout_id, run.claim.fence, SANDBOX)
            trajectory = Trajectory() if run.claim.stage is Stage.RUN else None
            return Finish(NEXT[run.claim.stage], trajectory=trajectory)

        for before in list(Stage)[: list(Stage).index(stage)]:
            assert self.does(before, rollout_id, body)

    def holds(self, rollout_id, stage=Stage.INIT):
        """A rollout that the worker has claimed and works on."""
        with self.process.claiming() as cancelled:
            claim = self.store.claim(rollout_id, 1, stage, self.services.name)
            return claim, self.process.hold(claim, cancelled)


@contextmanager
def stage_worker(server, monkeypatch, stages=tuple(Stage)):
    """The worker of this process, its loop in a thread."""
    worker = Worker(server.url, stages, retry_delay_s=2.0, requeue_s=30.0, lease_s=30.0)
    monkeypatch.setattr(processes, "_process", worker.process)
    thread = threading.Thread(target=worker.process.loop.run_forever, daemon=True)
    thread.start()
    yield worker
    worker.loop.call_soon_threadsafe(worker.loop.stop)
    thread.join(10)


def meanwhile(worker, what):
    """A body to which that happens: it wants to go on to the next stage."""

    async def body(run):
        rollout_id = run.claim.rollout_id
        if run.claim.stage is Stage.INIT:
            await asyncio.to_thread(worker.store.note, rollout_id, run.claim.fence, SANDBOX)
            run.sandboxes.booted = True
        if what in (SHUTDOWN, CANCEL, OVERDUE):
            run.held.interrupt(what)
            await asyncio.sleep(60)
        if what == "cancel unheard":
            assert (await asyncio.to_thread(worker.store.cancel, rollout_id))[0] == "cancelling"
        if what == LOST:
            worker.redis.hset(keys.record(rollout_id), "lease", 0)
            worker.redis.zadd(keys.DUE, {rollout_id: 0})
            assert len(await asyncio.to_thread(worker.store.overdue)) == 1
        return Finish(NEXT[run.claim.stage], trajectory=Trajectory())

    return body
