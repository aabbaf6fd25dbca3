"""RUN: the turns of model and tools. Always hands over to EVAL, with whatever was reached."""

from __future__ import annotations

import asyncio
import json

from rollout.schema import State
from rollout.trajectory import FinishReason, Trajectory
from sandbox.client import SandboxClient
from sandbox.errors import SandboxError, SandboxGone
from services.state.rollouts.store import Finish
from services.state.turns.entries import trajectory_of
from workers import checkpoints, forks
from workers.agent.loop import AgentLoop
from workers.agent.others import refuse_text
from workers.agent.turns import TurnLog
from workers.errors import AgentFault, HandlerError, StageError, StageTimeout, TaskError
from workers.handlers.base import RunContext, check_artifacts
from workers.held import SHUTDOWN
from workers.patience import ask, time_limit
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
    log = run.services.turn_log(claim, run.held)
    place = forks.place(claim, log)
    agent = AgentLoop(claim.request, place, router, handler.tools, handler.advertise_tools, log)
    agent.around_call = checkpoints.around_calls(run, agent, log)
    agent.metrics.update(claim.metrics)
    more = {"metrics": agent.metrics, "artifacts": agent.trajectory.artifacts, "agent": agent}
    ctx = run.context(RunContext, fence=claim.fence, spent_s=log.spent_before_s, **more)
    if claim.turns:
        text = f"RUN goes on at turn {log.turns + 1}"
        run.log.info(text)
        await ask(run.services.note, claim.rollout_id, claim.fence, {}, text)
    if ctx.sandbox is not None and not await _follow(run, ctx.sandbox, log):
        return Finish("handback")
    fields: dict[str, str] = {}
    reason = FinishReason.ERROR
    keeps = False
    try:
        if handler.uses_model:
            # Before the clock starts: waiting for room on a backend is waiting in a queue.
            refuse_text(await router.acquire(run.services.prompts.expected(handler.name, claim.request.task)))
        log.begin()
        limit = claim.request.limits.run_timeout_s - log.spent_before_s
        async with time_limit(limit, StageTimeout, "run_timeout_s"):
            reason = FinishReason(await handler.run(ctx))
        log.settle()
        check_artifacts(ctx.artifacts, handler.name)
    except StageTimeout as late:
        run.others.check(late)
        reason = FinishReason.TIME_LIMIT
        if log.repeats:
            # There was not even time to go through what former workers did.
            agent.trajectory = trajectory_of(log.before)
    except asyncio.CancelledError:
        # The backend keeps the prefix for whoever goes on.
        keeps = run.held.reason == SHUTDOWN and run.can_pass_on
        if keeps:
            await log.flush()
        raise
    except Exception as raised:
        run.others.check(raised)
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
        if not keeps:
            await router.release()
        await run.others.close(agent.trajectory, agent.metrics)
        if ctx.sandbox is not None:
            await ctx.sandbox.close()
    lacks = claim.request.origin and forks.tell_shared(claim.request.origin, agent, reason)
    if handler.uses_model and "error" not in fields and not agent.trajectory.sampled_tokens:
        error = lacks or unsampled(reason, agent.trajectory)
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


async def _follow(run: StageRun, sandbox: SandboxClient, log: TurnLog) -> bool:
    """Have the log follow what is done in the sandbox; False: it went with a service that ended in order.

    Raises:
        StageError: It is gone otherwise, or not where the log is.
    """
    try:
        await log.follow(sandbox)
    except SandboxError as error:
        await sandbox.close()
        fault = await run.blame(error)
        # What the agent has brought about is met again where the next tool is called, and scored.
        if isinstance(fault, AgentFault) or (run.claim.handed and isinstance(error, SandboxGone)):
            return isinstance(fault, AgentFault)
        raise fault from error
    return True


def unsampled(reason: FinishReason, trajectory: Trajectory) -> StageError:
    """Why a rollout is not scored in which the model said nothing: no reward could teach anything."""
    ids = sum(len(chain.token_ids) for chain in trajectory.own)
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
