"""`think`: room for a thought between two actions."""

from __future__ import annotations

from workers.agent.tools.base import Arguments, Observation, Tool, ToolContext


class ThinkArgs(Arguments):
    thought: str


class Think(Tool):
    """Does nothing; the thought stays in the trajectory."""

    name = "think"
    description = "Write a thought down: a plan, a hypothesis, what was learnt. Nothing is run or changed."
    Args = ThinkArgs

    async def call(self, args: ThinkArgs, ctx: ToolContext) -> Observation:
        return Observation("Noted.")
