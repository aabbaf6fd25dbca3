"""A game of two policies: both answer one question of `calculator`, and who alone is right has won.

The agent is one player, and the other is any policy, or the agent's own: then it plays itself.
"""

from __future__ import annotations

import asyncio

from rollout.schema import DEFAULT_POLICY, PolicyName, Stage
from rollout.trajectory import FinishReason
from workers.errors import AgentFault
from workers.handlers.base import EvalContext, Reward, RunContext
from workers.handlers.calculator import Calculator, CalculatorTask, is_right


class DuelTask(CalculatorTask):
    opponent: PolicyName = DEFAULT_POLICY
    """The policy of the other player."""


class Duel(Calculator):
    """Two policies do the same arithmetic, each by bash in a sandbox of its own: zero-sum rewards."""

    name = "duel"
    repeatable = (Stage.INIT, Stage.EVAL)
    Task = DuelTask

    async def run(self, ctx: RunContext[DuelTask]) -> FinishReason:
        # Each plays to its end: who is cut off because the other has broken its sandbox has not lost.
        sides = self._play_opponent(ctx), super().run(ctx)
        ends = await asyncio.gather(*sides, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return ends[1]

    async def _play_opponent(self, ctx: RunContext[DuelTask]) -> None:
        try:
            async with (
                ctx.sandboxes.fresh(ctx, image=self.image, limits=self.limits) as box,
                ctx.model(ctx.task.opponent, "opponent") as opponent,
            ):
                await opponent.run(self.prompt(ctx.task), box, self.tools)
        except AgentFault as error:
            ctx.log.info(
                "the opponent has broken its sandbox: it has said all that it says", error=str(error)
            )

    async def evaluate(self, ctx: EvalContext[DuelTask]) -> Reward:
        theirs = [chain for chain in ctx.trajectory.chains if chain.role == "opponent"]
        said = [message for chain in theirs[-1:] for s in chain.segments for message in s.messages]
        last = next((message.text for message in reversed(said) if message.role == "assistant"), "")
        won, lost = is_right(ctx.trajectory.final_text(), ctx.task), is_right(last, ctx.task)
        score = float(won) - float(lost)
        parts = {"correct": float(won), "opponent_correct": float(lost)}
        return Reward(score, parts, {"opponent": float(lost) - float(won)})
