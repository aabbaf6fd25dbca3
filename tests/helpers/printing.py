"""A handler whose RUN prints: what its task says, in its sandbox, without a model."""

from __future__ import annotations

from rollout.trajectory import FinishReason
from tests.helpers import diary
from tests.helpers.chaos_handlers import Gated, GatedTask
from workers.handlers.base import AgentHandler, EvalContext, InitContext, Reward, RunContext


class PrintingTask(GatedTask):
    command: str = ""
    program: bool = False
    """Whether it is run by `exec` and not by the shell."""


class Printing(AgentHandler[PrintingTask]):
    name = "printing"
    Task = PrintingTask
    uses_model = False
    uses_sandbox = True
    _pass = Gated._pass

    async def init(self, ctx: InitContext[PrintingTask]) -> None:
        await super().init(ctx)
        await self._pass("init", ctx)

    async def run(self, ctx: RunContext[PrintingTask]) -> FinishReason:
        if ctx.task.program:
            await ctx.sandbox.exec(["bash", "-c", ctx.task.command], 60.0)
        else:
            await ctx.sandbox.bash(ctx.task.command, 60.0)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[PrintingTask]) -> Reward:
        await ctx.sandbox.bash("echo scored secretly")
        return Reward(1.0)


all_handlers = [Printing, *diary.all_handlers]
