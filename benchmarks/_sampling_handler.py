"""The handler of `dynamic_sampling`: engine and tools are a sleep, the reward is told."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from rollout.trajectory import FinishReason
from workers.handlers.base import AgentHandler, EvalContext, Reward, RunContext


class SleepTask(BaseModel):
    number: int
    seconds: list[float]
    """Of RUN, one for each member of the group."""
    rewards: list[float]


class Sleeper(AgentHandler[SleepTask]):
    """Sleeps as long as its place in the group is told, and gets the reward of that place."""

    name = "sleeper"
    Task = SleepTask
    uses_model = False

    async def run(self, ctx: RunContext[SleepTask]) -> FinishReason:
        await asyncio.sleep(ctx.task.seconds[ctx.index])
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[SleepTask]) -> Reward:
        return Reward(ctx.task.rewards[ctx.index])
