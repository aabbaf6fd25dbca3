"""The client's own promises: idempotent submission, retries, order, errors that say what to do."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from rollout.client import ApiError, AsyncClient, Client, Unavailable, WaitTimeout
from rollout.errors import problems_of
from rollout.schema import Limits, ResultPage, RolloutRequest, State
from rollout.schema.base import FieldError, Problem
from rollout.schema.policy import PolicyRequest
from tests.helpers.stack import wait_until


def request(**fields) -> RolloutRequest:
    return RolloutRequest(handler="calculator", **fields)


def test_submit_gives_one_entry_per_rollout_in_order_and_splits_at_a_thousand(gateway, client):
    requests = [request(id=f"r{k}", n=7) for k in range(300)]
    accepted = client.submit([*requests, request(id="a")])
    sizes = [sum(r.n for r in s.requests) for s in gateway.submissions]
    assert sizes == [994, 994, 113]
    expected = [(f"r{k}", f"r{k}.{i}") for k in range(300) for i in range(7)]
    assert [(s.group_id, s.id) for s in accepted] == [*expected, ("a", "a")]


def test_submit_splits_large_bodies(gateway, client):
    client.submit([request(task={"text": "x" * (3 << 20)}) for _ in range(5)])
    assert [len(s.requests) for s in gateway.submissions] == [2, 2, 1]


@pytest.mark.parametrize("fault", ["drop", "drop-after", (503, {"retry-after": "0"}, b"{}")])
def test_a_submission_tried_again_creates_nothing_twice(gateway, client, fault):
    gateway.faults = [fault, fault]
    accepted = client.submit([request(), request(n=2)])
    assert len(gateway.calls) == 3
    assert sorted(gateway.rollouts) == sorted(s.id for s in accepted)
    assert len(gateway.rollouts) == 3


def test_limits_changed_in_place_are_sent(gateway, client):
    changed = request(id="a")
    changed.limits.max_turns = 3
    client.submit(changed)
    assert gateway.submissions[0].requests[0].limits == Limits(max_turns=3)


def test_a_refusal_names_the_field_and_the_message(gateway, client):
    broken = RolloutRequest.model_construct(handler="", n=1, id="a", limits=Limits())
    with pytest.raises(ApiError) as caught:
        client.submit(broken)
    assert caught.value.status == 400
    assert "POST /v1/rollouts: 400 invalid request" in str(caught.value)
    assert "requests.0.handler: String should have at least 1 character" in str(caught.value)


def test_a_refusal_says_each_fault_once():
    """The detail of a problem document is its first fault."""
    errors = [FieldError(field="url", message="no server"), FieldError(field="n", message="too many")]
    problem = Problem(title="Invalid request", status=400, detail="url: no server", errors=errors)
    assert str(ApiError(400, problem)) == "400 Invalid request: url: no server\n  n: too many"


def test_a_refusal_of_our_own_is_told_without_words_of_pydantic():
    with pytest.raises(ValidationError) as caught:
        PolicyRequest(version="step-7", path="here")
    text = "path: 'here' is not an absolute path; backends do not share your directory"
    assert problems_of(caught.value) == text


def test_an_answer_that_is_no_problem_document_is_shown(gateway, client):
    gateway.faults = [(418, {}, b"<html>teapot</html>")]
    with pytest.raises(ApiError, match="418 I'm a Teapot: <html>teapot"):
        client.status()


def test_a_gateway_that_goes_away_is_told_of_with_the_rollouts_that_go_on(gateway):
    gateway.finish_at_once = False
    asks = ("GET", "/v1/results")

    def go_away():
        # Once for the cursor and once for what ends: that call is answered, and nobody who comes after it.
        wait_until(lambda: gateway.calls.count(asks) >= 2, 120, "the client to wait")
        gateway.faults.extend(["drop"] * 100)
        gateway.finish("held.0")

    with Client(gateway.url, retry_for=0.5) as client:
        rollouts = client.rollouts(RolloutRequest(handler="noop", id="held", n=8))
        threading.Thread(target=go_away).start()
        with pytest.raises(Unavailable, match=r"7 rollouts go on, among them held\.1, held\.2,") as raised:
            list(rollouts)
    assert raised.value.pending == [f"held.{index}" for index in range(1, 8)]


def test_no_gateway_is_unavailable_and_says_what_to_do():
    with (
        Client("http://127.0.0.1:9", retry_for=0.3) as client,
        pytest.raises(Unavailable, match=r"GET http://127.0.0.1:9/v1/status .*ConnectError.*`rollout up`"),
    ):
        assert client.ready()["ready"] is False, "this asks once, and raises nothing"
        client.status()


def test_the_password_of_a_proxy_is_not_shown():
    with (
        Client("http://ann:secret@127.0.0.1:9", retry_for=0.0) as client,
        pytest.raises(Unavailable) as raised,
    ):
        client.status()
    assert "http://127.0.0.1:9/v1/status" in str(raised.value) and "secret" not in str(raised.value)


def test_a_lasting_503_is_unavailable_with_its_reason(gateway):
    gateway.faults = [(503, {}, b'{"title":"Redis is away","status":503}')] * 50
    with Client(gateway.url, retry_for=0.5) as client, pytest.raises(Unavailable, match="503 Redis is away"):
        client.status()


def test_over_quota_a_call_is_sent_again_where_the_gateway_says_that_this_helps_soon(gateway, client):
    headers = {"retry-after": "0"}, {"retry-after": "60"}, {}
    soon, late, never = (
        (429, fields, b'{"title":"Over quota","status":429,"detail":"later"}') for fields in headers
    )
    gateway.faults = [soon, soon]
    assert len(client.submit(request())) == 1
    assert len(gateway.calls) == 3
    for fault in (late, never):
        gateway.calls.clear()
        gateway.faults = [fault, fault]
        with pytest.raises(ApiError, match="429 Over quota: later"):
            client.submit(request())
        assert len(gateway.calls) == 1
        gateway.faults = []


def test_the_address_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("ROLLOUT_URL", "http://example.org:9/")
    assert Client().base_url == "http://example.org:9"
    with pytest.raises(ValueError, match=r"'example\.org' is not an http"):
        Client("example.org")


def test_wait_returns_when_the_rollout_ends_and_gives_up_after_its_time(gateway, client):
    gateway.finish_at_once = False
    client.submit(request(id="a"))
    with pytest.raises(WaitTimeout, match=r"rollout a is still queued after 0\.2 s"):
        client.wait("a", timeout=0.2)
    threading.Timer(0.2, gateway.finish, ["a"]).start()
    assert client.wait("a", timeout=240).state is State.COMPLETED


def test_stream_yields_in_order_of_completion_those_that_ended_before_too(gateway, client):
    gateway.finish_at_once = False
    client.submit([request(id=i) for i in "abcd"])
    gateway.finish("c")
    stream = client.stream(["a", "b", "c"], timeout=240)
    assert next(stream).id == "c"
    for name in "bda":
        gateway.finish(name)
    assert [r.id for r in stream] == ["b", "a"]


def test_stream_raises_when_some_never_end(gateway, client):
    gateway.finish_at_once = False
    client.submit([request(id="a"), request(id="b")])
    gateway.finish("a")
    with pytest.raises(WaitTimeout, match=r"1 rollouts had not ended after 0\.3 s, among them b"):
        list(client.stream(["a", "b"], timeout=0.3))


@pytest.mark.parametrize(("call", "seconds"), [("stream", 0.1), ("rollouts", 0.5)])
def test_timeout_counts_from_the_call_s_start_or_from_the_submission_on(
    gateway, client, monkeypatch, call, seconds
):
    """By a clock that only reading the ids (0.4 s) and the polls move."""
    gateway.finish_at_once = False
    gateway.create(request(id="a"))
    now, waits = [100.0], []

    def ids():
        now[0] += 0.4
        yield "a"

    async def results(self, cursor, wait=None, *_, **__):
        if cursor != "$":
            waits.append(wait)
            now[0] += wait
        return ResultPage(rollouts=[], cursor="0")

    monkeypatch.setattr("rollout.http.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(AsyncClient, "results", results)
    with pytest.raises(WaitTimeout):
        if call == "stream":
            list(client.stream(ids(), timeout=0.5))
        else:
            list(client.rollouts((request(id=name) for name in ids()), timeout=0.5))
    assert waits == [seconds]


def test_stream_finds_what_the_completions_no_longer_hold(gateway, client, monkeypatch):
    monkeypatch.setattr("rollout.async_client.SILENCE_S", 0.1)
    monkeypatch.setattr("rollout.http.LONG_POLL_S", 0.1)
    client.submit([request(id="a")])
    gateway.ended.clear()
    assert [r.id for r in client.stream(["a"], cursor="0", timeout=5)] == ["a"]


def test_stream_without_ids_goes_on_until_the_timeout(gateway, client):
    client.submit([request(id=f"r{k}") for k in range(120)])
    assert [r.id for r in client.stream(timeout=0.3)] == [f"r{k}" for k in range(120)]


def events(body: str) -> tuple[int, dict[str, str], bytes]:
    """A connection of server-sent events that says this, and is cut."""
    return 200, {"content-type": "text/event-stream"}, body.encode()


def test_an_event_that_was_cut_comes_again(gateway, client):
    client.submit([request(id=i) for i in "ab"])
    first, second = (
        f"id: {number}\nevent: completion\ndata: {gateway.rollouts[name].model_dump_json()}\n"
        for number, name in enumerate("ab", 1)
    )
    gateway.faults = [events(f"{first}\n{second}")]
    stream = client.stream_completions(timeout=240)
    assert [next(stream).id for _ in range(2)] == ["a", "b"]
    gateway.create(request(id="c"))
    assert next(stream).id == "c", "and nothing comes twice"


def test_connections_that_are_cut_again_and_again_are_no_gateway_that_is_away(gateway):
    """Each of them tells that it is there; only the time since one failed counts."""
    gateway.create(request(id="a"))
    gateway.faults = [events(": alive\n\n")] * 8
    with Client(gateway.url, retry_for=0.3) as client:
        assert next(client.stream_completions(timeout=240)).id == "a"


def test_run_returns_results_in_the_order_of_submission_also_when_it_is_repeated(gateway, client, capsys):
    gateway.finish_at_once = False
    for delay, name in ((0.2, "c"), (0.3, "a"), (0.4, "b")):
        threading.Timer(delay, gateway.finish, [name]).start()
    for _ in range(2):
        results = client.run((request(id=i) for i in "abc"), timeout=240)
        assert [r.id for r in results] == ["a", "b", "c"]
    assert len(gateway.rollouts) == 3
    assert capsys.readouterr().err == "", "no bar where nobody sees it"


def test_rollouts_yields_what_ends_first_and_reads_no_more_requests_than_have_room(gateway, client):
    gateway.finish_at_once = False
    read = []

    def source():
        for k in range(4):
            read.append(k)
            yield request(id=f"r{k}")

    results = client.rollouts(source(), in_flight=2, timeout=240)
    threading.Timer(0.2, gateway.finish, ["r1"]).start()
    assert next(results).id == "r1" and read == [0, 1]
    for name in ("r0", "r2", "r3"):
        threading.Timer(0.2, gateway.finish, [name]).start()
        assert next(results).id == name
    assert next(results, None) is None


def test_each_rollout_of_a_group_takes_its_room(gateway, client):
    gateway.finish_at_once = False
    source = iter([request(id=name, n=2) for name in "abc"])
    results = client.rollouts(source, in_flight=4, timeout=240)
    threading.Timer(0.2, gateway.finish, ["a.0"]).start()
    assert next(results).id == "a.0"
    assert [unread.id for unread in source] == ["c"]


@pytest.mark.parametrize("call", ["run", "rollouts"])
def test_a_bar_counts_what_ended_when_it_is_asked_for(gateway, client, capsys, call):
    list(getattr(client, call)([request(id=i) for i in "abc"], progress=True))
    bar = capsys.readouterr().err
    assert "3/3" in bar and "3 completed, mean reward" in bar


def test_cancel_and_its_bulk_form(gateway, client):
    gateway.finish_at_once = False
    client.submit([request(id=i) for i in "abc"])
    assert client.cancel("a")["state"] == "cancelled"
    counts = {"cancelled": 1, "already_ended": 1, "unknown": 0}
    assert client.cancel_many(ids=["a", "b"]) == {**counts, "unknown_ids": []}
    with pytest.raises(ValueError, match="one of ids, group_id and tag"):
        client.cancel_many(ids=["a"], tag="t")


def test_the_small_resources(gateway, client):
    assert client.handlers()[0].name == "calculator"
    assert client.status()["states"] == {"completed": 2}
    assert client.ready() == {"ready": False, "missing": ["a worker of the stage run"]}
    assert client.list(state=State.QUEUED).rollouts == client.list(state="typo").rollouts == []
    with pytest.raises(ApiError, match="there is no rollout 'nope'"):
        client.get("nope")


def test_a_backend_is_registered_with_what_is_said_of_it(gateway, client):
    limits = {"capacity_tokens": 4096, "max_rollouts": 3}
    added = client.add_backend("http://127.0.0.1:8000", id="one", model="m", **limits)
    assert (added.id, added.capacity_tokens, added.max_rollouts) == ("one", 4096, 3)
    assert client.backend("one") == added
    client.remove_backend("one")
    for call in (client.backend, client.drain_backend, client.remove_backend):
        with pytest.raises(ApiError, match="there is no backend 'one'"):
            call("one")


def test_the_async_client_does_the_same(gateway):
    async def scenario():
        async with AsyncClient(gateway.url) as client:
            gateway.faults = ["drop"]
            results = await client.run([request(id=i) for i in "ab"])
            streamed = [r.id async for r in client.rollouts([request(id=i) for i in "ab"], progress=True)]
            with pytest.raises(ApiError):
                await client.get("nope")
            return [r.id for r in results], streamed, (await client.status())["version"]

    assert asyncio.run(scenario()) == (["a", "b"], ["a", "b"], "x")
