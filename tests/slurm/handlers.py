"""Handlers for the tests on the cluster: with a sandbox, a model and a gate, and without the first."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pydantic import BaseModel

from rollout.trajectory import FinishReason, Message
from workers.handlers.base import AgentHandler, EvalContext, Reward, RunContext

LOOK_S = 0.1
PROOF = "/workspace/proof"


class BoxedTask(BaseModel):
    gates: str
    """Directory that all nodes see. RUN leaves the environment of the sandbox there as `ROLLOUT.ATTEMPT`, and
    goes on once there is a file `open`."""


class Boxed(AgentHandler[BoxedTask]):
    """A file in the sandbox, a turn of the model, the file again: reward 1 if it was one sandbox."""

    name = "boxed"
    Task = BoxedTask
    uses_sandbox = True

    def prompt(self, task: BoxedTask) -> list[Message]:
        return [Message(role="user", content="Say something.")]

    async def run(self, ctx: RunContext[BoxedTask]) -> FinishReason:
        assert ctx.sandbox is not None
        result = await ctx.sandbox.bash(
            f"mkdir -p /workspace; echo {ctx.rollout_id}.{ctx.attempt} > {PROOF}; env"
        )
        gates = Path(ctx.task.gates)
        await asyncio.to_thread((gates / f"{ctx.rollout_id}.{ctx.attempt}").write_text, result.output)
        while not (gates / "open").exists():
            await asyncio.sleep(LOOK_S)
        return await super().run(ctx)

    async def evaluate(self, ctx: EvalContext[BoxedTask]) -> Reward:
        assert ctx.sandbox is not None
        result = await ctx.sandbox.bash(f"cat {PROOF}")
        return Reward(float(result.output.strip() == f"{ctx.rollout_id}.{ctx.attempt}"))


class SpokenTask(BoxedTask):
    filler: str = ""
    """A rollout reserves as many tokens as its task would have, before anything is known of the handler."""


class Spoken(AgentHandler[SpokenTask]):
    """A gate, then a turn of the model: it has its placement while it stands there."""

    name = "spoken"
    Task = SpokenTask

    def prompt(self, task: SpokenTask) -> list[Message]:
        return [Message(role="user", content="Say something.")]

    async def run(self, ctx: RunContext[SpokenTask]) -> FinishReason:
        gates = Path(ctx.task.gates)
        await asyncio.to_thread((gates / f"{ctx.rollout_id}.{ctx.attempt}").touch)
        while not (gates / "open").exists():
            await asyncio.sleep(LOOK_S)
        return await super().run(ctx)

    async def evaluate(self, ctx: EvalContext[SpokenTask]) -> Reward:
        return Reward(1.0)


all_handlers = [Boxed, Spoken]
