"""INIT: check the task, boot the sandbox, make everything ready."""

from __future__ import annotations

import asyncio

from rollout.schema import State
from services.state.rollouts.store import Finish
from workers import forks
from workers.errors import StageTimeout
from workers.handlers.base import InitContext
from workers.patience import time_limit
from workers.stage import StageRun, consult, outcome_fields


async def init(run: StageRun) -> Finish:
    """The INIT stage.

    Raises:
        StageTimeout: `Limits.init_timeout_s` passed.
        StageError, SandboxError: As the handler, the task or the sandbox has it.
    """
    claim = run.claim
    handler = run.handler
    ctx = run.context(InitContext)
    limit = claim.request.limits.init_timeout_s
    async with time_limit(limit, StageTimeout, f"INIT took longer than init_timeout_s = {limit:g}"):
        if claim.left_on == run.services.settings.node:
            await run.sandboxes.release()  # what the lost INIT of this attempt has left
        elif claim.left_on:
            clean_up = run.services.dispatcher.clean_up
            await asyncio.to_thread(clean_up, claim.rollout_id, claim.left_on, claim.attempt)
        try:
            await (forks.init(run, ctx) if claim.request.origin else handler.init(ctx))
        except Exception as raised:
            error, _ = await consult(handler.on_init_error, ctx, raised)
            raise error from error.__cause__
    if ctx.sandbox is not None:
        await ctx.sandbox.close()
    return Finish(State.READY, outcome_fields(metrics=ctx.metrics, survives=ctx.survives))
