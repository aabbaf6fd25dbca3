"""The canonical record: its one mutator and its flat views."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout.trajectory import SCHEMA_VERSION, Chain, Message, Segment, Trajectory
from tests.helpers.rollouts import chain as chain_of
from tests.helpers.rollouts import sampled

ids = st.lists(st.integers(0, 2**31), min_size=1, max_size=8)


@st.composite
def segments(draw):
    token_ids = draw(ids)
    if not draw(st.booleans()):
        return Segment(role="tool", token_ids=token_ids)
    logprobs = [draw(st.floats(-50, 0)) for _ in token_ids]
    return sampled(token_ids, logprobs, policy_version=draw(st.none() | st.sampled_from(["v1", "v2"])))


@given(ids, st.lists(segments(), max_size=8))
def test_the_views_are_parallel_and_together_they_are_the_chain(prompt, following):
    chain = chain_of(prompt, *following)
    assert chain.prompt_ids + chain.response_ids == chain.token_ids
    n = len(chain.response_ids)
    assert len(chain.loss_mask) == len(chain.logprobs) == len(chain.policy_versions) == n
    assert sum(chain.loss_mask) == sum(len(s.token_ids) for s in following if s.sampled)
    for mask, logprob, version in zip(chain.loss_mask, chain.logprobs, chain.policy_versions, strict=True):
        assert math.isfinite(logprob)
        if not mask:
            assert logprob == 0.0 and version is None
    again = Trajectory.model_validate_json(Trajectory(chains=[chain]).model_dump_json())
    assert again.chain == chain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampled": True, "logprobs": [-1.0]}, "2 sampled ids need as many log-probs; got 1"),
        ({"sampled": True}, "got none"),
        ({"sampled": True, "logprobs": [-1.0, float("nan")]}, "not finite"),
        ({"sampled": True, "logprobs": [-1.0, float("-inf")]}, "not finite"),
        ({"logprobs": [-1.0, -1.0]}, "was not sampled has no log-probs"),
        ({"policy_version": "v1"}, "no policy version"),
        ({"routed_experts": "AAAA"}, "no routed experts"),
    ],
)
def test_a_segment_with_broken_lengths_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        Segment(role="assistant", token_ids=[1, 2], **fields)


def test_a_segment_broken_after_it_was_made_is_refused_by_the_chain():
    chain, segment = chain_of([1]), sampled([2])
    segment.token_ids.append(3)
    with pytest.raises(ValueError, match="2 sampled ids"):
        chain.append(segment)
    assert chain.token_ids == [1]


def test_a_chain_starts_with_a_prompt():
    with pytest.raises(ValueError, match="starts with a prompt"):
        Chain().append(sampled([1]))
    with pytest.raises(ValueError, match="at least one token"):
        Chain().append(Segment(role="user", token_ids=[]))


def test_a_newer_schema_version_is_refused_and_not_misread():
    with pytest.raises(ValidationError, match="upgrade rollout-service"):
        Trajectory(schema_version=SCHEMA_VERSION + 1)


def test_a_call_over_a_weight_swap_counts_as_one_turn():
    swapped = chain_of([1], *(sampled([2], policy_version=version, call_id="c") for version in ("v1", "v2")))
    trajectory = Trajectory(chains=[swapped])
    assert trajectory.turns == 1 and trajectory.sampled_tokens == 2
    assert trajectory.policy_versions == ["v1", "v2"] and trajectory.versions_used == ["v1", "v2"]


def test_versions_are_told_in_order_of_first_use_over_all_chains():
    chains = [
        chain_of([1], *(sampled([2], policy_version=version) for version in versions))
        for versions in (("v9", None), ("v2", "v9", "v1"))
    ]
    assert Trajectory(chains=chains).versions_used == ["v9", "v2", "v1"]


def test_what_nobody_read_is_told_to_readers_and_has_no_ids():
    chain = Chain()
    chain.append(Segment(role="user", token_ids=[1], messages=[Message(role="user", content="hi")]))
    trajectory = Trajectory(chains=[chain], unread=[Message(role="tool", content="7")])
    assert [m.text for m in trajectory.messages] == ["hi", "7"] and trajectory.chain.token_ids == [1]
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


def test_the_final_text_is_that_of_the_last_turn():
    messages = [Message(role=role, content=role + more) for role, more in (("assistant", "1"), ("user", "2"))]
    chain = Chain(segments=[Segment(role="user", token_ids=[1], messages=messages)])
    assert Trajectory(chains=[chain]).final_text() == "assistant1"
    chain.segments[0].messages.append(Message(role="assistant", content="last"))
    assert Trajectory(chains=[chain]).final_text() == "last"
    assert Trajectory().final_text() == ""


def test_content_is_a_list_of_parts_wherever_it_came_from():
    assert Message(role="user", content="hi").content[0].text == "hi"
    assert Message(role="user", content=[{"type": "text", "text": "hi"}]).text == "hi"
    assert Message(role="user", content="").content == []
