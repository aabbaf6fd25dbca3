"""Handlers for breaking things: work that waits at a gate, and handlers that misbehave."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from pydantic import BaseModel

from rollout.trajectory import Chain, FinishReason, Message, Segment
from sandbox.client import SandboxClient
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, InitContext, Reward, RunContext

LOOK_S = 0.05


class GatedTask(BaseModel):
    gates: str = ""
    """Directory: a stage goes on once a file of its name (`run` …) is in it; empty = at once. Each stage that
    comes to its gate says so by a file `STAGE.ROLLOUT`."""
    reward: float = 1.0


class Gated(AgentHandler[GatedTask]):
    """Holds its lease in each stage until the test opens that stage's gate: no machine is too slow for it."""

    name = "gated"
    Task = GatedTask
    uses_model = False

    async def _pass(self, stage: str, ctx: InitContext[GatedTask]) -> None:
        task = ctx.task
        if task.gates:
            (Path(task.gates) / f"{stage}.{ctx.rollout_id}").touch()
        while task.gates and not (Path(task.gates) / stage).exists():
            await asyncio.sleep(LOOK_S)

    async def init(self, ctx: InitContext[GatedTask]) -> None:
        await self._pass("init", ctx)

    async def run(self, ctx: RunContext[GatedTask]) -> FinishReason:
        await self._pass("run", ctx)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[GatedTask]) -> Reward:
        await self._pass("eval", ctx)
        return Reward(ctx.task.reward)


class GatedCommand(Gated):
    """The same with a command in a sandbox, which runs for as long as RUN stands at its gate."""

    name = "gated_command"
    uses_sandbox = True

    async def init(self, ctx: InitContext[GatedTask]) -> None:
        await AgentHandler.init(self, ctx)
        await super().init(ctx)

    async def run(self, ctx: RunContext[GatedTask]) -> FinishReason:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.sandbox.bash("until [ -e go ]; do sleep 0.1; done", 600.0))
            await self._pass("run", ctx)
            # The other client does one thing after the other.
            async with SandboxClient(ctx.sandbox.address) as another:
                await another.write_file("go", b"")
        return FinishReason.STOP


class NumberedTask(BaseModel):
    number: int = 0


class Numbered(AgentHandler[NumberedTask]):
    """Does no work and leaves a trajectory and a reward that only its number can have."""

    name = "numbered"
    Task = NumberedTask
    uses_model = False
    repeatable = EVERY_STAGE

    async def init(self, ctx: InitContext[NumberedTask]) -> None:
        """It has no sandbox."""

    async def run(self, ctx: RunContext[NumberedTask]) -> FinishReason:
        chain = Chain()
        asked, said = Message(role="user", content="count"), Message(role="assistant", content="…")
        chain.append(Segment(role="user", token_ids=[1, 2, 3], messages=[asked]))
        ids = sampled_of(ctx.task.number)
        more = {"sampled": True, "logprobs": [-0.5] * len(ids), "call_id": "call-0", "policy_version": "1"}
        chain.append(Segment(role="assistant", token_ids=ids, messages=[said], **more))
        ctx.agent.trajectory.chains.append(chain)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[NumberedTask]) -> Reward:
        return Reward(float(ctx.task.number % 2))


def sampled_of(number: int) -> list[int]:
    """The ids that a `Numbered` samples."""
    return [number // 1000, number % 1000, *range(6)]


LEAK_MB = 500
_LEAKED: list[bytes] = []


class BadTask(BaseModel):
    how: str
    """`ignore` (every cancel), `block` (the loop), `exit` (the whole worker), `leak`, `scorer_exits`."""
    seconds: float = 3.0
    note: str = ""
    """File that says that it has begun."""


class Misbehaves(AgentHandler[BadTask]):
    """Does in RUN (a scorer: in EVAL) what no handler should."""

    name = "misbehaves"
    Task = BadTask
    uses_model = False

    async def run(self, ctx: RunContext[BadTask]) -> FinishReason:
        await self._do(ctx, ctx.task.how)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[BadTask]) -> Reward:
        await self._do(ctx, ctx.task.how.removeprefix("scorer_") if "scorer_" in ctx.task.how else "")
        return Reward(1.0)

    async def _do(self, ctx: RunContext[BadTask] | EvalContext[BadTask], how: str) -> None:
        task = ctx.task
        if how and task.note:
            Path(task.note).write_text(str(os.getpid()))
        ends = time.monotonic() + task.seconds
        if how == "ignore":
            while time.monotonic() < ends:
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    continue
        elif how == "block":
            time.sleep(task.seconds)
        elif how in ("exit", "exits"):
            os._exit(9)
        elif how == "leak":
            # Cheap, and piece by piece: else it would hold the interpreter for longer than a lease.
            _LEAKED.extend(b"x" * (1 << 20) for _ in range(LEAK_MB))


all_handlers = [Gated, GatedCommand, Misbehaves, Numbered]
