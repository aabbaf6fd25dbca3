"""Virtual nodes of `benchmarks/scaling.py`: workers of their own, and sandbox hosts that only sleep."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from benchmarks.harness import PATIENCE_S, STAGES, await_worker, discard, launch, make_chain, say, service
from rollout.schema import RolloutRequest
from rollout.trajectory import FinishReason
from sandbox import connection
from sandbox.host import SOCKET_NAME
from services.queues import make_celery
from services.settings import Settings
from tests.helpers.stack import Process, Stack, wait_until
from workers.handlers.base import AgentHandler, EvalContext, InitContext, Reward, RunContext

BOOT_VARIABLE = "BOOT_S"
"""By which the sandbox's specification tells a simulated host how long starting takes."""


class SimTask(BaseModel):
    init_s: float = 0.0
    """What the sandbox takes to start."""
    run_s: float = 0.0
    eval_s: float = 0.0
    tokens: int = Field(default=0, ge=0)
    """Tokens that the trajectory samples, in one turn."""


class Simulated(AgentHandler[SimTask]):
    """Boots a sandbox, sleeps in RUN and EVAL, leaves a trajectory."""

    name = "simulated"
    Task = SimTask
    uses_model = False

    async def init(self, ctx: InitContext[SimTask]) -> None:
        await ctx.sandboxes.boot(ctx, env={BOOT_VARIABLE: str(ctx.task.init_s)})

    async def run(self, ctx: RunContext[SimTask]) -> FinishReason:
        task = ctx.task
        if task.tokens:
            ctx.agent.trajectory.chains.append(make_chain(ctx.rollout_id, [task.tokens], 0))
        await asyncio.sleep(task.run_s)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[SimTask]) -> Reward:
        await asyncio.sleep(ctx.task.eval_s)
        return Reward(float(ctx.index % 2))


class SimulatedHost:
    """The host of one node."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._owners: dict[str, list[str]] = {}
        self._started = 0

    async def serve(self) -> None:
        self._state.mkdir(parents=True, exist_ok=True)
        server = await asyncio.start_unix_server(self._answer, str(self._state / SOCKET_NAME), backlog=512)
        await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await connection.receive(reader)) is not None:
                await connection.send(writer, {"ok": True, "result": await self._carry_out(request)})
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _carry_out(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"op": "start", "spec": dict(spec)}:
                return await self._start(spec)
            case {"op": "release_owner", "owner": str(owner)}:
                return {"released": len(self._owners.pop(owner, []))}
            case {"op": "stats"}:
                claimed = sum(map(len, self._owners.values()))
                return {"claimed": claimed, "warm": 0, "started": self._started, "pid": os.getpid()}
        return {}

    async def _start(self, spec: dict[str, Any]) -> dict[str, Any]:
        boot_s = float(spec["env"].get(BOOT_VARIABLE, "0"))
        await asyncio.sleep(boot_s)
        self._started += 1
        sandbox = f"{self._started:08x}"
        self._owners.setdefault(spec["owner"], []).append(sandbox)
        return {
            "id": sandbox,
            "socket": str(self._state / f"{sandbox}.sock"),
            # What real nodes have: another one would be warned of in every worker.
            "runtime": "apptainer",
            "node": self._state.name,
            "isolation_missing": [],
            "pid": os.getpid(),
            "start_ms": boot_s * 1e3,
        }


async def serve_hosts(directories: list[str]) -> None:
    """Serve each directory as `sandbox.host` would."""
    await asyncio.gather(*(SimulatedHost(Path(directory)).serve() for directory in directories))


SERVE_HOSTS = "import asyncio, sys, benchmarks._nodes as it; asyncio.run(it.serve_hosts(sys.argv[1:]))"
"""Python: what the process of the hosts runs, with their directories as arguments."""


# -- virtual nodes -------------------------------------------------------------------------------------


AT_ONCE = 3
"""Workers that start at the same time: each imports for seconds."""
PER_CALL = 500
"""Rollouts of one call of submission."""
POLL_S = 0.02
REPLY_S = 5.0
"""For workers to answer a control command."""
LIVE_STATES = ("queued", "initializing", "ready", "running", "evaluating")
"""The states of a rollout that has not ended."""
ENV = {
    "ROLLOUT_HANDLERS": "benchmarks._nodes:Simulated",
    # What this machine has left is not what is measured.
    "ROLLOUT_NODE_MIN_FREE_DISK_MB": "0",
    "ROLLOUT_NODE_MIN_FREE_MEMORY_MB": "0",
}


@dataclass(frozen=True)
class Slots:
    """Slots of the three workers of a node."""

    init: int
    run: int
    eval: int


class Nodes:
    """A head with virtual nodes, whose INIT workers come and go."""

    def __init__(self, stack: Stack, count: int, most: Slots) -> None:
        """
        Args:
            count: Nodes there are.
            most: What the workers are started with; `give` may lower it.
        """
        self.stack, self.count, self._most = stack, count, most
        self.init_env: dict[str, str] = {}
        """Further variables of INIT workers that `use` starts."""
        self._workers: dict[tuple[str, int], Process] = {}
        self._control = make_celery(Settings(redis_url=stack.redis.url)).control
        self.client, self.redis = stack.client, stack.redis.client

    def start(self, workers: Iterable[tuple[str, int]]) -> None:
        """Start workers of a stage and a node each, few at a time, and wait until all are there."""
        waiting = list(workers)
        while waiting:
            # Its namesake of the last round may be on the list yet.
            began, some, waiting = time.time(), waiting[:AT_ONCE], waiting[AT_ONCE:]
            for stage, number in some:
                env = {"ROLLOUT_NODE": f"n{number}", "ROLLOUT_SANDBOX_DIR": str(self.state(number))}
                env |= self.init_env if stage == "init" else {}
                slots = getattr(self._most, stage)
                worker = launch(self.stack, stage, f"{stage}@n{number}", slots, **env)
                self._workers[stage, number] = worker
            for stage, number in some:
                await_worker(self.stack, stage, self._workers[stage, number], began)

    def state(self, number: int) -> Path:
        """Where the node's sandbox host lives."""
        return self.stack.sandbox_dir / f"n{number}"

    def use(self, count: int) -> None:
        """Have so many nodes take part: INIT decides where a rollout lives; only its workers come and go."""
        present = {number for stage, number in self._workers if stage == "init"}
        gone = [self._workers.pop(("init", number)) for number in present if number >= count]
        discard(self.stack, *gone)
        self.start([("init", number) for number in range(count) if number not in present])

    def give(self, slots: Slots) -> None:
        """Give every worker so many slots, by the control command that an operator uses."""
        for stage in STAGES:
            names = {worker.name for (its_stage, _), worker in self._workers.items() if its_stage == stage}
            deadline = time.monotonic() + PATIENCE_S
            while names:
                replies = self._control.broadcast(
                    "set_slots",
                    {"slots": getattr(slots, stage)},
                    sorted(names),
                    reply=True,
                    timeout=REPLY_S,
                    limit=len(names),
                )
                answers = {name: answer for reply in replies or () for name, answer in reply.items()}
                if any("ok" not in answer for answer in answers.values()) or time.monotonic() > deadline:
                    raise RuntimeError(f"set_slots {slots}: {answers}, nothing from {names}")
                # One that has only just started may not listen yet.
                names -= set(answers)

    def end(self) -> None:
        """End all workers."""
        discard(self.stack, *self._workers.values())

    @property
    def head_pids(self) -> dict[str, int]:
        """Redis and the gateway."""
        return {"redis": self.stack.redis.pid, "gateway": self.stack.gateway.pid}

    def in_state(self, *states: str) -> int:
        """Rollouts that are in one of these states."""
        counts = self.redis.hgetall("rollouts:counts")
        return sum(int(counts.get(state, 0)) for state in states)

    def rate(self, tasks: list[dict[str, Any]], what: str) -> float:
        """Put tasks through; rollouts a second from the first submission to the last end: ramps included."""
        goal = self.in_state("completed") + len(tasks)
        requests = [RolloutRequest(handler="simulated", task=task) for task in tasks]
        began = time.monotonic()
        for first in range(0, len(requests), PER_CALL):
            self.client.submit(requests[first : first + PER_CALL])
        while self.in_state("completed") < goal:
            if failed := self.in_state("failed", "timed_out"):
                raise RuntimeError(f"{what}: {failed} rollouts failed")
            if time.monotonic() - began > PATIENCE_S:
                raise TimeoutError(f"{what}: not all of {len(tasks)} rollouts ended in {PATIENCE_S:g} s")
            time.sleep(POLL_S)
        seconds = time.monotonic() - began
        say(f"{what}: {len(tasks) / seconds:.2f} rollouts/s, {seconds:.1f} s")
        return len(tasks) / seconds


@contextmanager
def cluster(count: int, most: Slots) -> Iterator[Nodes]:
    """A head and virtual nodes: RUN and EVAL of all, INIT of none."""
    with service(**ENV) as stack:
        nodes = Nodes(stack, count, most)
        states = [nodes.state(number) for number in range(count)]
        hosts = stack.start("hosts", [sys.executable, "-c", SERVE_HOSTS, *map(str, states)])
        sockets = [state / SOCKET_NAME for state in states]
        wait_until(lambda: all(path.exists() for path in sockets), PATIENCE_S, "the hosts", hosts)
        try:
            nodes.start([(stage, number) for number in range(count) for stage in ("run", "eval")])
            yield nodes
        finally:
            nodes.end()
