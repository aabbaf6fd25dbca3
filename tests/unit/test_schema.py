"""Requests: ids, limits and what is refused."""

import uuid

import pytest
from pydantic import ValidationError

from rollout.schema import RolloutRequest, SubmitRequest, new_id


def test_ids_are_uuid7_and_sorted_by_time():
    ids = [new_id() for _ in range(50)]
    assert {(uuid.UUID(name).version, uuid.UUID(name).variant) for name in ids} == {(7, uuid.RFC_4122)}
    prefixes = [name[:13] for name in ids]
    assert prefixes == sorted(prefixes)


def test_a_supplied_id_names_the_rollout_or_the_group():
    assert RolloutRequest(handler="noop", id="a").rollout_ids() == ("a", ["a"])
    assert RolloutRequest(handler="noop", id="a", n=3).rollout_ids() == ("a", ["a.0", "a.1", "a.2"])
    assert RolloutRequest(handler="noop", id="a", group_id="g").rollout_ids() == ("g", ["a"])
    group, ids = RolloutRequest(handler="noop", n=4).rollout_ids()
    assert len(set(ids)) == 4 and group not in ids


@pytest.mark.parametrize("bad", ["", "a b", "-a", "a" * 129, "a/b", "ä"])
def test_an_id_that_could_break_a_key_or_a_path_is_refused(bad):
    with pytest.raises(ValidationError):
        RolloutRequest(handler="noop", id=bad)


@pytest.mark.parametrize(
    "body",
    [
        {"handler": "noop", "limits": {"max_turn": 3}},
        {"handler": "noop", "sampling": {"temperature": 2.5}},
        {"handler": "noop", "n": 0},
        {"handler": "noop", "n": 1001},
        {"handler": "noop", "unknown": 1},
        {"handler": "noop", "tags": ["a,b"]},
        {"handler": "noop", "limits": {"deadline_s": float("inf")}},
        {"handler": ""},
        {},
    ],
)
def test_what_does_not_fit_is_refused(body):
    with pytest.raises(ValidationError):
        RolloutRequest.model_validate(body)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 0.005}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids.1"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids.0"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"min_p": 0.1}, "min_p"),
    ],
)
def test_sampling_that_an_engine_would_refuse_or_change_is_refused(sampling, field):
    with pytest.raises(ValidationError) as caught:
        RolloutRequest.model_validate({"handler": "noop", "sampling": sampling})
    (error,) = caught.value.errors()
    assert ".".join(map(str, error["loc"])) == f"sampling.{field}"


def test_a_call_is_bounded_over_all_its_requests():
    with pytest.raises(ValidationError, match="at most 1000"):
        SubmitRequest(requests=[RolloutRequest(handler="noop", n=600), RolloutRequest(handler="noop", n=401)])
