"""RUN: the turns of model and tools. Always hands over to EVAL, with whatever was reached."""

from __future__ import annotations

import json

from rollout.schema import State
from rollout.trajectory import FinishReason, Trajectory
from sandbox.errors import SandboxError
from services.state.rollouts.store import Finish
from workers.agent.loop import AgentLoop
from workers.errors import AgentFault, HandlerError, StageError, StageTimeout, TaskError
from workers.handlers.base import RunContext, check_artifacts
from workers.patience import time_limit
from workers.stage import StageRun, consult, failed, outcome_fields


async def run_turns(run: StageRun) -> Finish:
    """The RUN stage.

    Raises:
        SandboxError: The sandbox is gone; nothing to score.
        StageError: Another failure that another attempt may mend, such as a backend's.
    """
    claim = run.claim
    handler = run.handler
    router = run.services.router(claim)
    agent = AgentLoop(claim.request, claim.index, router, handler.tools, handler.advertise_tools)
    agent.metrics.update(claim.metrics)
    ctx = run.context(RunContext, metrics=agent.metrics, artifacts=agent.trajectory.artifacts, agent=agent)
    fields: dict[str, str] = {}
    reason = FinishReason.ERROR
    try:
        if handler.uses_model:
            # Before the clock starts: waiting for room on a backend is waiting in a queue.
            await router.acquire(run.services.prompts.expected(handler.name, claim.request.task))
        async with time_limit(claim.request.limits.run_timeout_s, StageTimeout, "run_timeout_s"):
            reason = FinishReason(await handler.run(ctx))
        check_artifacts(ctx.artifacts, handler.name)
    except StageTimeout:
        reason = FinishReason.TIME_LIMIT
    except Exception as raised:
        error, answer = await consult(handler.on_run_error, ctx, raised)
        if isinstance(error, SandboxError):
            error = await run.blame(error)
            if not isinstance(error, AgentFault):
                raise error from raised
        if isinstance(error, AgentFault):
            reason = FinishReason.SANDBOX_LIMIT
            agent.trajectory.warnings.append(f"ended by the agent's own doing: {error}")
            run.log.warning("ended by the agent's own doing", blame=error.blame.value, error=str(error))
        elif isinstance(error, StageError) and error.retry:
            raise error from error.__cause__
        elif answer is None:
            # The partial trajectory is kept for whoever debugs the handler; EVAL will not score it.
            fields = failed(run, error)
        else:
            reason = FinishReason(answer)
            run.log.info("the handler has a failed RUN scored", error=repr(error), finish_reason=reason.value)
    finally:
        if router.backend is not None:
            fields["backend"] = router.backend.id
        run.services.prompts.seen(handler.name, agent.trajectory)
        agent.metrics.update(router.metrics)
        await router.release()
        if ctx.sandbox is not None:
            await ctx.sandbox.close()
    if handler.uses_model and "error" not in fields and not agent.trajectory.sampled_tokens:
        error = unsampled(reason, agent.trajectory)
        if error.retry:
            raise error
        fields |= failed(run, error) | {"finish_reason": reason.value}
    versions = agent.trajectory.versions_used
    agent.metrics |= {"turns": agent.trajectory.turns, "policy_versions": len(versions)}
    agent.trajectory.finish_reason = reason
    if claim.sandbox is not None and claim.sandbox.isolation_missing:
        missing = ", ".join(claim.sandbox.isolation_missing)
        agent.trajectory.warnings.append(f"sandbox ran without: {missing}")
    return Finish(
        State.EVALUATING,
        outcome_fields(finish_reason=reason, metrics=agent.metrics, policy_versions=json.dumps(versions))
        | fields,
        agent.trajectory,
    )


def unsampled(reason: FinishReason, trajectory: Trajectory) -> StageError:
    """Why a rollout is not scored in which the model said nothing: no reward could teach anything."""
    ids = sum(len(chain.token_ids) for chain in trajectory.chains)
    if reason is FinishReason.TIME_LIMIT:
        return StageTimeout("run_timeout_s passed before the model had said anything")
    if reason is FinishReason.CONTEXT_LENGTH:
        return TaskError(
            f"the prompt of {ids} ids leaves no room for a turn in the model's context; shorten the task, or "
            "start the LLM server with a longer one (max_model_len)"
        )
    return HandlerError(
        f"RUN ended with {reason.value} and without a model call, though the handler uses one"
    )
