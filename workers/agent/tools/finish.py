"""`think` and `finish`: tools that touch nothing."""

from __future__ import annotations

from workers.agent.tools.base import Arguments, Observation, Tool, ToolContext


class FinishArgs(Arguments):
    message: str = ""


class Finish(Tool):
    """Ends the rollout by the agent's own wish."""

    name = "finish"
    aliases = ("submit",)
    description = "End the task with a final message."
    Args = FinishArgs

    async def call(self, args: FinishArgs, ctx: ToolContext) -> Observation:
        return Observation(args.message, finished=True)


class ThinkArgs(Arguments):
    thought: str


class Think(Tool):
    """Does nothing; the thought stays in the trajectory."""

    name = "think"
    description = "Write a thought down: a plan, a hypothesis, what was learnt. Nothing is run or changed."
    Args = ThinkArgs

    async def call(self, args: ThinkArgs, ctx: ToolContext) -> Observation:
        return Observation("Noted.")
