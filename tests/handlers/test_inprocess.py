"""Handlers in one process: the stages are the service's own, and so are errors, blame and hooks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from rollout.schema import Blame, Limits, Rollout, State
from rollout.trajectory import FinishReason, Message
from services.engines.base import SampleRequest
from services.settings import Settings
from tests.helpers.stack import CHECKPOINT
from workers.agent.replay import Action, Call, ReplayRouter, read_actions
from workers.agent.tools import Finish, Think
from workers.errors import InfrastructureError, TaskError
from workers.handlers import AgentHandler, EvalContext, InitContext, Reward, RunContext
from workers.handlers.calculator import Calculator
from workers.testing import play


class Plan(BaseModel):
    raises: str = ""
    """Stage that raises."""
    hook: str = ""
    """What its hook does."""
    mendable: bool = False


class Hooked(AgentHandler[Plan]):
    """Raises where it is told, and has hooks."""

    name = "hooked"
    Task = Plan
    tools = (Think(), Finish())

    def prompt(self, task: Plan) -> list[Message]:
        return [Message(role="user", content="1")]

    def _raise(self, ctx: Any, stage: str) -> None:
        ctx.metrics[f"{stage}s"] = ctx.metrics.get(f"{stage}s", 0) + 1
        if ctx.task.raises == stage:
            raise InfrastructureError("away") if ctx.task.mendable else ValueError("broken")

    def _answer(self, ctx: Any, error: Exception, answer: Any) -> Any:
        if ctx.task.hook == "elsewhere":
            raise TaskError("the data is at fault") from error
        if ctx.task.hook == "fails":
            raise RuntimeError("the hook is broken, too")
        return answer if ctx.task.hook == "answers" else None

    async def init(self, ctx: InitContext[Plan]) -> None:
        self._raise(ctx, "init")

    async def run(self, ctx: RunContext[Plan]) -> FinishReason:
        reason = await super().run(ctx)
        self._raise(ctx, "run")
        return reason

    async def evaluate(self, ctx: EvalContext[Plan]) -> Reward:
        self._raise(ctx, "eval")
        return Reward(1.0)

    async def on_init_error(self, ctx: InitContext[Plan], error: Exception) -> None:
        self._answer(ctx, error, None)

    async def on_run_error(self, ctx: RunContext[Plan], error: Exception) -> FinishReason | None:
        return self._answer(ctx, error, FinishReason.STOP)

    async def on_eval_error(self, ctx: EvalContext[Plan], error: Exception) -> Reward | None:
        return self._answer(ctx, error, Reward(0.25))

    def metrics(self, ctx: EvalContext[Plan], reward: Reward) -> dict[str, float]:
        return {"twice": 2 * reward.value}


def played(
    handler: AgentHandler[Any], actions: list[Action], task: dict[str, Any], **more: Any
) -> list[Rollout]:
    return play(handler, task, actions, settings=Settings(retry_delay_s=0.01), **more)


def hooked(**plan: Any) -> Rollout:
    (done,) = played(Hooked(), [Action(content="2")], plan, limits=Limits(max_attempts=2))
    return done


def test_a_rollout_goes_through_its_three_stages():
    done = hooked()
    assert (done.state, done.reward, done.finish_reason) == (State.COMPLETED, 1.0, FinishReason.STOP)
    assert done.metrics["twice"] == 2.0 and done.metrics["turns"] == 1
    assert set(done.stage_seconds) == {"init", "run", "eval"}
    assert not done.drop and done.error is None


@pytest.mark.parametrize("agent", [{"harness": "external"}, {"harness": "command", "command": ["true"]}])
def test_a_program_is_refused_where_there_is_no_service_for_its_calls(agent):
    (done,) = played(Hooked(), [Action(content="2")], {}, agent=agent)
    assert (done.state, done.reward, done.trajectory) == (State.FAILED, None, None)
    assert (done.error.blame, done.error.stage) == (Blame.TASK, "init")
    assert done.error.message.startswith("agent: ") and "whole service" in done.error.message


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
@pytest.mark.parametrize("hook", ["", "fails"])
def test_without_a_hook_that_helps_a_failure_is_the_handlers(stage, hook):
    done = hooked(raises=stage, hook=hook)
    assert (done.state, done.reward, done.drop) == (State.FAILED, None, True)
    assert (done.error.blame, done.error.type, done.error.message) == (Blame.HANDLER, "ValueError", "broken")
    assert done.attempt == 1
    if stage != "init":
        assert done.trajectory.turns == 1, "what was reached is kept"


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
def test_a_hook_may_lay_the_failure_elsewhere(stage):
    done = hooked(raises=stage, hook="elsewhere")
    assert (done.state, done.reward, done.error.blame) == (State.FAILED, None, Blame.TASK)
    assert "ValueError: broken" in done.error.traceback, "what it was at first can be read"
    if stage == "run":
        assert done.trajectory.turns == 1


def test_a_hook_may_have_a_failed_run_scored():
    done = hooked(raises="run", hook="answers")
    assert (done.state, done.reward, done.finish_reason) == (State.COMPLETED, 1.0, FinishReason.STOP)
    assert done.error is None and not done.drop


def test_a_hook_may_score_a_failed_evaluation():
    done = hooked(raises="eval", hook="answers")
    assert (done.state, done.reward, done.metrics["twice"]) == (State.COMPLETED, 0.25, 0.5)


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
def test_what_another_attempt_may_mend_has_no_reward_whatever_a_hook_answers(stage):
    done = hooked(raises=stage, hook="answers", mendable=True)
    assert (done.state, done.reward, done.drop) == (State.FAILED, None, True)
    assert (done.error.blame, done.attempt) == (Blame.INFRASTRUCTURE, 2)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "reward",
    [
        *(Reward(NAN), Reward(-INF), Reward(1.0, {"a": 1.0, "b": NAN}), Reward(1.0, {"a": INF})),
        *(Reward(1.0, roles={"opponent": NAN}), Reward(1.0, roles={"agent": 1.0}), 1.0, None),
    ],
)
def test_a_reward_that_is_none_is_the_handlers_failure(reward):
    class Scores(Hooked):
        async def evaluate(self, ctx: EvalContext[Plan]) -> Reward:
            return reward

    (done,) = played(Scores(), [Action(content="2")], {})
    assert (done.state, done.reward, done.reward_components, done.drop) == (State.FAILED, None, {}, True)
    assert done.role_rewards == {}
    assert (done.error.blame, done.attempt) == (Blame.HANDLER, 1)
    reason = "not finite" if isinstance(reward, Reward) else f"returned {type(reward).__name__}, not Reward"
    assert reason in done.error.message


def test_tools_run_in_a_real_sandbox_and_group_mates_have_one_each():
    command = {"command": "pwd; ls; touch mine; echo $((37*85))"}
    actions = [Action(tool_calls=[Call(name="execute_bash", arguments=command)]), Action(content="3145")]
    rollouts = played(Calculator(), actions, {"question": "37 times 85", "answer": "3145"}, n=2)
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    assert all("3145" in rollout.trajectory.messages[2].text for rollout in rollouts)
    assert not any("mine" in rollout.trajectory.messages[2].text for rollout in rollouts)
    assert rollouts[0].sandbox.id != rollouts[1].sandbox.id


def test_behind_the_last_action_the_agent_only_ends():
    (done,) = played(Hooked(), [], {})
    assert (done.finish_reason, done.trajectory.final_text()) == (FinishReason.STOP, "")


def test_actions_are_read_from_a_file_with_one_a_line(tmp_path):
    path = tmp_path / "actions.jsonl"
    path.write_text('"think first"\n\n{"tool_calls": [{"name": "finish", "arguments": {"message": "4"}}]}\n')
    first, second = read_actions(path)
    assert first.text == "think first" and second.tool_calls[0].arguments == {"message": "4"}
    path.write_text('"fine"\n{"tool_call": []}\n')
    with pytest.raises(TaskError, match="line 2"):
        read_actions(path)


def test_an_action_that_the_models_format_reads_otherwise_is_refused():
    router = ReplayRouter([Action(content="<tool_call>{", tool_calls=[Call(name="think")])], str(CHECKPOINT))

    async def ask() -> None:
        await router.acquire()
        await router.generate(SampleRequest("c", [1], max_tokens=1000), timeout_s=60)

    with pytest.raises(TaskError, match="does not read these calls"):
        asyncio.run(ask())
