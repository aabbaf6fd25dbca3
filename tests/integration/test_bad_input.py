"""What foreign clients send that is not quite right: answered at once, in words that say what to do."""

from __future__ import annotations

import json
import time

import pytest

from rollout.schema import Rollout, RolloutRequest, Stage
from rollout.trajectory import Chain, Message, Segment, ToolCall, Trajectory
from services.gateway import bodies
from services.gateway.bodies import read_json
from services.gateway.problems import ApiProblem
from services.state import keys
from services.state.api_keys import Scope
from services.state.requests import Unstorable, stored_form
from services.state.rollouts.store import UNREADABLE, Finish
from workers.errors import describe


@pytest.fixture
def world(world):
    world.key("a", Scope.ADMIN)
    return world


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        (b'{"a": {"b": [1, NaN]}}', "a.b.1", "NaN is no number"),
        (b'{"a": [{"b": 1e999}]}', "a.0.b", "too large"),
        (b'{"a": {"b": 1, "b": 1}}', "a.b", "comes twice"),
        (rb'{"a": {"b": "\udc00"}}', "a.b", "surrogate"),
        (rb'{"a": {"\ud800": 1}}', r"a.\ud800", "surrogate"),
        (b'{"a": ' + b"9" * 500 + b"}", "a", "500 digits"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "a" + ".0" * 63, "deeper than 64"),
        (b"[" * 10_000, "(body)", "deeper than 64"),
        (b"\xff{}", "(body)", "not UTF-8 at byte 0"),
        (b"\xef\xbb\xbf{}", "(body)", "BOM"),
        (b'{"a": }', "(body)", "line 1 column 7"),
        (b"NaN", "(body)", "no number"),
    ],
)
def test_a_body_that_cannot_be_taken_names_the_field(text, field, reason):
    with pytest.raises(ApiProblem) as caught:
        read_json(text)
    (error,) = caught.value.problem.errors
    assert (error.field, reason in error.message) == (field, True), error.message


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -2, 2.5, 1e308, 2**60, None, True, "é𝄞", '"}{[', "\\ud800", {"": 1}]},
        json.loads("[" * 60 + "]" * 60),
        "text",
        "a, b, [c], {d}" * 10,
        5,
    ],
)
def test_what_is_fine_is_read_as_it_is(value, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_VALUES", 65)  # what stands in texts is no value
    assert read_json(json.dumps(value).encode()) == value
    assert read_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_structure_hidden_behind_texts_is_counted_in_linear_time(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_VALUES", 1000)
    for text in (
        b'"\\"' * 400_000 + b"," * 2000,
        b'"' * 1_000_001 + b"[" * 2000,
        b"\\" * 2_000_000 + b"," * 2000,
    ):
        before = time.thread_time()
        with pytest.raises(ApiProblem):
            read_json(text)
        assert time.thread_time() - before < 5.0


def test_a_request_that_would_not_be_read_again_is_not_stored():
    for metadata in ({"x": float("nan")}, {"x": float("inf")}, {"x": "\ud800"}, {"x": (1, 2)}):
        with pytest.raises(Unstorable, match="cannot be stored"):
            stored_form(RolloutRequest(handler="noop", metadata=metadata))


@pytest.mark.parametrize("where", ["handler", "id", "temperature", "name"])
def test_an_error_does_not_repeat_a_value_of_megabytes(world, where):
    large = "x" * 2_000_000
    fields = {
        "handler": {"handler": large},
        "id": {"id": large},
        "temperature": {"sampling": {"temperature": large}},
        "name": {large: 1},
    }
    answer = world.post("/v1/rollouts", "a", {"handler": "noop"} | fields[where])
    assert answer.status_code == 400 and len(answer.data) < 5000
    assert answer.json["errors"][0]["field"][:8] in ("handler", "id", "sampling", "xxxxxxxx")


def test_another_character_set_is_refused(world):
    body, kind = '{"handler": "noop"}'.encode("utf-16"), "application/json; charset=utf-16"
    answer = world.call("POST", "/v1/rollouts", "a", data=body, content_type=kind)
    assert answer.status_code == 415 and "UTF-8" in answer.json["detail"]


def test_a_stream_that_is_asked_for_and_not_given_is_refused(world):
    answer = world.post("/v1/responses", "a", {"input": "hi", "stream": True})
    assert answer.status_code == 400
    assert answer.json["errors"][0]["field"].endswith("stream") and "not streamed" in answer.json["detail"]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/chat/completions", "/v1/completions", "/v1/messages"]
)
def test_an_sdk_that_asks_for_a_model_is_told_where_they_are(world, path):
    answer = world.post(path, "a", {"model": "m"})
    assert answer.status_code in (404, 405) and "GET /v1/backends" in answer.json["detail"]
    assert "GET /v1/backends" not in world.post("/v1/nothing", "a").json["detail"]


def test_a_number_given_as_an_id_comes_back_as_one(world):
    from services.gateway.compat.prorl import ProcessRequest, rollout_request

    body = ProcessRequest.model_validate(
        {"instance": {"data_source": "noop", "instance_id": 7, "trajectory_id": 3}}
    )
    request = rollout_request(body, world.gate.tasks.handlers(), world.gate.settings, 0)
    assert request.metadata == {"instance_id": 7, "trajectory_id": 3}
    for wrong in (True, 2**60, 1.5, ["x"], "x" * 1001):
        answer = world.post("/process", "a", {"instance": {"data_source": "noop", "instance_id": wrong}})
        assert answer.status_code == 400, answer.text
        assert answer.json["errors"][0]["field"] == "instance.instance_id"


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_numbers_to_be_aggregated_are_numbers(world, text):
    body = f'{{"verify_responses": [{{"reward": {text}}}]}}'
    answer = world.call("POST", "/aggregate_metrics", "a", data=body, content_type="application/json")
    assert answer.status_code == 400 and answer.json["errors"][0]["field"] == "verify_responses.0.reward"


def test_an_id_that_leaves_no_room_for_its_members_can_still_be_acknowledged(world):
    ids = [rollout["id"] for rollout in world.submit("a", id="x" * 128, n=2).json["rollouts"]]
    world.gate.rollouts.cancel_many(ids)
    assert world.post("/v1/rollouts/ack", "a", {"ids": ids}).json["acknowledged"] == 2
    batch = {"id": "x" * 101, "n": 2, "groups": 1, "prompts": [{"handler": "noop"}]}
    assert world.post("/v1/batches", "a", batch).json["errors"][0]["field"] == "id"


def test_numbers_that_json_does_not_have_are_left_out_of_a_record(world):
    """`null` in them would keep a client from reading the whole page."""
    (rollout_id,) = (item["id"] for item in world.submit("a").json["rollouts"])
    store = world.gate.rollouts
    store.finish(
        store.claim(rollout_id, 1, Stage.INIT, "w"),
        Finish("failed", {"metrics": '{"a": NaN, "b": 1, "c": null}'}),
    )
    assert world.get(f"/v1/rollouts/{rollout_id}", "a").json["metrics"] == {"b": 1.0}


def test_a_claim_of_a_bad_record_says_so_in_every_stage(world):
    store = world.gate.rollouts
    for stage, before in ((Stage.RUN, ["ready"]), (Stage.EVAL, ["ready", "evaluating"])):
        (rollout_id,) = (item["id"] for item in world.submit("a").json["rollouts"])
        for state, earlier in zip(before, (Stage.INIT, Stage.RUN), strict=False):
            store.finish(store.claim(rollout_id, 1, earlier, "w"), Finish(state))
        world.redis.hset(keys.record(rollout_id), "sandbox", "{")
        assert store.claim(rollout_id, 1, stage, "w") == UNREADABLE
        assert world.redis.hget(keys.record(rollout_id), "state") == "failed"


def test_half_a_character_that_a_model_wrote_costs_the_rollout_nothing(world):
    (rollout_id,) = (item["id"] for item in world.submit("a").json["rollouts"])
    store = world.gate.rollouts
    store.finish(store.claim(rollout_id, 1, Stage.INIT, "w"), Finish("ready"))
    claim = store.claim(rollout_id, 1, Stage.RUN, "w")
    call = ToolCall(id="c", name="bash", arguments={"command": "echo \ud800"})
    message = Message(role="assistant", content="a\udfff", tool_calls=[call])
    segment = Segment(
        role="assistant", token_ids=[1], sampled=True, logprobs=[-0.5], policy_version="v", messages=[message]
    )
    error = describe(ValueError("bad \ud800"), Stage.RUN)
    fields = {"error": error.model_dump_json(), "blame": "handler"}
    trajectory = Trajectory(chains=[Chain(segments=[segment])])
    store.note(rollout_id, claim.fence, text="a note \ud800")
    assert store.finish(claim, Finish("failed", fields, trajectory)) == "failed"
    record = Rollout.model_validate_json(world.get(f"/v1/rollouts/{rollout_id}", "a").data)
    assert record.error.message == "bad ?" and record.notes[0].text == "a note ?"
    read = record.trajectory.chains[0].segments[0]
    assert (read.messages[0].text, read.token_ids, read.logprobs) == ("a?", [1], [-0.5])
    assert read.messages[0].tool_calls[0].arguments == {"command": "echo ?"}


def test_bytes_that_are_no_text_hurt_their_own_record_alone(world):
    ids = [rollout["id"] for rollout in world.submit("a", n=2).json["rollouts"]]
    world.redis.hset(keys.record(ids[0]), "backend", b"\xff\xfe")
    world.redis.hset(keys.record(ids[1]), "created", b"\xff")
    page = world.get("/v1/rollouts", "a").json
    assert [rollout["id"] for rollout in page["rollouts"]] == [ids[0]]
