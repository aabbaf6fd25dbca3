"""The handler of `transfer`: long trajectories without a model, as irregular as real ones."""

from __future__ import annotations

import random
from array import array

from pydantic import BaseModel

from rollout.trajectory import Chain, FinishReason, Message, Segment
from workers.handlers.base import AgentHandler, EvalContext, Reward, RunContext

VOCABULARY = 150_000
PROMPT = 512
"""Tokens of the prompt."""
CHARACTERS = 4
"""Of the message, for each token: about what English has."""
_WORDS = ("the", "file", "returns", "a", "list", "of", "values", "because", "test", "fails", "on", "line")


class LongTask(BaseModel):
    tokens: int
    """Of the response, observations included."""
    turns: int
    observation: int
    """Tokens of what a tool answers between two turns."""


class Teller(AgentHandler[LongTask]):
    """Leaves a trajectory of the length it is told; log-probs are float32, as engines compute them."""

    name = "teller"
    Task = LongTask
    uses_model = False

    async def run(self, ctx: RunContext[LongTask]) -> FinishReason:
        task, chance = ctx.task, random.Random(ctx.rollout_id)
        sampled = (task.tokens - task.observation * (task.turns - 1)) // task.turns
        chain = Chain()
        ctx.agent.trajectory.chains.append(chain)
        chain.append(_segment(chance, "user", PROMPT))
        for turn in range(task.turns):
            logprobs = array("f", [-chance.expovariate(2.0) for _ in range(sampled)]).tolist()
            chain.append(
                _segment(
                    chance, "assistant", sampled, sampled=True, logprobs=logprobs, call_id=f"call-{turn}"
                )
            )
            if turn + 1 < task.turns:
                chain.append(_segment(chance, "tool", task.observation))
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[LongTask]) -> Reward:
        return Reward(float(ctx.index % 2))


def _segment(chance: random.Random, role: str, tokens: int, **more: object) -> Segment:
    words: list[str] = []
    left = tokens * CHARACTERS
    while left > 0:
        words.append(chance.choice(_WORDS))
        left -= len(words[-1]) + 1
    ids = [chance.randrange(VOCABULARY) for _ in range(tokens)]
    version = "step-1" if more.get("sampled") else None
    message = Message(role=role, content=" ".join(words))
    return Segment(role=role, token_ids=ids, messages=[message], policy_version=version, **more)
