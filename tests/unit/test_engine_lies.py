"""No lie of an engine is trained on: its call is made elsewhere, or the rollout fails without a reward."""

from __future__ import annotations

import asyncio

import pytest

from rollout.schema import Blame, State
from tests.helpers.engine_lies import LIES
from tests.helpers.liars import LANGUAGE, TURN_TOKENS, rollout_at
from tests.helpers.stack import CHECKPOINT
from workers.agent.codec import load_codec

ENDS_ITS_CALLS = "ends_every_call_itself"
"""An abort is no broken answer: whoever does nothing else is as good as away."""


def expected_turn(rollout):
    prompt = rollout.trajectory.chain.segments[0].token_ids
    stop = load_codec(str(CHECKPOINT)).stop_token_ids
    return LANGUAGE.answer(prompt, max_tokens=TURN_TOKENS, stop_token_ids=stop)


def test_there_are_the_lies_that_were_believed_and_twenty_more():
    assert len(LIES) >= 28


@pytest.mark.parametrize("lie", LIES)
def test_the_call_of_an_engine_that_lies_is_made_elsewhere_with_the_exact_tokens(lie):
    outcome = asyncio.run(rollout_at(lie, honest=True))
    assert outcome.lies, "the engine was not asked, so it did not lie"
    assert (outcome.rollout.state, outcome.rollout.reward) == (State.COMPLETED, 1.0)
    (turn,) = [segment for segment in outcome.rollout.trajectory.chain.segments if segment.sampled]
    assert turn.token_ids == expected_turn(outcome.rollout).token_ids
    assert turn.logprobs == expected_turn(outcome.rollout).logprobs
    assert turn.policy_version == "default"
    assert set(outcome.suspected) == {"engine0"}, "the failure is counted in its health"


@pytest.mark.parametrize("lie", [name for name in LIES if name != ENDS_ITS_CALLS])
def test_a_rollout_that_meets_lies_alone_fails_without_a_reward_and_the_model_is_to_blame(lie):
    outcome = asyncio.run(rollout_at(lie, honest=False))
    rollout = outcome.rollout
    assert (rollout.state, rollout.reward, rollout.drop) == (State.FAILED, None, True)
    blames = {Blame.MODEL} if lie not in UNREADABLE else {Blame.MODEL, Blame.INFRASTRUCTURE}
    assert rollout.error.blame in blames, rollout.error
    assert rollout.trajectory is None or rollout.trajectory.sampled_tokens == 0


UNREADABLE = {
    "nothing",
    "a_page_of_html",
    "a_megabyte_of_brackets",
    "a_gigabyte_in_a_megabyte",
    "somebody_elses_address",
    "created_without_an_answer",
    "weights_that_nobody_loaded",
}
"""No answers at all: what a proxy says while its engine is away, or weights that were not found right."""


def test_an_engine_that_ends_every_call_by_itself_gives_no_reward():
    outcome = asyncio.run(rollout_at(ENDS_ITS_CALLS, honest=False))
    assert (outcome.rollout.state, outcome.rollout.reward, outcome.rollout.drop) == (State.FAILED, None, True)
