"""A handler that does nothing: measures the pipeline itself and checks a deployment's wiring."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, Field

from rollout.trajectory import FinishReason
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, InitContext, Reward, RunContext


class NoopTask(BaseModel):
    """Seconds to sleep in each stage."""

    init_s: float = Field(default=0.0, ge=0.0, le=3600.0)
    run_s: float = Field(default=0.0, ge=0.0, le=3600.0)
    eval_s: float = Field(default=0.0, ge=0.0, le=3600.0)
    reward: float = 0.0


class Noop(AgentHandler[NoopTask]):
    """Sleeps as told and gives the reward it is told: no model, no sandbox."""

    name = "noop"
    Task = NoopTask
    uses_model = False
    repeatable = EVERY_STAGE

    async def init(self, ctx: InitContext[NoopTask]) -> None:
        if ctx.task.init_s:
            await asyncio.sleep(ctx.task.init_s)

    async def run(self, ctx: RunContext[NoopTask]) -> FinishReason:
        if ctx.task.run_s:
            await asyncio.sleep(ctx.task.run_s)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[NoopTask]) -> Reward:
        if ctx.task.eval_s:
            await asyncio.sleep(ctx.task.eval_s)
        return Reward(ctx.task.reward)
