"""BFCL's multi-turn tasks themselves: its APIs, its users' turns, its checker and its ground truth."""

from __future__ import annotations

import pytest

from rollout.schema import State
from tests.environments.solving import solved
from workers.agent.replay import Action, Call
from workers.handlers.environments.suites import Bfcl
from workers.testing import play

BASE = {"env": "multi_turn_base", "index": 1}
"""Of its user: list all; move log.txt; look for Error in it; show its last 20 lines."""


@pytest.fixture(autouse=True)
def installed(package):
    package("bfcl")


def calls(*named):
    return Action(tool_calls=[Call(name=name, arguments=arguments) for name, arguments in named])


DONE = Action(content="Done.")
MOVE = [("cd", {"folder": "workspace"}), ("mv", {"source": "log.txt", "destination": "archive"})]
LOOK = [("cd", {"folder": "archive"}), ("grep", {"file_name": "log.txt", "pattern": "Error"})]
RIGHT = [
    *(calls(("ls", {"a": True})), DONE),
    *(calls(*MOVE), DONE),
    *(calls(*LOOK), DONE),
    *(calls(("tail", {"file_name": "log.txt", "lines": 20})), DONE),
]


def played(task, actions, **limits):
    return play(Bfcl(), task, actions, limits={"max_turns": 40, "max_attempts": 1, **limits})[0]


def test_a_conversation_over_four_turns_of_a_user_is_judged_right():
    rollout = played(BASE, RIGHT)
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 1.0)
    users = [message.text for message in rollout.trajectory.messages if message.role == "user"]
    tools = [message.text for message in rollout.trajectory.messages if message.role == "tool"]
    assert len(users) == 4 and len(tools) == 6 and '"current_working_directory"' in tools[1]


def test_a_wrong_state_a_turn_left_out_and_an_early_end_are_worth_nothing():
    assert played(BASE, [*RIGHT[:2], DONE, DONE, DONE]).reward == 0.0
    ended = played(BASE, RIGHT, max_turns=3)
    assert (ended.finish_reason, ended.reward, ended.reward_components) == (
        "turn_limit",
        0.0,
        {"force_terminated": 1.0},
    )


def test_calls_are_never_evaluated_as_more_than_calls():
    evil = [
        ("__import__('os').system", {"command": "touch /tmp/rollout-bfcl-evil"}),
        ("ls", {"a=__import__('os').system('true'), b": 1}),
        ("cat", {"file_name": "'+__import__('os').getcwd()+'"}),
    ]
    rollout = played(BASE, [calls(*evil), DONE, DONE, DONE, DONE])
    first, second, third = [message.text for message in rollout.trajectory.messages if message.role == "tool"]
    assert first.startswith("Error: no function") and second.startswith("Error: no function")
    assert "__import__('os').getcwd()" in third, "a name of a file, and no expression"
    assert rollout.reward == 0.0


def test_functions_that_come_later_are_told_with_the_users_turn_and_cannot_be_called_before():
    sort = calls(("sort", {"file_name": "final_report.pdf"}))
    rollout = played({"env": "multi_turn_miss_func"}, [sort, DONE, DONE, DONE, sort, DONE, DONE])
    tools = [message.text for message in rollout.trajectory.messages if message.role == "tool"]
    assert tools[0].startswith("Error: no function 'sort'") and not tools[1].startswith("Error: no function")
    told = [
        message.text
        for message in rollout.trajectory.messages
        if "updated some more functions" in message.text
    ]
    assert len(told) == 1 and "Sort the contents of a file" in told[0]


@pytest.mark.parametrize("env", ["multi_turn_base", "multi_turn_miss_func", "multi_turn_long_context"])
def test_the_ground_truth_solves_the_task(env):
    rollout = solved(Bfcl(), {"env": env, "index": 7})
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 1.0), rollout.error


def test_entries_that_there_are_not_are_refused():
    for task, said in (({"env": "simple_python"}, "no category"), (BASE | {"index": 9999}, "IndexError")):
        rollout = played(task, [DONE])
        assert (rollout.reward, rollout.error.blame) == (None, "task") and said in rollout.error.message
