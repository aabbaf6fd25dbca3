"""The one label of an engine that serves several policies, and what it makes of the spans of their tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.schema import Backend
from services.engines import engine_of
from services.engines.base import BrokenAnswer, CallAborted, SampleRequest
from services.engines.labels import MAX_LABEL, joined, split, versions_of

ASKED = SampleRequest("c1", [1, 2, 3], max_tokens=4)
SHARED = {"left": "l", "right": "r"}


def backend(policies=None, policy="left", **versions: str) -> Backend:
    served = {"id": "b", "url": "http://b", "model": "l", "tokenizer": "t", "max_model_len": 100}
    policies = SHARED if policies is None else policies
    return Backend(**served, policies=policies, versions=versions).of(policy)


NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)
VERSIONS = st.text(st.characters(exclude_categories=["Cs"]), max_size=128)


@given(st.dictionaries(NAMES, VERSIONS, min_size=1))
def test_a_label_says_what_it_was_made_of(versions):
    assert split(joined(versions)) == versions


def test_the_longest_label_of_64_policies_is_accepted():
    assert len(joined({f"{number:063}": "\U0001f600" * 128 for number in range(64)})) <= MAX_LABEL


@pytest.mark.parametrize("label", ["", "default", "step-7", "a", "&", "a=%FF"])
def test_another_label_says_nothing(label):
    assert split(label) == {}


def test_what_an_engine_serves_is_known_as_far_as_it_says():
    assert versions_of(backend({"red": "l"}, "red"), "a=1") == {"red": "a=1"}, (
        "of one policy it is the version"
    )
    assert versions_of(backend({"red": "l"}, "red"), None) == versions_of(backend(), None) == {}
    assert versions_of(backend(), "left=1&right=&old=2") == {"left": "1", "right": None}
    assert versions_of(backend(), "default") == {"left": None, "right": None}


def read(spans: list[tuple[str, int, int]], backend: Backend):
    """The spans of an answer with 4 ids."""
    content = [{"token_id": token, "logprob": -0.5} for token in (7, 8, 9, 6)]
    told = [{"version": label, "start": start, "end": end} for label, start, end in spans]
    choice = {"token_ids": [7, 8, 9, 6], "finish_reason": "length", "logprobs": {"content": content}}
    return engine_of(backend).read({"choices": [choice | {"weight_versions": told}]}, ASKED).spans


def test_spans_of_another_policy_s_updates_are_one():
    told = [
        ("left=1&right=1", 0, 1),
        ("left=1&right=2", 1, 2),
        ("left=2&right=2", 2, 3),
        ("left=2&right=3", 3, 4),
    ]
    assert read(told, backend()) == [("1", 0, 2), ("2", 2, 4)]
    assert read(told, backend(policy="right")) == [("1", 0, 1), ("2", 1, 3), ("3", 3, 4)]


def test_a_label_that_says_nothing_of_the_policy_is_an_unknown_version():
    told = [("default", 0, 1), ("right=1", 1, 2), ("left=1&right=1", 2, 4)]
    assert read(told, backend()) == [(None, 0, 2), ("1", 2, 4)]
    assert read([], backend(left="7")) == [("7", 0, 4)], "nothing said: what it had before the call"


def test_tokens_of_an_adapter_that_failed_are_no_tokens():
    told = [("left=1&right=1", 0, 2), ("left=&right=1", 2, 4)]
    with pytest.raises(CallAborted, match="an update of policy 'left' failed there"):
        read(told, backend())
    assert read(told, backend(policy="right")) == [("1", 0, 4)]


def test_the_label_of_an_engine_of_one_policy_is_its_version_as_it_stands():
    alone = backend({"left": "l"})
    assert read([("left=1", 0, 4)], alone) == [("left=1", 0, 4)]
    with pytest.raises(BrokenAnswer, match="no policy version"):
        read([("v" * 129, 0, 4)], alone)
