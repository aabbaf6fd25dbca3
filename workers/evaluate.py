"""EVAL: score what RUN left, then end the rollout. Cleaning up is part of every outcome."""

from __future__ import annotations

import json
import math

from rollout.schema import State
from rollout.trajectory import FinishReason, Trajectory
from services.state.rollouts import Finish
from workers.errors import HandlerError, InfrastructureError, StageTimeout, time_limit
from workers.handlers.base import EvalContext, Reward
from workers.stage import StageRun, outcome_fields


async def evaluate(run: StageRun) -> Finish:
    """The EVAL stage. A rollout whose RUN failed is not scored: it ends as failed, without a reward.

    Raises:
        StageTimeout: `Limits.eval_timeout_s` passed.
        StageError, SandboxError: As the handler or the sandbox has it.
    """
    claim, process = run.claim, run.process
    if claim.error is not None:
        return Finish(State.FAILED)
    handler = process.handlers.get(claim.request.handler)
    reason = FinishReason(claim.finish_reason) if claim.finish_reason else None
    ctx = run.context(
        EvalContext,
        handler,
        metrics=claim.metrics,
        trajectory=_trajectory(claim.trajectory_json),
        finish_reason=reason,
    )
    limit = claim.request.limits.eval_timeout_s
    try:
        async with time_limit(limit, StageTimeout, f"EVAL took longer than eval_timeout_s = {limit:g}"):
            reward = await handler.evaluate(ctx)
    finally:
        if ctx.sandbox is not None:
            await ctx.sandbox.close()
    _check(reward, handler.name)
    return Finish(
        # RUN was cut off by its time limit: the score stands, and the state says how it came about.
        State.TIMED_OUT if reason is FinishReason.TIME_LIMIT else State.COMPLETED,
        outcome_fields(
            reward=reward.value,
            reward_components=json.dumps(reward.components),
            metrics=ctx.metrics,
        ),
    )


def _trajectory(raw: str | None) -> Trajectory:
    if raw is None:
        raise InfrastructureError("the trajectory is missing in Redis; was it evicted?")
    return Trajectory.model_validate_json(raw)


def _check(reward: object, handler: str) -> None:
    if not isinstance(reward, Reward):
        raise HandlerError(f"{handler}.evaluate returned {type(reward).__name__}, not Reward")
    if not all(math.isfinite(value) for value in (reward.value, *reward.components.values())):
        raise HandlerError(f"{handler}.evaluate returned a reward that is not finite: {reward}")
