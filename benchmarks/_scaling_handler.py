"""The handler of `scaling`: sandbox, engine and scoring are sleeps; all around them is the service's own."""

from __future__ import annotations

import asyncio
import random
from array import array

from pydantic import BaseModel, Field

from rollout.trajectory import Chain, FinishReason, Segment
from workers.handlers.base import AgentHandler, EvalContext, InitContext, Reward, RunContext

BOOT_VARIABLE = "BOOT_S"
"""By which the sandbox's specification tells a simulated host how long starting takes."""
PROMPT = 256
VOCABULARY = 150_000


class SimTask(BaseModel):
    init_s: float = 0.0
    """What the sandbox takes to start; with a real one, nothing."""
    run_s: float = 0.0
    eval_s: float = 0.0
    tokens: int = Field(default=0, ge=0)
    """Sampled ones that the trajectory holds."""
    sandbox: bool = True
    command: str = ""
    """To be run in the (real) sandbox before the sleep of RUN."""


class Simulated(AgentHandler[SimTask]):
    """Boots a sandbox, sleeps in RUN and EVAL, leaves a trajectory."""

    name = "simulated"
    Task = SimTask
    uses_model = False

    async def init(self, ctx: InitContext[SimTask]) -> None:
        if ctx.task.sandbox:
            await ctx.sandboxes.boot(ctx, env={BOOT_VARIABLE: str(ctx.task.init_s)})
        else:
            await asyncio.sleep(ctx.task.init_s)

    async def run(self, ctx: RunContext[SimTask]) -> FinishReason:
        task = ctx.task
        if task.command:
            await ctx.sandbox.bash(task.command)
        if task.tokens:
            ctx.agent.trajectory.chains.append(_chain(task.tokens, random.Random(ctx.rollout_id)))
        await asyncio.sleep(task.run_s)
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[SimTask]) -> Reward:
        await asyncio.sleep(ctx.task.eval_s)
        return Reward(float(ctx.index % 2))


def _chain(tokens: int, chance: random.Random) -> Chain:
    chain = Chain()
    chain.append(Segment(role="user", token_ids=[chance.randrange(VOCABULARY) for _ in range(PROMPT)]))
    logprobs = array("f", [-chance.expovariate(2.0) for _ in range(tokens)]).tolist()
    ids = [chance.randrange(VOCABULARY) for _ in range(tokens)]
    chain.append(
        Segment(
            role="assistant",
            token_ids=ids,
            sampled=True,
            logprobs=logprobs,
            call_id="call-0",
            policy_version="step-1",
        )
    )
    return chain
