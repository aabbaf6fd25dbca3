"""Handlers of `scaling` and `transfer`: engine and tools are made up, the rest is the service's own."""

from __future__ import annotations

import asyncio
import random
from array import array

from pydantic import BaseModel, Field

from rollout.trajectory import Chain, FinishReason, Message, Segment
from workers.handlers.base import AgentHandler, EvalContext, InitContext, Reward, RunContext

BOOT_VARIABLE = "BOOT_S"
"""By which the sandbox's specification tells a simulated host how long starting takes."""
VOCABULARY = 150_000
PROMPT = 512
"""Tokens of the prompt."""
CHARACTERS = 4
"""Of a message, for each token: about what English has."""
WORD = 5
"""Characters of a word on average, with its space."""
WORDS = ("the", "file", "returns", "a", "list", "of", "values", "because", "test", "fails", "on", "line")


class SimTask(BaseModel):
    init_s: float = 0.0
    """What the sandbox takes to start."""
    run_s: float = 0.0
    eval_s: float = 0.0
    tokens: int = Field(default=0, ge=0)
    """Tokens that the trajectory samples, in one turn."""


class Simulated(AgentHandler[SimTask]):
    """Boots a sandbox, sleeps in RUN and EVAL, leaves a trajectory."""

    name = "simulated"
    Task = SimTask
    uses_model = False

    async def init(self, ctx: InitContext[SimTask]) -> None:
        await ctx.sandboxes.boot(ctx, env={BOOT_VARIABLE: str(ctx.task.init_s)})

    async def run(self, ctx: RunContext[SimTask]) -> FinishReason:
        task = ctx.task
        if task.tokens:
            ctx.agent.trajectory.chains.append(make_chain(ctx.rollout_id, [task.tokens], 0))
        await asyncio.sleep(task.run_s)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[SimTask]) -> Reward:
        await asyncio.sleep(ctx.task.eval_s)
        return Reward(float(ctx.index % 2))


class LongTask(BaseModel):
    tokens: int
    """Tokens of the response, observations included."""
    turns: int
    observation: int
    """Tokens of what a tool answers between two turns."""


class Teller(AgentHandler[LongTask]):
    """Leaves a trajectory of the length it is told."""

    name = "teller"
    Task = LongTask
    uses_model = False

    async def run(self, ctx: RunContext[LongTask]) -> FinishReason:
        task = ctx.task
        sampled = (task.tokens - task.observation * (task.turns - 1)) // task.turns
        ctx.agent.trajectory.chains.append(
            make_chain(ctx.rollout_id, [sampled] * task.turns, task.observation)
        )
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[LongTask]) -> Reward:
        return Reward(float(ctx.index % 2))


def make_chain(seed: str, turns: list[int], observation: int) -> Chain:
    """A chain as irregular as real ones; log-probs are float32, as engines compute them.

    Args:
        turns: Sampled tokens of each turn.
        observation: Tokens of a tool's answer between two turns.
    """
    chance, chain = random.Random(seed), Chain()
    chain.append(_segment(chance, "user", PROMPT))
    for turn, sampled in enumerate(turns):
        if turn:
            chain.append(_segment(chance, "tool", observation))
        logprobs = array("f", [-chance.expovariate(2.0) for _ in range(sampled)]).tolist()
        said = {"logprobs": logprobs, "call_id": f"call-{turn}", "policy_version": "step-1"}
        chain.append(_segment(chance, "assistant", sampled, sampled=True, **said))
    return chain


def _segment(chance: random.Random, role: str, tokens: int, **more: object) -> Segment:
    words = chance.choices(WORDS, k=tokens * CHARACTERS // WORD)
    ids = [chance.randrange(VOCABULARY) for _ in range(tokens)]
    return Segment(role=role, token_ids=ids, messages=[Message(role=role, content=" ".join(words))], **more)
