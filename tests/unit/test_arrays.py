"""The binary form of trajectories: nothing is lost, nothing is copied, nothing damaged is taken."""

from __future__ import annotations

import copy
import json
import pickle
import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import arrays
from rollout.arrays import Arrays
from rollout.schema.agents import Asked, Receipt
from rollout.trajectory import Message, Segment, ToolCall, Trajectory
from tests.helpers.rollouts import chain, sampled


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


logprob = st.floats(max_value=0.0, min_value=-1e30, allow_subnormal=True)
token = st.integers(min_value=0, max_value=2**31 - 1)


@st.composite
def segments(draw):
    sampled = draw(st.booleans())
    ids = draw(st.lists(token, min_size=1, max_size=12))
    text = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=30)) * draw(
        st.sampled_from([1, 80])
    )
    calls = [ToolCall(id="c", name="n", arguments={"deep": [1.5, None, 10**30, {"é": "\x00"}]})]
    role = "assistant" if sampled else draw(st.sampled_from(["user", "tool", "system"]))
    single = draw(st.booleans())
    return Segment(
        role=role,
        token_ids=ids,
        sampled=sampled,
        logprobs=[float32(v) if single else v for v in (draw(logprob) for _ in ids)] if sampled else None,
        policy_version=draw(st.sampled_from([None, "v1", "step-2"])) if sampled else None,
        call_id=draw(st.sampled_from([None, "call"])),
        routed_experts=draw(st.sampled_from([None, [[1, 2]], "opaque"])) if sampled else None,
        messages=[Message(role=role, content=text, tool_calls=calls if sampled else [])],
    )


@st.composite
def trajectories(draw):
    following = draw(st.lists(st.lists(segments(), max_size=5), max_size=3))
    chains = [chain([draw(token)], *parts) for parts in following]
    return Trajectory(chains=chains, finish_reason="stop", warnings=["w"], artifacts={"patch": "+1"})


@given(trajectories())
@settings(max_examples=50, deadline=None)
def test_a_trajectory_comes_back_as_it_was_and_its_arrays_say_what_the_lists_say(trajectory):
    twin = arrays.decode(arrays.encode(trajectory)).trajectory()
    assert twin == trajectory
    assert twin.model_dump_json() == trajectory.model_dump_json()
    if not trajectory.chains:
        with pytest.raises(LookupError, match="no model call"):
            Arrays.of(trajectory)
        return
    views = Arrays.of(trajectory)
    for view, lists in zip([*views.chains, views], [*trajectory.chains, trajectory.chain], strict=True):
        for name in ("prompt_ids", "response_ids", "token_ids", "loss_mask", "logprobs"):
            assert getattr(view, name).tolist() == getattr(lists, name)
        named = [view.versions[i] if i >= 0 else None for i in view.policy_versions]
        assert named == lists.policy_versions


def test_roles_parents_and_the_receipt_are_in_the_document():
    one, other = (chain([1, 2], sampled([3, 4], policy_version="v")) for _ in range(2))
    one.role, other.parent = "sub_agent", 0
    receipt = Receipt(harness="codex", engines=["vllm b0"], calls=2, sampled_tokens=4, digest="ab")
    receipt.asked = [Asked(parameters={"temperature": 0.5, "stop": ["\n"]}, calls=2)]
    made = Trajectory(chains=[one, other], receipt=receipt)
    record = arrays.decode(arrays.encode(made))
    assert record.trajectory() == made and record.taught() == [True, True]
    assert [view.token_ids.tolist() for view in Arrays(record).trained] == [[1, 2, 3, 4]] * 2


def test_a_record_without_roles_is_of_agents_and_one_with_more_than_is_known_is_read():
    made = Trajectory(chains=[chain([1], sampled([2])), chain([1], sampled([3]))])
    fields = msgpack.unpackb(arrays.encode(made))
    document = json.loads(fields["document"])
    for entry in (document, *document["chains"]):
        for name in ("receipt", "role", "parent"):
            entry.pop(name, None)
    old = arrays.decode(msgpack.packb(fields | {"document": json.dumps(document)}))
    assert old.trajectory() == made and old.taught() == [True, True]
    # Readers of the releases before this one pass over roles and receipts as this one does over this:
    document["later"] = document["chains"][0]["later"] = {"a": 1}
    new = arrays.decode(msgpack.packb(fields | {"document": json.dumps(document)}))
    assert new.trajectory() == made


def short(logprobs=(-0.5, -0.25), ids=(3, 4)) -> Trajectory:
    return Trajectory(chains=[chain([1, 2], sampled(ids, logprobs, policy_version="v"), [5])])


def test_log_probs_take_float32_only_where_that_is_exact():
    exact, inexact = Arrays.of(short((-0.5, float32(-0.1)))), Arrays.of(short((-0.5, -0.1)))
    assert (exact.logprobs.dtype, inexact.logprobs.dtype) == (np.float32, np.float64)
    assert inexact.logprobs.tolist() == [-0.5, -0.1, 0.0]
    beyond = Arrays.of(short((-0.5, -1e300)))
    assert beyond.logprobs.tolist() == [-0.5, -1e300, 0.0]


def test_ids_and_log_probs_are_views_of_the_record_and_nobody_can_change_them():
    record = arrays.decode(arrays.encode(short()))
    views = Arrays(record)
    for view, raw in (
        (views.prompt_ids, record.chains[0].ids),
        (views.response_ids, record.chains[0].ids),
        (views.logprobs, record.chains[0].logprobs),
    ):
        assert np.shares_memory(view, np.frombuffer(raw, "u1"))
    for array in (views.prompt_ids, views.logprobs, views.loss_mask, views.policy_versions):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


@pytest.mark.parametrize("copied", [lambda views: pickle.loads(pickle.dumps(views)), copy.deepcopy])
def test_arrays_can_be_passed_to_another_process(copied):
    views = Arrays(arrays.decode(arrays.encode(short())))
    for twin in (copied(views), copied(copied(views))):
        for name in ("token_ids", "logprobs", "loss_mask"):
            assert getattr(twin, name).tolist() == getattr(views, name).tolist()
        assert twin.versions == ["v"] and twin.trajectory() == short()


def test_what_is_no_32_bit_id_is_refused_and_not_cut():
    for wrong in (2**31, -(2**31) - 1, 2**70):
        with pytest.raises(arrays.WireError, match="32 bits"):
            arrays.encode(short(ids=(3, wrong)))


def packed(document: str, records: dict[str, bytes]) -> arrays.PackedAnswer:
    sizes = {name: len(record) for name, record in records.items()}
    return arrays.PackedAnswer(document, sizes, records.values())


def test_an_answer_carries_its_json_and_records_as_they_are():
    first, second = arrays.encode(short()), arrays.encode(Trajectory())
    answer = packed('{"a":"é"}', {"r1": first, "r2": second})
    pieces = list(answer)
    assert answer.nbytes == sum(map(len, pieces)) and pieces[1] is first
    assert all(type(piece) is bytes for piece in pieces)  # WSGI takes nothing else
    text, records = arrays.unpack_answer(b"".join(pieces))
    assert json.loads(text) == {"a": "é"}
    assert {name: record.trajectory() for name, record in records.items()} == {
        "r1": short(),
        "r2": Trajectory(),
    }


@given(st.lists(trajectories(), min_size=1, max_size=4), st.text(max_size=9))
@settings(max_examples=30, deadline=None)
def test_arrays_of_an_answer_are_aligned_wherever_they_lie_in_it(several, document):
    records = {f"r{'x' * number}": arrays.encode(trajectory) for number, trajectory in enumerate(several)}
    _, unpacked = arrays.unpack_answer(b"".join(packed(json.dumps(document), records)))
    assert list(unpacked) == list(records)
    for record in unpacked.values():
        for views in Arrays(record).chains if record.chains else []:
            assert views.token_ids.ctypes.data % 8 == views.logprobs.ctypes.data % 8 == 0


def test_any_reader_of_msgpack_finds_what_is_documented():
    """With another library than ours, and by the names of docs/api.md."""
    answer = packed("{}", {"r1": arrays.encode(short()), "r2": arrays.encode(Trajectory())})
    fields = msgpack.unpackb(b"".join(answer))
    assert (fields["v"], fields["json"], fields["ids"]) == (2, "{}", ["r1", "r2"])
    first, second = fields["records"]
    assert (first["v"], first["versions"], second["chains"]) == (1, ["v"], [])
    (chain,) = first["chains"]
    assert struct.unpack("<5i", chain["ids"]) == (1, 2, 3, 4, 5)
    assert struct.unpack("<3f", chain["logprobs"]) == (-0.5, -0.25, 0.0)
    assert (chain["width"], chain["runs"]) == (4, [[2, -1], [2, 0], [1, -1]])
    assert json.loads(first["document"])["chains"][0]["segments"][1]["role"] == "assistant"


@pytest.mark.parametrize("many", [15, 16, 17, 40])
def test_lists_are_read_whatever_their_length(many):
    """From 16 items on a list of msgpack has another head."""
    chained = Trajectory(chains=short().chains * many)
    assert arrays.decode(arrays.encode(chained)).trajectory() == chained
    answer = b"".join(packed("{}", {str(number): arrays.encode(short()) for number in range(many)}))
    _, records = arrays.unpack_answer(answer)
    assert list(records) == [str(number) for number in range(many)]
    assert len(msgpack.unpackb(answer)["records"]) == many


def test_an_answer_is_cut_off_where_a_record_is_another_than_was_said():
    def records():
        try:
            yield first
            yield first[:-8]
        finally:
            ended.append(True)

    first, ended = arrays.encode(short()), []
    answer = arrays.PackedAnswer("{}", {"r1": len(first), "r2": len(first)}, records())
    pieces = iter(answer)
    assert [next(pieces), next(pieces)][1] == first
    with pytest.raises(arrays.WireError, match=f"r2.*{len(first) - 8} bytes now, and not {len(first)}"):
        next(pieces)
    assert not ended
    answer.close()  # as a WSGI server does
    assert ended
    arrays.PackedAnswer("{}", {}, []).close()


def changed(**values) -> bytes:
    return msgpack.packb(msgpack.unpackb(arrays.encode(short())) | values)


def chain_with(**values) -> bytes:
    record = msgpack.unpackb(arrays.encode(short()))
    record["chains"][0] |= values
    return msgpack.packb(record)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        arrays.encode(short())[:-1],
        arrays.encode(short()) + b"x",
        msgpack.packb([1]),
        msgpack.packb({"v": "1"}),
        msgpack.packb({"v": 1}),
        changed(chains=[{}]),
        changed(chains=7),
        chain_with(ids=b"\0" * 16),
        chain_with(ids="text"),
        chain_with(logprobs=b""),
        chain_with(logprobs=b"\0" * 16),
        chain_with(width=2),
        chain_with(runs=[[2, -1], [2, 1], [1, -1]]),
        chain_with(runs=[[2, -1], [2, 0]]),
        chain_with(runs=[[-2, -1], [7, 0]]),
        chain_with(runs=[["2", -1]]),
        changed(document=7),
        changed(document=None),
        b"\x82\xa1v\x01\xa1x" + b"\x91" * 100_000 + b"\xc0",
    ],
)
def test_a_damaged_record_is_refused(raw):
    with pytest.raises(arrays.WireError):
        arrays.decode(raw)


@pytest.mark.parametrize("document", ["{", b"no zlib", '{"chains":[]}'])
def test_a_damaged_document_is_refused(document):
    record = arrays.decode(changed(document=document))
    with pytest.raises(arrays.WireError):
        record.trajectory()


def test_a_newer_form_is_refused_with_the_remedy():
    with pytest.raises(arrays.WireError, match="upgrade rollout-service"):
        arrays.decode(changed(v=2))
    with pytest.raises(arrays.WireError, match="upgrade rollout-service"):
        arrays.unpack_answer(msgpack.packb({"v": 9, "json": "{}", "records": {}}))
    with pytest.raises(arrays.WireError, match="no answer that can be read"):
        arrays.unpack_answer(msgpack.packb({"v": 2, "json": "{}", "ids": ["a"], "records": []}))
