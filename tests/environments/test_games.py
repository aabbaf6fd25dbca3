"""GEM and TextArena themselves: real environments of the packages, played to their ends."""

from __future__ import annotations

import pytest

from rollout.schema import State
from tests.helpers.chat_server import chat_server
from workers.agent.replay import Action
from workers.handlers.environments.games import Gem, TextArena
from workers.testing import play


def played(handler, task, *said, **request):
    rollouts = play(handler, task, [Action(content=text) for text in said], **request)
    return rollouts if len(rollouts) > 1 else rollouts[0]


@pytest.fixture(autouse=True)
def installed(package, request):
    package("textarena" if "textarena" in request.node.name else "gem")


GUESS = {"env": "game:GuessTheNumber-v0-easy", "seed": 1}


def test_a_game_of_gem_is_won_with_the_number_of_its_seed():
    rollout = played(Gem(), GUESS, "I say \\boxed{5}.", "\\boxed{3}")
    assert (rollout.state, rollout.reward, rollout.finish_reason) == (State.COMPLETED, 1.0, "stop")
    texts = [message.text for message in rollout.trajectory.messages]
    assert "between 1 and 10" in texts[0] and "lower than 5" in texts[2] and "Congratulations" in texts[-1]


@pytest.mark.parametrize("call", ["<tool_call>{</tool_call>", '<tool_call>{"name": "x"}</tool_call>'])
def test_what_looks_like_a_call_keeps_no_move_from_a_game_of_gem(call):
    rollout = played(Gem(), GUESS, f"\\boxed{{3}} {call}")
    assert (rollout.reward, rollout.metrics["env_steps"]) == (1.0, 1)


def test_a_game_of_gem_punishes_a_wrong_form_with_the_packages_own_reward():
    assert played(Gem(), GUESS, "five").reward == pytest.approx(-0.1)


def test_arguments_of_gems_make_are_passed_on():
    rollout = played(Gem(), GUESS | {"kwargs": {"max_number": 2}}, "\\boxed{1}", "\\boxed{2}")
    assert "between 1 and 2" in rollout.trajectory.messages[0].text and rollout.reward == 1.0


def test_a_puzzle_of_reasoning_gym_inside_gem_has_its_reward_after_one_turn():
    rollout = played(Gem(), {"env": "rg:leg_counting", "seed": 3, "kwargs": {"size": 5}}, "\\boxed{-1}")
    assert (rollout.state, rollout.metrics["env_steps"]) == (State.COMPLETED, 1)
    assert 0 <= rollout.reward < 1


def test_an_environment_that_gem_does_not_have_is_the_tasks_fault():
    rollout = played(Gem(), {"env": "game:Nothing-v0"}, "x")
    assert (rollout.state, rollout.error.blame, rollout.reward) == (State.FAILED, "task", None)
    assert "game:Nothing-v0 not found" in rollout.error.message


def test_a_game_of_textarena_for_one_is_played_to_its_end():
    rollout = played(TextArena(), {"env": "GuessTheNumber-v0", "seed": 1}, "[7]", "[5]")
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 1.0)
    texts = [message.text for message in rollout.trajectory.messages]
    assert "between 1 and 20" in texts[0] and "lower" in texts[2] and "[7]" not in texts[2], (
        "only what is new"
    )


DUEL = {"env": "TicTacToe-v0", "seed": 1, "players": 2}


def test_a_game_of_textarena_against_a_list_of_moves_is_won_lost_and_left():
    moves = {"opponents": ["[0]", "[1]", "[2]"]}
    assert played(TextArena(), DUEL | moves, "[4]", "[3]", "[5]").reward == 1.0
    lost = played(TextArena(), DUEL | moves | {"player": 1}, "[4]", "[3]", "[8]")
    assert lost.reward == -1.0 and "[Player 0] [0]" in lost.trajectory.messages[0].text
    left = played(TextArena(), DUEL | moves, "[4]", limits={"max_turns": 1})
    assert (left.finish_reason, left.reward) == ("turn_limit", -1.0), "whoever leaves has lost"


def test_a_game_of_textarena_against_the_simulator_asks_it_for_each_move(configured):
    with chat_server(["[0]", "[1]", "[8]"]) as server:
        configured(simulator_url=server.url, simulator_model="opponent")
        rollout = played(TextArena(), DUEL, "[4]", "[3]", "[5]")
    assert rollout.reward == 1.0 and len(server.asked) == 2
    assert server.asked[0]["model"] == "opponent"
    roles = [message["role"] for message in server.asked[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"] and "Tic Tac Toe" in str(server.asked[0])


def test_a_game_of_textarena_against_a_simulator_that_fails_is_dropped(configured):
    with chat_server([]) as server:
        configured(simulator_url=server.url)
        rollout = played(TextArena(), DUEL, "[4]", limits={"max_attempts": 1})
    assert (rollout.reward, rollout.error.type, rollout.error.blame) == (
        None,
        "EnvironmentLost",
        "infrastructure",
    )


def test_observations_of_textarena_may_be_those_of_its_own_wrappers():
    rollout = played(TextArena(), {"env": "GuessTheNumber-v0", "seed": 1, "wrapped": True}, "[7]", "[5]")
    assert "between 1 and 20" in rollout.trajectory.messages[2].text, "with the whole history"
