"""Texts that a handler keeps with a rollout."""

from __future__ import annotations

import asyncio

from rollout.schema import Blame, Rollout, RolloutRequest, State
from rollout.trajectory import FinishReason
from workers.handlers.base import MAX_ARTIFACT_BYTES, AgentHandler, AnyTask, EvalContext, Reward, RunContext
from workers.inprocess import InProcess


class Keeper(AgentHandler[AnyTask]):
    """Keeps what its task says, and reads in EVAL what RUN kept."""

    name = "keeper"
    uses_model = False

    async def run(self, ctx: RunContext[AnyTask]) -> FinishReason:
        ctx.artifacts["patch"] = ctx.request.task["in_run"]
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[AnyTask]) -> Reward:
        if "in_eval" in ctx.request.task:
            ctx.artifacts["report"] = ctx.request.task["in_eval"]
        return Reward(float(len(ctx.artifacts["patch"])))


def roll(**task: object) -> Rollout:
    request = RolloutRequest(handler="keeper", task=task)
    return asyncio.run(InProcess(Keeper()).run(request))[0]


def test_artifacts_of_run_reach_eval_and_those_of_both_are_in_the_result() -> None:
    rollout = roll(in_run="four", in_eval="fine")
    assert rollout.reward == 4.0
    assert rollout.trajectory.artifacts == {"patch": "four", "report": "fine"}


def test_artifacts_of_run_stay_when_eval_adds_none() -> None:
    assert roll(in_run="x").trajectory.artifacts == {"patch": "x"}


def test_artifacts_beyond_the_limit_fail_the_handler_and_are_not_kept() -> None:
    rollout = roll(in_run="x" * (MAX_ARTIFACT_BYTES + 1))
    assert rollout.state is State.FAILED
    assert rollout.error.blame is Blame.HANDLER
    assert f"{MAX_ARTIFACT_BYTES + 1} bytes" in rollout.error.message
    assert rollout.trajectory.artifacts == {}


def test_an_artifact_that_is_no_text_fails_the_handler() -> None:
    rollout = roll(in_run=["no", "text"])
    assert rollout.error.blame is Blame.HANDLER
    assert "artifact 'patch' is list" in rollout.error.message
