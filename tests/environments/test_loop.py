"""The loop of environments: turns, limits, rewards; and that a failing environment never makes a 0."""

from __future__ import annotations

import asyncio
import math
import re
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rollout.schema import Limits, RolloutRequest, Stage, State
from rollout.trajectory import Message, ToolCall
from tests.helpers.stack import ROOT
from workers.agent.replay import Action, Call
from workers.errors import TaskError
from workers.handlers.environments import (
    Environment,
    EnvironmentHandler,
    EnvironmentLost,
    EnvironmentTask,
    Opening,
    Step,
    ToolEnvironment,
)
from workers.handlers.environments.base import MAX_TEXT
from workers.testing import play

ASK = [Message(role="user", content="Say a number.")]
NUMBER = {"type": "function", "function": {"name": "number", "parameters": {"type": "object"}}}


def told(text="more", **fields) -> Step:
    return Step([Message(role="user", content=text)], **fields)


class Scripted(Environment):
    """Answers as the test wrote."""

    answers: ClassVar[list[Any]] = []
    opening: ClassVar[Any] = None
    scored: ClassVar[Any] = None
    closed: ClassVar[int] = 0
    seeds: ClassVar[list[int]] = []

    async def reset(self, task, seed):
        self.seeds.append(seed)
        self.left = iter(self.answers)
        return self.opening or Opening(list(ASK))

    async def step(self, turn):
        answer = next(self.left)
        answer = answer(turn) if callable(answer) else answer
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def score(self, trajectory):
        if isinstance(self.scored, dict):
            self.parts = dict(self.scored)
            return sum(self.scored.values())
        return self.scored

    async def close(self):
        type(self).closed += 1


class Toy(EnvironmentHandler[EnvironmentTask]):
    """For tests."""

    name = "toy"
    Task = EnvironmentTask
    kind: type[Environment] = Scripted

    async def make(self, ctx):
        return self.kind()


@pytest.fixture
def run():
    def run(answers, said="abcdefgh", *, opening=None, scored=None, n=1, task=None, **limits):
        Scripted.answers, Scripted.opening, Scripted.scored = answers, opening, scored
        Scripted.closed, Scripted.seeds = 0, []
        actions = [action if isinstance(action, Action) else Action(content=action) for action in said]
        limits = Limits(**{"max_attempts": 1, **limits})
        rollouts = play(Toy(), task or {}, actions, limits=limits, n=n)
        assert Scripted.closed == len(Scripted.seeds), "each episode is closed, however it ended"
        return rollouts if n > 1 else rollouts[0]

    return run


def test_the_rewards_of_all_steps_are_summed_until_the_environment_says_done(run):
    rollout = run([told(reward=0.25), told(), told("end", reward=0.5, done=True)])
    assert (rollout.state, rollout.reward, rollout.finish_reason) == (State.COMPLETED, 0.75, "stop")
    assert [m.text for m in rollout.trajectory.messages] == [
        "Say a number.",
        *"a",
        "more",
        "b",
        "more",
        "c",
        "end",
    ]
    assert rollout.metrics["env_steps"] == 3 and rollout.metrics["env_s"] >= 0


def test_a_score_of_the_whole_episode_takes_the_place_of_the_sum_and_its_parts_are_kept(run):
    rollout = run([told(reward=9.0, done=True)], scored={"form": 0.25, "answer": 0.5})
    assert rollout.reward == 0.75 and rollout.reward_components == {"form": 0.25, "answer": 0.5}


@pytest.mark.parametrize(
    ("limits", "reason", "reward"),
    [
        ({"max_turns": 2}, "turn_limit", 0.2),
        ({"max_response_tokens": 4}, "token_limit", 0.2),
        ({"max_repeated_actions": 2}, "repeated_actions", 0.2),
    ],
)
def test_an_episode_that_a_limit_ends_has_what_its_steps_gave(run, limits, reason, reward):
    rollout = run([told(reward=0.1) for _ in range(9)], "aaaaaaaaa", **limits)
    assert (rollout.state, rollout.finish_reason) == (State.COMPLETED, reason)
    assert rollout.reward == pytest.approx(reward)


def test_an_episode_that_takes_too_long_is_scored_before_its_stage_ends(run):
    async def slow():
        await asyncio.sleep(30)

    rollout = run([told(reward=0.5), lambda turn: slow()], run_timeout_s=2.0)
    assert (rollout.state, rollout.reward) == (State.TIMED_OUT, 0.5)


NONSENSE = {
    "no reward at the end": [told(done=True)],
    "a reward that is not finite": [told(reward=math.nan, done=True)],
    "an infinite reward in the middle": [told(reward=math.inf), told(reward=1.0, done=True)],
    "a reward that is a text": [told(reward="1", done=True)],
    "a reward that is true": [told(reward=True, done=True)],
    "no step": ["done"],
    "an end that is no truth": [told(reward=1.0, done="yes")],
    "nothing said": [Step([], 1.0)],
    "messages that are none": [Step(["text"], 1.0)],
    "a system message": [Step([Message(role="system", content="obey")], 1.0)],
    "too much said": [told("x" * (MAX_TEXT + 1), reward=1.0)],
    "sums that overflow": [told(reward=1.5e308), told(reward=1.5e308, done=True)],
}


@pytest.mark.parametrize("answers", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_of_an_environment_drops_the_sample_as_the_tasks_fault(run, answers):
    rollout = run(answers)
    assert (rollout.state, rollout.reward) == (State.FAILED, None)
    assert rollout.error.type == "EnvironmentFault" and rollout.error.blame == "task"


@pytest.mark.parametrize("scored", [math.nan, "1", {"a": math.inf}])
def test_a_score_that_is_no_number_drops_the_sample(run, scored):
    assert run([told(reward=1.0, done=True)], scored=scored).error.type == "EnvironmentFault"


def test_an_environment_that_was_lost_is_tried_again_and_then_dropped(run):
    rollout = run([EnvironmentLost("gone")], max_attempts=2)
    assert (rollout.state, rollout.reward, rollout.error.blame) == (State.FAILED, None, "infrastructure")
    assert len(Scripted.seeds) == 2 and len(set(Scripted.seeds)) == 1, "the same world again"


def test_an_error_of_the_environments_own_code_is_no_reward(run):
    rollout = run([ZeroDivisionError("oops")])
    assert (rollout.state, rollout.reward, rollout.error.type) == (State.FAILED, None, "ZeroDivisionError")


def test_an_opening_without_words_or_with_two_tools_of_one_name_is_refused(run):
    assert "without a message" in run([], opening=Opening([])).error.message
    assert "two tools named 'number'" in run([], opening=Opening(list(ASK), [NUMBER, NUMBER])).error.message
    assert "no known form" in run([], opening=Opening(list(ASK), [{"name": "number"}])).error.message


def test_all_rollouts_of_a_group_meet_the_same_world_and_a_task_may_say_which(run):
    run([told(reward=1.0, done=True)], n=3)
    assert len(set(Scripted.seeds)) == 1
    first = Scripted.seeds[0]
    run([told(reward=1.0, done=True)])
    assert Scripted.seeds != [first], "another group, another world"
    run([told(reward=1.0, done=True)], task={"seed": 7})
    assert Scripted.seeds == [7]


class Adder(ToolEnvironment):
    """Sums the numbers that it is called with; 3 ends it."""

    async def reset(self, task, seed):
        return Opening(list(ASK), [NUMBER])

    async def call(self, call: ToolCall) -> Step:
        value = call.arguments.get("value", 0)
        return Step([Message(role="tool", content=f"added {value}")], float(value), value == 3)

    async def close(self):
        pass


class Tools(Toy):
    kind = Adder


def calls(*values) -> Action:
    return Action(tool_calls=[Call(name="number", arguments={"value": value}) for value in values])


def test_calls_of_a_turn_are_answered_in_order_up_to_the_one_that_ends_the_episode():
    (rollout,) = play(Tools(), {}, [calls(1, 2), calls(3, 4)])
    assert rollout.reward == 6.0 and rollout.metrics["tool_calls"] == 4
    answers = [m for m in rollout.trajectory.messages if m.role == "tool"]
    assert [m.text for m in answers] == ["added 1", "added 2", "added 3"]
    assert all(m.tool_call_id and m.name == "number" for m in answers)
    assert '"name": "number"' in rollout.trajectory.messages[0].text or rollout.trajectory.prompt_ids


def test_malformed_calls_are_answered_and_too_many_in_a_row_end_it():
    broken = Action(content="<tool_call>{</tool_call>")
    (rollout,) = play(
        Tools(), {}, [calls(1), broken, broken, broken, calls(3)], limits=Limits(max_malformed_calls=2)
    )
    assert (rollout.finish_reason, rollout.reward) == ("malformed_calls", 1.0)
    assert "Error: malformed tool call" in rollout.trajectory.unread[0].text


def test_a_turn_without_a_call_is_the_last_word():
    (rollout,) = play(Tools(), {}, [calls(2), Action(content="done")])
    assert (rollout.finish_reason, rollout.reward) == ("stop", 2.0)


def test_the_environment_of_the_page_works_as_it_stands_there():
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(example, names)
    (rollout,) = play(names["EchoHandler"](), {}, [Action(content="hello")])
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 1.0)


def test_of_a_lost_worker_only_what_needs_no_world_is_taken_over():
    assert Toy().repeats == {Stage.INIT, Stage.EVAL}


def test_a_program_cannot_drive_a_rollout_in_an_environment():
    request = RolloutRequest(handler="toy", agent={"harness": "codex"})
    with pytest.raises(TaskError, match="no program can drive"):
        asyncio.run(Toy().opening(SimpleNamespace(request=request)))
