"""tau2 itself: its domains, its user over an endpoint, its evaluator; the oracle is what its tasks say."""

from __future__ import annotations

import pytest

from rollout.schema import State
from tests.environments.solving import solved
from tests.helpers.chat_server import chat_server
from workers.agent.replay import Action, Call
from workers.handlers.environments.suites import Tau2
from workers.testing import play

CREATE = {"env": "mock", "index": 0}
MEETING = Call(name="create_task", arguments={"user_id": "user_1", "title": "Important Meeting"})


@pytest.fixture(autouse=True)
def installed(package):
    package("tau2")


def played(task, *actions, **request):
    return play(Tau2(), task, list(actions), limits={"max_attempts": 1}, **request)[0]


def test_a_customer_whom_the_simulator_plays_is_served_and_the_evaluator_is_content(configured):
    with chat_server(["Please note the 'Important Meeting' for user_1.", "Thanks. ###STOP###"]) as server:
        configured(simulator_url=server.url, simulator_model="customer")
        rollout = played(CREATE, Action(tool_calls=[MEETING]), Action(content="It is noted."))
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 1.0)
    assert rollout.reward_components == {"db": 1.0, "communicate": 1.0}
    system, greeting, asks, _, answer, said, thanks = rollout.trajectory.messages
    assert "<policy>" in system.text and greeting.text == "Hi! How can I help you today?"
    assert (
        asks.text.startswith("Please note")
        and '"task_id": "task_2"' in answer.text
        and "Thanks" in thanks.text
    )
    first, second = server.asked
    assert "Important Meeting" in first["messages"][0]["content"], "the scenario is the user's alone"
    assert "Important Meeting" not in system.text
    assert second["messages"][-1] == {"role": "user", "content": said.text}, "the user sees no tool"


def test_what_the_customer_did_not_want_is_worth_nothing_by_the_evaluator_alone():
    other = Call(name="create_task", arguments={"user_id": "user_1", "title": "Other"})
    rollout = played(CREATE | {"user": "obliging"}, Action(tool_calls=[other]), Action(content="Noted."))
    assert (rollout.reward, rollout.reward_components["db"]) == (0.0, 0.0)


def test_tools_that_do_not_exist_and_calls_that_are_malformed_are_answered_in_their_order():
    odd = Action(content='<tool_call>{"name": 3}</tool_call><tool_call>{"name": "nothing"}</tool_call>')
    rollout = played(
        CREATE | {"user": "obliging"}, odd, Action(tool_calls=[MEETING]), Action(content="Done.")
    )
    first, second = [message.text for message in rollout.trajectory.messages if message.role == "tool"][:2]
    assert first.startswith("Error: malformed tool call") and "'nothing' not found" in second
    assert rollout.reward == 1.0


@pytest.mark.parametrize("said", [[], [""] * 9])
def test_a_simulator_that_fails_or_says_nothing_drops_the_sample(said, configured):
    with chat_server(said) as server:
        configured(simulator_url=server.url)
        rollout = played(CREATE, Action(content="Hello?"))
    assert (rollout.state, rollout.reward, rollout.error.blame) == (State.FAILED, None, "infrastructure")


def test_without_a_simulator_the_setting_is_named(configured):
    configured(simulator_url="")
    rollout = played(CREATE, Action(content="Hello?"))
    assert rollout.reward is None and "ROLLOUT_SIMULATOR_URL" in rollout.error.message


def test_a_ticket_is_solved_alone_and_words_to_nobody_are_the_agents_error():
    done = Call(name="done", arguments={})
    rollout = played(CREATE | {"solo": True}, Action(tool_calls=[MEETING]), Action(tool_calls=[done]))
    assert (rollout.reward, rollout.finish_reason) == (1.0, "stop")
    assert "<ticket>" in rollout.trajectory.messages[0].text
    assert played(CREATE | {"solo": True}, Action(content="Hello?")).reward == 0.0


def test_what_a_limit_ends_is_worth_what_the_evaluator_says_of_it():
    rollout = play(
        Tau2(), CREATE | {"user": "obliging"}, [Action(tool_calls=[MEETING])], limits={"max_turns": 1}
    )[0]
    assert (rollout.finish_reason, rollout.reward) == ("turn_limit", 0.0)


def test_an_agent_whose_doings_the_evaluator_cannot_judge_does_not_escape_its_zero():
    """Task 1 asserts something of a task that nobody has made: the evaluator raises."""
    rollout = played({"env": "mock", "index": 1, "user": "obliging"}, Action(content="No."))
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 0.0)
    assert rollout.reward_components == {"unjudged": 1.0}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"env": "nowhere"}, "nowhere"),
        ({"env": "mock", "index": 999}, "IndexError"),
        ({"env": "telecom"}, "call tools"),
        ({"env": "airline", "solo": True}, "without a user"),
    ],
)
def test_tasks_that_there_are_not_are_refused(task, said):
    rollout = played(task, Action(content="x"))
    assert (rollout.reward, rollout.error.blame) == (None, "task") and said in rollout.error.message


@pytest.mark.parametrize("place", [{"env": "mock", "index": 8}, {"env": "retail"}, CREATE | {"solo": True}])
def test_the_tasks_own_actions_solve_it(place):
    rollout = solved(Tau2(), place)
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 1.0), rollout.error
