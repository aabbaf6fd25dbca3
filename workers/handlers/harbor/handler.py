"""`harbor`: run a task directory of the Harbor format, and have its own verifier score what was done."""

from __future__ import annotations

from workers.agent.tools import ExecuteBash, Finish, StrReplaceEditor, Think
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, Reward
from workers.handlers.harbor.task import HarborTask


class Harbor(AgentHandler[HarborTask]):
    """Tasks of the Harbor format: Terminal-Bench, SWE sets and others, scored by their own verifiers."""

    name = "harbor"
    repeatable = EVERY_STAGE
    Task = HarborTask
    tools = (ExecuteBash(), StrReplaceEditor(), Think(), Finish())
    uses_sandbox = True

    async def evaluate(self, ctx: EvalContext[HarborTask]) -> Reward:
        raise NotImplementedError
