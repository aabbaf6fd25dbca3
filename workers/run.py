"""RUN: the turns of model and tools. Always hands over to EVAL, with whatever was reached."""

from __future__ import annotations

from rollout.schema import State
from rollout.trajectory import FinishReason
from sandbox.errors import SandboxError
from services.state.rollouts import Finish
from workers.agent.loop import AgentLoop
from workers.agent.router import BackendRouter
from workers.errors import StageError, StageTimeout, time_limit
from workers.handlers.base import RunContext
from workers.stage import StageRun, failed, outcome_fields


async def run_turns(run: StageRun) -> Finish:
    """The RUN stage.

    Raises:
        SandboxError: The sandbox is gone; nothing to score.
        StageError: Another failure that another attempt may mend, such as a backend's.
    """
    claim, process = run.claim, run.process
    handler = process.handlers.get(claim.request.handler)
    router = BackendRouter(claim.rollout_id, claim.request.policy_version, process.backends, process.http())
    agent = AgentLoop(claim.request, claim.index, router, handler.tools, handler.advertise_tools)
    agent.metrics.update(claim.metrics)
    ctx = run.context(RunContext, handler, metrics=agent.metrics, agent=agent)
    fields: dict[str, str] = {}
    reason = FinishReason.ERROR
    try:
        async with time_limit(claim.request.limits.run_timeout_s, StageTimeout, "run_timeout_s"):
            reason = FinishReason(await handler.run(ctx))
    except StageTimeout:
        reason = FinishReason.TIME_LIMIT
    except SandboxError:
        raise
    except Exception as error:
        if isinstance(error, StageError) and error.retry:
            raise
        # The partial trajectory is kept for whoever debugs the handler; EVAL will not score it.
        fields = failed(run, error)
    finally:
        if router.backend is not None:
            fields["backend"] = router.backend.id
        await router.release()
        if ctx.sandbox is not None:
            await ctx.sandbox.close()
    agent.metrics["turns"] = agent.trajectory.turns
    agent.trajectory.finish_reason = reason
    if claim.sandbox is not None and claim.sandbox.isolation_missing:
        missing = ", ".join(claim.sandbox.isolation_missing)
        agent.trajectory.warnings.append(f"sandbox ran without: {missing}")
    return Finish(
        State.EVALUATING,
        outcome_fields(finish_reason=reason, metrics=agent.metrics) | fields,
        agent.trajectory,
    )
