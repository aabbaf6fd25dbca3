"""EVAL: score what RUN left, then end the rollout. Cleaning up is part of every outcome."""

from __future__ import annotations

import json
import math
from typing import Any

from rollout.schema import State
from rollout.schema.trajectory import OTHER_ROLES
from rollout.trajectory import FinishReason, Trajectory
from sandbox.errors import SandboxError, SandboxGone
from services.state.rollouts.payloads import PayloadError
from services.state.rollouts.store import Claim, Finish
from workers.errors import AgentFault, HandlerError, InfrastructureError, StageTimeout
from workers.handlers.base import EvalContext, Reward, check_artifacts
from workers.patience import time_limit
from workers.stage import StageRun, consult, outcome_fields


async def evaluate(run: StageRun) -> Finish:
    """The EVAL stage. A rollout whose RUN failed is not scored: it ends as failed, without a reward.

    Raises:
        StageTimeout: `Limits.eval_timeout_s` passed.
        StageError, SandboxError: As the handler or the sandbox has it.
    """
    claim = run.claim
    if claim.error is not None:
        return Finish(State.FAILED)
    handler = run.handler
    reason = FinishReason(claim.finish_reason) if claim.finish_reason else None
    trajectory = _trajectory(claim)

    def kept() -> tuple[object, ...]:
        return dict(trajectory.artifacts), len(trajectory.warnings), len(trajectory.chains)

    before = kept()
    left = {"artifacts": trajectory.artifacts, "trajectory": trajectory, "finish_reason": reason}
    ctx = run.context(EvalContext, metrics=claim.metrics, **left)
    limit = claim.request.limits.eval_timeout_s
    try:
        async with time_limit(limit, StageTimeout, f"EVAL took longer than eval_timeout_s = {limit:g}"):
            reward = await _score(run, ctx)
        _check(reward, handler.name)
        more = handler.metrics(ctx, reward)
    except (SandboxError, AgentFault) as error:
        reward, more = await _without_sandbox(run, ctx, error), {}
    finally:
        await run.others.close(trajectory, ctx.metrics)
        if ctx.sandbox is not None:
            await ctx.sandbox.close()
    check_artifacts(ctx.artifacts, handler.name)
    ctx.metrics.update(more)
    return Finish(
        # RUN was cut off by its time limit: the score stands, and the state says how it came about.
        State.TIMED_OUT if reason is FinishReason.TIME_LIMIT else State.COMPLETED,
        outcome_fields(
            reward=reward.value,
            reward_components=json.dumps(reward.components),
            role_rewards=json.dumps(reward.roles),
            metrics=ctx.metrics,
        ),
        # Written once more only where EVAL has added to it: it may be large.
        trajectory if kept() != before else None,
    )


async def _score(run: StageRun, ctx: EvalContext[Any]) -> Reward:
    try:
        return await run.handler.evaluate(ctx)
    except Exception as raised:
        run.others.check(raised)
        error, stands_in = await consult(run.handler.on_eval_error, ctx, raised)
        if stands_in is None:
            raise error from error.__cause__
        ctx.log.info("the handler scores a failed EVAL", error=repr(error), reward=repr(stands_in))
        return stands_in


async def _without_sandbox(run: StageRun, ctx: EvalContext[Any], error: SandboxError | AgentFault) -> Reward:
    """The score of an agent that left nothing to score: 0; StageError where that was not its doing."""
    fault = await run.blame(error) if isinstance(error, SandboxError) else error
    ended_in_run = ctx.finish_reason is FinishReason.SANDBOX_LIMIT and isinstance(error, SandboxGone)
    if not (isinstance(fault, AgentFault) or ended_in_run):
        raise fault from error
    ctx.trajectory.warnings.append(f"scored 0 for the agent's own doing: {fault}")
    ctx.log.warning("scored 0 for the agent's own doing", blame=AgentFault.blame.value, error=str(fault))
    return Reward(0.0)


def _trajectory(claim: Claim) -> Trajectory:
    try:
        trajectory = claim.trajectory()
    except PayloadError as error:
        raise InfrastructureError(str(error)) from error
    if trajectory is None:
        raise InfrastructureError("the trajectory is missing in Redis; was it evicted?")
    return trajectory


def _check(reward: object, handler: str) -> None:
    if not isinstance(reward, Reward):
        raise HandlerError(f"{handler}.evaluate returned {type(reward).__name__}, not Reward")
    numbers = (reward.value, *reward.components.values(), *reward.roles.values())
    if not all(math.isfinite(value) for value in numbers) or set(reward.roles) - OTHER_ROLES:
        raise HandlerError(f"{handler}.evaluate: a reward that is not finite, or of no role: {reward}")
