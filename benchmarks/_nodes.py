"""What is simulated: rollouts that sleep, and virtual nodes, whose sandbox hosts only sleep.

python -m benchmarks._nodes DIRECTORY…      # serves each directory as `sandbox.host` would
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import PATIENCE_S, STAGES, Process, Stack, wait_until
from rollout.schema import RolloutRequest
from rollout.trajectory import Chain, FinishReason, Message, Segment
from sandbox import connection
from sandbox.host import SOCKET_NAME
from services.autoscale.scaler import apply_slots
from services.queues import make_celery
from services.settings import Settings
from services.state.fleet import FleetStore
from workers.handlers.base import EvalContext, InitContext, Reward, RunContext
from workers.handlers.noop import Noop, NoopTask

# -- rollouts ------------------------------------------------------------------------------------------


VOCABULARY = 150_000
PROMPT = 512
"""Tokens of the prompt."""
CHARACTERS = 4
"""Of a message, for each token: about what English has."""
WORD = 5
"""Characters of a word on average, with its space."""
WORDS = ("the", "file", "returns", "a", "list", "of", "values", "because", "test", "fails", "on", "line")
CHAINS = 8
"""Different ones that rollouts share: to make one takes longer than all that a head does with it."""
BOOT_VARIABLE = "BOOT_S"
"""By which the sandbox's specification tells a simulated host how long starting takes."""


@lru_cache
def make_chain(seed: int, turns: Sequence[int], observation: int) -> Chain:
    """A chain as irregular as real ones; log-probs are float32, as engines compute them.

    Args:
        turns: Sampled tokens of each turn.
        observation: Tokens of a tool's answer between two turns.
    """
    chance, chain = random.Random(seed), Chain()

    def append(role: str, tokens: int, **more: object) -> None:
        words = chance.choices(WORDS, k=tokens * CHARACTERS // WORD)
        ids = [chance.randrange(VOCABULARY) for _ in range(tokens)]
        message = Message(role=role, content=" ".join(words))
        chain.append(Segment(role=role, token_ids=ids, messages=[message], **more))

    for turn, sampled in enumerate(turns):
        append(*(("tool", observation) if turn else ("user", PROMPT)))
        logprobs = array("f", [-chance.expovariate(2.0) for _ in range(sampled)]).tolist()
        fields = {"logprobs": logprobs, "call_id": f"call-{turn}", "policy_version": "step-1"}
        append("assistant", sampled, sampled=True, **fields)
    return chain


class SimulatedTask(NoopTask):
    """`init_s` is what the sandbox takes to start; 0 = there is none."""

    turns: tuple[int, ...] = ()
    """Tokens that the trajectory samples in each turn."""
    observation: int = 0
    """Tokens of what a tool answers between two turns."""


class Simulated(Noop):
    """Boots a sandbox, sleeps in RUN and EVAL, leaves a trajectory; every other one of a group succeeds."""

    name = "simulated"
    Task = SimulatedTask

    async def init(self, ctx: InitContext[SimulatedTask]) -> None:
        if ctx.task.init_s:
            await ctx.sandboxes.boot(ctx, env={BOOT_VARIABLE: str(ctx.task.init_s)})

    async def run(self, ctx: RunContext[SimulatedTask]) -> FinishReason:
        task = ctx.task
        if task.turns:
            seed = ord(ctx.rollout_id[-1]) % CHAINS
            ctx.agent.trajectory.chains.append(make_chain(seed, task.turns, task.observation))
        return await super().run(ctx)

    async def evaluate(self, ctx: EvalContext[SimulatedTask]) -> Reward:
        await super().evaluate(ctx)
        return Reward(float(ctx.index % 2))


# -- sandbox hosts -------------------------------------------------------------------------------------


async def serve_host(state: Path) -> None:
    """Serve a directory as `sandbox.host` would, with sandboxes that take their time to start, no more."""
    held: Counter[str] = Counter()
    """Sandboxes by owner."""
    numbers = itertools.count(1)

    async def carry_out(request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"op": "start", "spec": {"owner": owner, "env": env}}:
                boot_s = float(env[BOOT_VARIABLE])
                await asyncio.sleep(boot_s)
                held[owner] += 1
                name = f"{next(numbers):08x}"
                return {
                    "id": name,
                    # It stands for the sandbox's own server, too, of which RUN only asks whether it is there.
                    "socket": str(state / SOCKET_NAME),
                    # What real nodes have: another one would be warned of in every worker.
                    "runtime": "apptainer",
                    "node": state.name,
                    "isolation_missing": [],
                    "pid": os.getpid(),
                    "start_ms": boot_s * 1e3,
                }
            case {"op": "take"}:
                return {"last": 0, "known": 0}
            case {"op": "release_owner", "owner": owner}:
                return {"released": held.pop(owner, 0)}
            case {"op": "stats"}:
                return {"claimed": held.total(), "warm": 0, "pid": os.getpid()}
        return {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await connection.receive(reader)) is not None:
                await connection.send(writer, {"ok": True, "result": await carry_out(request)})
        except ConnectionError:
            pass
        finally:
            writer.close()

    state.mkdir(parents=True, exist_ok=True)
    server = await asyncio.start_unix_server(answer, str(state / SOCKET_NAME), backlog=512)
    await server.serve_forever()


async def serve_hosts(directories: list[str]) -> None:
    """Serve them all."""
    await asyncio.gather(*(serve_host(Path(directory)) for directory in directories))


# -- nodes ---------------------------------------------------------------------------------------------


ENV = {
    "ROLLOUT_HANDLERS": "benchmarks._nodes:Simulated",
    # What this machine has left is not what is measured.
    "ROLLOUT_NODE_MIN_FREE_DISK_MB": "0",
    "ROLLOUT_NODE_MIN_FREE_MEMORY_MB": "0",
}


class Nodes:
    """A head with virtual nodes, whose INIT workers come and go."""

    def __init__(self, stack: Stack, count: int, most: dict[str, int]) -> None:
        """
        Args:
            count: Nodes there are.
            most: Slots by stage that a node's workers are started with; `give` may lower them.
        """
        self.stack, self.count, self._most = stack, count, most
        self._workers: dict[tuple[str, int], Process] = {}
        self._app = make_celery(Settings(redis_url=stack.redis.url))

    def start(self, workers: list[tuple[str, int]], **env: str) -> None:
        """Start workers of a stage and a node each, and wait until all are there."""
        for stage, number in workers:
            of_node = {"ROLLOUT_NODE": f"n{number}", "ROLLOUT_SANDBOX_DIR": str(self.state(number)), **env}
            self._workers[stage, number] = harness.launch(self.stack, stage, self._most[stage], **of_node)
        for stage, number in workers:
            harness.await_worker(self.stack, stage, self._workers[stage, number])

    def state(self, number: int) -> Path:
        """Where the node's sandbox host lives."""
        return self.stack.sandbox_dir / f"n{number}"

    def use(self, count: int, **env: str) -> None:
        """Have so many nodes take part: INIT decides where a rollout lives; only its workers come and go.

        Args:
            env: Further variables of those that are started.
        """
        present = {number for stage, number in self._workers if stage == "init"}
        gone = [self._workers.pop(("init", number)) for number in present if number >= count]
        harness.discard(self.stack, gone)
        self.start([("init", number) for number in range(count) if number not in present], **env)

    def give(self, slots: dict[str, int]) -> None:
        """Give every worker so many slots of its stage, as the autoscaler does."""
        fleet = FleetStore(self.stack.redis.client)
        names = {worker.name for worker in self._workers.values()}

        def given() -> bool:
            workers = [worker for worker in fleet.workers() if worker.name in names]
            for stage in STAGES:
                of_stage = [worker for worker in workers if stage in worker.stages]
                apply_slots(self._app, slots[stage] * len(of_stage), of_stage)
            return len(workers) == len(names) and all(
                worker.slots == slots[worker.stages[0]] for worker in workers
            )

        wait_until(given, PATIENCE_S, f"all workers to have the slots {slots}")

    def rate(self, tasks: list[dict[str, Any]], what: str) -> float:
        """Put tasks through; rollouts a second from the first submission to the last end: ramps included."""
        requests = [RolloutRequest(handler="simulated", task=task) for task in tasks]

        def completed() -> int:
            if failed := harness.in_state(self.stack, "failed", "timed_out"):
                raise RuntimeError(f"{what}: {failed} rollouts failed")
            return harness.in_state(self.stack, "completed")

        seconds = harness.seconds_of(lambda: harness.submit(self.stack, requests), len(tasks), completed)
        harness.say(f"{what}: {len(tasks) / seconds:.2f} rollouts/s, {seconds:.1f} s")
        return len(tasks) / seconds


@contextmanager
def cluster(count: int, most: dict[str, int]) -> Iterator[Nodes]:
    """A head and virtual nodes: RUN and EVAL of all, INIT of none."""
    with harness.service(**ENV) as stack:
        nodes = Nodes(stack, count, most)
        states = [nodes.state(number) for number in range(count)]
        hosts = stack.start("hosts", [sys.executable, "-m", "benchmarks._nodes", *map(str, states)])
        sockets = [state / SOCKET_NAME for state in states]
        wait_until(lambda: all(path.exists() for path in sockets), PATIENCE_S, "the hosts", hosts)
        nodes.start([(stage, number) for number in range(count) for stage in ("run", "eval")])
        yield nodes


if __name__ == "__main__":
    asyncio.run(serve_hosts(sys.argv[1:]))
