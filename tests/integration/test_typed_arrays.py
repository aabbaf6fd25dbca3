"""Trajectories as typed arrays through the API: the same as JSON, and problems as ever."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from redis.client import NEVER_DECODE

from rollout import arrays
from rollout.batch import BatchRequest
from rollout.client import Client
from rollout.errors import RolloutError, Unavailable
from rollout.schema import ResultPage, RolloutRequest
from rollout.trajectory import Trajectory
from services.settings import Settings
from services.state import keys
from services.state.redis import connect
from services.state.rollouts import payloads, reading
from services.state.rollouts.reading import RolloutReader
from tests.helpers.keys import http
from tests.helpers.rollouts import chain, sampled

MSGPACK = {"Accept": "application/msgpack"}


def question(**more) -> RolloutRequest:
    return RolloutRequest(handler="calculator", task={"question": "37 times 85", "answer": "3145"}, **more)


@pytest.fixture(scope="module")
def done(stack):
    """A real rollout: turns of a model with log-probs, tool answers in between."""
    request = question(limits={"max_turns": 4}, tags=["typed"], metadata={"big": 10**40})
    (result,) = stack.client.run([request])
    assert result.trajectory.turns >= 1
    return result


@pytest.fixture(scope="module")
def store(stack):
    return connect(stack.redis.url)


@pytest.fixture
def as_json(stack):
    with Client(stack.url, wire="json") as client:
        yield client


@pytest.fixture
def keep(stack, done, store):
    """Has Redis keep something else for the rollout, and put the former back in the end."""
    key, record = keys.trajectory(done.id), keys.record(done.id)
    kept, size = payloads.encode_trajectory(done.trajectory), store.hget(record, "record_bytes")
    assert int(size) == store.strlen(key)

    def put(stored: bytes, record_bytes: int | None) -> None:
        store.set(key, stored)
        store.hdel(record, "record_bytes")
        if record_bytes is not None:
            store.hset(record, "record_bytes", record_bytes)

    yield put
    put(kept, size)
    assert stack.client.get(done.id) == done


def test_a_rollout_is_the_same_over_both_wires(stack, as_json, done):
    answer = http.get(f"{stack.url}/v1/rollouts/{done.id}", headers=MSGPACK)
    assert answer.headers["content-type"] == "application/msgpack" and "Accept" in answer.headers["vary"]
    typed, plain = stack.client.get(done.id), as_json.get(done.id)
    assert typed == plain and typed.trajectory == done.trajectory
    assert typed.model_dump_json() == plain.model_dump_json()
    assert len(answer.content) < len(plain.model_dump_json())
    for rollout in (typed, plain):
        for name in ("prompt_ids", "response_ids", "logprobs", "loss_mask"):
            assert getattr(rollout.arrays, name).tolist() == getattr(done.trajectory, name)
    assert typed.arrays.logprobs.dtype == np.float32, "an engine's log-probs are float32 and need no more"


def test_arrays_alone_come_without_lists_and_can_be_turned_into_them(stack, as_json, done):
    for client in (stack.client, as_json):
        light = client.get(done.id, include="arrays")
        assert light.trajectory is None and light.reward == done.reward
        assert light.arrays.trajectory() == done.trajectory
        summary = client.get(done.id, include="summary")
        with pytest.raises(LookupError, match="summary"):
            _ = summary.arrays


def test_pages_of_completions_are_the_same_over_both_wires(stack, as_json, done):
    typed = stack.client.completions(tag="typed")
    assert isinstance(typed, ResultPage) and typed == as_json.completions(tag="typed")
    arrays = stack.client.completions(tag="typed", include="arrays").rollouts[0].arrays
    assert arrays.response_ids.tolist() == done.trajectory.response_ids
    streamed = next(stack.client.stream_completions(tag="typed", include="arrays"))
    assert streamed.trajectory is None and streamed.arrays.trajectory() == done.trajectory


@pytest.fixture(scope="module")
def groups(stack):
    """Those of a batch, as they were decided."""
    request = BatchRequest(prompts=[question(limits={"max_turns": 1})] * 6, n=2, groups=6, filters=[])
    groups = list(stack.client.batch(request, timeout=240))
    assert len(groups) == 6 and all(member.trajectory for group in groups for member in group.rollouts)
    return groups


def test_groups_of_a_batch_are_the_same_over_both_wires_and_read_ahead(stack, as_json, groups):
    batch = groups[0].batch
    # From the beginning: full pages, so that the next one is on its way while this one is read.
    assert list(stack.client.batches.stream(batch)) == groups == list(as_json.batches.stream(batch))
    light = stack.client.batches.stream(batch, include="arrays")
    assert [member.arrays.response_ids.tolist() for group in light for member in group.rollouts] == [
        member.trajectory.response_ids for group in groups for member in group.rollouts
    ]


def test_what_no_record_can_hold_is_read_over_both_wires(stack, as_json, done, keep):
    odd = Trajectory(chains=[chain([1, 2**40], sampled([3] * 600, [-0.1] * 600))])
    stored = payloads.encode_trajectory(odd)
    assert not arrays.is_record(stored)
    keep(stored, None)
    assert stack.client.get(done.id).trajectory == as_json.get(done.id).trajectory == odd
    answer = http.get(f"{stack.url}/v1/rollouts/{done.id}", headers=MSGPACK)
    assert arrays.unpack_answer(answer.content)[1] == {}


def test_a_trajectory_that_changes_while_it_is_sent_cuts_the_answer_off(stack, done, keep):
    """It is asked for again then, and no half of one is taken for a whole."""
    stored = payloads.encode_trajectory(done.trajectory)
    keep(stored, len(stored) + 8)
    with Client(stack.url, retry_for=0.5) as client, pytest.raises(Unavailable, match="RemoteProtocolError"):
        client.get(done.id)
    threading.Timer(0.5, keep, (stored, len(stored))).start()
    assert stack.client.get(done.id) == done
    assert f"{done.id}}}:trajectory is not what it was" in stack.gateway.log.read_text()


def test_readers_that_hang_up_within_an_answer_cost_the_gateway_nothing(stack, done, keep):
    """More of them than it has connections to Redis: what each had must be given back."""
    # 16 MB: no buffer of a socket holds it.
    large = payloads.encode_trajectory(Trajectory(chains=[chain([1] * 4_000_000)]))
    keep(large, len(large))
    for _ in range(Settings().gateway_threads + 20):
        url = f"{stack.url}/v1/rollouts/{done.id}"
        with http.stream("GET", url, headers=MSGPACK, timeout=240) as answer:
            assert int(answer.headers["content-length"]) > len(large)
            next(answer.iter_raw(1))
    assert len(stack.client.get(done.id, include="arrays").arrays.prompt_ids) == 4_000_000


def test_records_are_asked_of_redis_in_parts(store, groups, monkeypatch):
    ids = [member.id for group in groups for member in group.rollouts]
    reader = RolloutReader(store)
    kept = [store.execute_command("GET", keys.trajectory(name), **{NEVER_DECODE: True}) for name in ids]
    sizes = dict(zip(ids, (size for _, size in reader.get_records(ids)), strict=True))
    assert sizes == {name: len(record) for name, record in zip(ids, kept, strict=True)}
    for most in (1, sizes[ids[0]] + sizes[ids[1]], 1 << 30):
        monkeypatch.setattr(reading, "PART_BYTES", most)
        assert list(reader.records(sizes)) == kept
    assert list(reader.records({})) == []


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("*/*", "application/json"),
        ("application/json", "application/json"),
        ("text/html", "application/json"),
        ("application/msgpack, application/json", "application/json"),
        ("application/msgpack, application/json;q=0.5", "application/msgpack"),
    ],
)
def test_json_is_what_comes_unless_the_reader_prefers_arrays(stack, done, accept, expected):
    answer = http.get(f"{stack.url}/v1/rollouts/{done.id}", headers={"Accept": accept})
    assert answer.headers["content-type"] == expected


def test_a_problem_is_json_whatever_is_accepted(stack):
    answer = http.get(f"{stack.url}/v1/rollouts/absent", headers=MSGPACK)
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert "absent" in answer.json()["detail"]


def test_an_answer_that_cannot_be_read_says_what_to_do(stack, done, monkeypatch):
    monkeypatch.setattr(arrays, "ANSWER_VERSION", 0)
    with pytest.raises(RolloutError, match=r"upgrade rollout-service.*wire='json'"):
        stack.client.get(done.id)


def test_a_wire_that_does_not_exist_is_refused(stack):
    with pytest.raises(ValueError, match="auto, json, msgpack"):
        Client(stack.url, wire="protobuf")
