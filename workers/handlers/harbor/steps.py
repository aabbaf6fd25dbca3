"""Tasks with `[[steps]]`: one sandbox, one conversation, each step verified before the next one is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from rollout.suites.harbor.directory import StepDirectory
from rollout.trajectory import FinishReason, Message
from workers.agent.tools import Tool
from workers.agent.turns import RunDiverged
from workers.handlers.base import EvalContext, Reward, RunContext
from workers.handlers.harbor import solution, verifier
from workers.handlers.harbor.artifacts import keep_artifacts
from workers.handlers.harbor.opening import opening, told
from workers.handlers.harbor.ready import NotReady, begin
from workers.handlers.harbor.task import HarborTask
from workers.handlers.harbor.trial import Trial

NOTES = "steps"
"""The artifact: what RUN found of each step, for EVAL, which may be in another process."""
Ctx = RunContext[HarborTask]
Turns = Callable[[Ctx, Trial, StepDirectory], AbstractAsyncContextManager[Sequence[Tool]]]


async def play(ctx: Ctx, trial: Trial, turns: Turns) -> FinishReason:
    """The turns of all steps, up to one that does not earn what it must.

    Raises:
        RunDiverged: A worker was lost on the way. What it has verified is of a sandbox that has changed
            since, so the attempt begins anew.
    """
    if ctx.spent_s:
        raise RunDiverged("a task with steps begins anew where its worker was lost")
    reason = FinishReason.STOP
    for number, step in enumerate(trial.directory.steps):
        if number and not await _ready(ctx, trial, step):
            break
        _note(ctx, number, {"step": step.name, "reward": None})
        messages = [told(trial, step)] if number else opening(trial, step)
        try:
            async with turns(ctx, trial, step) as tools, asyncio.timeout(trial.agent_s(step)) as limit:
                reason = await _turns(ctx, messages, tools, first=not number)
        except TimeoutError:
            if not limit.expired():
                raise
            # Between a turn and its answers nothing else can be said, so it is the last step.
            reason = FinishReason.TIME_LIMIT
        if not await _verified(ctx, trial, step) or reason is not FinishReason.STOP:
            break
    return reason


async def _turns(ctx: Ctx, messages: list[Message], tools: Sequence[Tool], *, first: bool) -> FinishReason:
    agent = ctx.agent
    if first:
        return await agent.run(messages, ctx.sandbox, tools=tools)
    # What the last turn's tools answered was not told yet, and all that follows a turn is told together.
    if not agent.append([*agent.trajectory.unread, *messages]):
        return FinishReason.CONTEXT_LENGTH
    return await agent.go_on(ctx.sandbox)


async def solve(ctx: Ctx, trial: Trial) -> FinishReason:
    """The solutions of all steps, as `play` does an agent's turns."""
    for number, step in enumerate(trial.directory.steps):
        if number and not await _ready(ctx, trial, step):
            break
        await solution.solve(ctx, trial, step)
        if not await _verified(ctx, trial, step):
            break
    return FinishReason.STOP


async def evaluate(ctx: EvalContext[HarborTask], trial: Trial) -> Reward:
    """The score of all steps that were played. One that RUN's end has cut off is verified here."""
    cut_off = next((at for at, note in enumerate(_notes(ctx)) if note["reward"] is None), None)
    if cut_off is not None or not _notes(ctx):
        await _verified(ctx, trial, trial.directory.steps[cut_off or 0])
    played = _notes(ctx)
    # As in Harbor, steps behind one that earned too little do not count. Those that the agent has kept from
    # being played do, else one step well done and a limit, or a broken sandbox, would be worth all of them.
    missing = trial.directory.steps[len(played) :] if _is_enough(trial, played[-1]) else ()
    notes = [*played, *({"step": step.name, "reward": 0.0, "rewards": {}} for step in missing)]
    counted = notes[-1:] if trial.directory.config.multi_step_reward_strategy == "final" else notes
    names = dict.fromkeys(name for note in counted for name in note["rewards"])
    components = {
        name: sum(note["rewards"].get(name, 0.0) for note in counted) / len(counted) for name in names
    }
    components |= {f"step.{note['step']}": note["reward"] for note in played}
    ctx.metrics["steps_played"] = len(played)
    return Reward(sum(note["reward"] for note in counted) / len(counted), components)


def _notes(ctx: Any) -> list[dict[str, Any]]:
    return json.loads(ctx.artifacts.get(NOTES, "[]"))


def _note(ctx: Any, number: int, note: dict[str, Any]) -> None:
    ctx.artifacts[NOTES] = json.dumps([*_notes(ctx)[:number], note])


async def _ready(ctx: Ctx, trial: Trial, step: StepDirectory) -> bool:
    """Ready the sandbox for a further step; False: that failed.

    An agent had the sandbox before, so a failure drops no sample: the steps end, and are scored.
    """
    assert ctx.sandbox is not None
    try:
        await ctx.sandbox.setup(trial.environment(step.agent.user))
        await begin(ctx.sandbox, trial, step)
    except NotReady as error:
        ctx.agent.trajectory.warnings.append(f"the steps end before {step.name}: {error}")
        return False
    return True


async def _verified(ctx: Ctx | EvalContext[HarborTask], trial: Trial, step: StepDirectory) -> bool:
    """Verify a step and note what it earned; whether that is enough for the next one."""
    verdict = await verifier.verify(ctx, trial, step)
    await keep_artifacts(ctx, trial, step)
    note = {"step": step.name, "reward": verdict.reward, "rewards": verdict.rewards}
    _note(ctx, trial.directory.steps.index(step), note)
    return _is_enough(trial, note)


def _is_enough(trial: Trial, note: dict[str, Any]) -> bool:
    """Whether what a step earned opens the next one."""
    step = next(step for step in trial.directory.steps if step.name == note["step"])
    least = step.config.min_reward
    if isinstance(least, dict):
        return all(note["rewards"].get(name, float("-inf")) >= value for name, value in least.items())
    return least is None or note["reward"] >= least
