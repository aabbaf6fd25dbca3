"""`finish`: the agent ends the rollout."""

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
