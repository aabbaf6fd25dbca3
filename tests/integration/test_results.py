"""Completions as they reach a trainer: stream, acknowledgement, compressed answers. A real gateway."""

from __future__ import annotations

import gzip
import json
import threading
from contextlib import contextmanager

import httpx
import pytest

from rollout.client import Client
from rollout.schema import RolloutRequest, State
from tests.helpers.gateways import started_gateway
from tests.helpers.keys import HEADERS, http
from tests.helpers.stack import free_port, wait_until

ENV = {"ROLLOUT_SSE_STREAMS": "2", "ROLLOUT_SSE_HEARTBEAT_S": "0.3", "ROLLOUT_KEEP_ACKED_S": "0"}


@pytest.fixture(scope="module")
def gateway(stack):
    """A second gateway of the same service, with few streams and quick heartbeats; its address."""
    with started_gateway(stack, "gateway-results", free_port(), ENV) as gateway:
        yield gateway.url


@pytest.fixture
def client(gateway):
    with Client(gateway) as client:
        yield client


def run(client, number, tag):
    """Ids of rollouts that have ended, in the order of their completion."""
    cursor = client.completions("$").cursor
    client.run([RolloutRequest(handler="noop", n=number, tags=[tag])], timeout=240)
    return [item.id for item in client.completions(cursor, tag=tag).rollouts]


@contextmanager
def events(url, **options):
    """The stream's lines, decoded; closed at the end."""
    with httpx.Client(timeout=240, headers=HEADERS) as http:
        request = http.build_request("GET", f"{url}/v1/results/stream", **options)
        # The gateway finds out with the next heartbeat that an earlier test's stream was left.
        response = wait_until(lambda: _opened(http, request), 120, "a free stream")
        try:
            assert response.status_code == 200, response.read()
            yield response.iter_lines()
        finally:
            response.close()


def _opened(http, request):
    response = http.send(request, stream=True)
    if response.status_code != 503:
        return response
    response.close()
    return None


def next_event(lines):
    """Fields of the next event that has any."""
    fields = {}
    for line in lines:
        if not line and fields:
            return fields
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
    raise AssertionError("the stream ended")


def test_a_stream_brings_what_ended_before_and_what_ends_while_it_is_open(gateway, client):
    first = run(client, 2, "sse-order")
    with events(gateway, params={"tag": "sse-order", "include": "summary"}) as lines:
        before = [next_event(lines) for _ in first]
        assert [json.loads(event["data"])["id"] for event in before] == first
        assert {event["event"] for event in before} == {"completion"}
        (new,) = client.submit(RolloutRequest(handler="noop", tags=["sse-order"]))
        while "data" not in (event := next_event(lines)):
            assert event["id"], "an event without data only moves the cursor"
        assert json.loads(event["data"])["id"] == new.id
        assert event["id"] == client.get(new.id).completion


def test_a_stream_that_was_cut_goes_on_after_the_last_id(gateway, client):
    ids = run(client, 3, "sse-cut")
    with events(gateway, params={"tag": "sse-cut"}) as lines:
        last = next_event(lines)["id"]
    with events(gateway, params={"tag": "sse-cut"}, headers={"Last-Event-ID": last}) as lines:
        assert [json.loads(next_event(lines)["data"])["id"] for _ in range(2)] == ids[1:]


def test_a_silent_stream_sends_comments(gateway):
    with events(gateway, params={"cursor": "$", "tag": "nobody-has-it"}) as lines:
        comments = [line for line, _ in zip((text for text in lines if text), range(3), strict=False)]
    assert all(line.startswith(":") for line in comments)


def test_one_stream_too_many_is_refused_and_one_that_was_left_makes_room(gateway, client):
    with events(gateway) as first, events(gateway) as second:
        assert next(first) and next(second)
        refused = http.get(f"{gateway}/v1/results/stream", timeout=240)
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
        assert "ROLLOUT_SSE_STREAMS" in refused.json()["detail"]
        assert client.completions("$").rollouts == [], "other requests are answered"
        ids = run(client, 1, "sse-full")
        # The client does without: the same by long-polls.
        stream = client.stream_completions(tag="sse-full", include="summary")
        assert next(stream).id == ids[0]

    def room():
        with http.stream("GET", f"{gateway}/v1/results/stream", timeout=240) as response:
            return response.status_code == 200

    wait_until(room, 120, "a stream that was left to make room")


@pytest.mark.parametrize("header, params", [("x", {}), ("1-2-3", {}), (None, {"cursor": "-1"})])
def test_a_bad_place_to_begin_is_refused(gateway, header, params):
    headers = {"Last-Event-ID": header} if header else {}
    answer = http.get(f"{gateway}/v1/results/stream", params=params, headers=headers, timeout=240)
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["field"] == ("Last-Event-ID" if header else "cursor")


def test_the_client_follows_the_stream_through_the_death_of_the_gateway(stack):
    port = free_port()
    with Client(f"http://127.0.0.1:{port}", retry_for=240) as client:
        with started_gateway(stack, "gateway-mortal", port, ENV) as mortal:
            first = run(client, 3, "sse-death")
            following = client.stream_completions(tag="sse-death")
            ids = [next(following).id]
            mortal.kill()
        rest = []
        reader = threading.Thread(target=lambda: rest.extend(next(following).id for _ in range(4)))
        reader.start()
        with started_gateway(stack, "gateway-mortal-2", port, ENV):
            second = run(client, 2, "sse-death")
            reader.join(120)
        # What was read before the cut may come again; nothing may be missing.
        assert list(dict.fromkeys(ids + rest)) == first + second


def test_the_client_ends_following_when_its_time_is_over(client):
    run(client, 1, "sse-time")
    assert list(client.stream_completions("$", tag="sse-time", timeout=0.5)) == []


def test_acknowledging_frees_the_trajectory_where_the_setting_says_so_and_keeps_the_rest(client):
    done = client.run([RolloutRequest(handler="noop", n=2)], timeout=240)
    (live,) = client.submit(RolloutRequest(handler="noop", task={"run_s": 60}))
    counts = client.ack([done[0].id, done[0].id, live.id, "nobody"])
    assert counts.model_dump() == {
        "acknowledged": 1,
        "already_acknowledged": 1,
        "not_ended": 1,
        "unknown": 1,
    }
    assert client.get(done[0].id).acknowledged_at and client.get(done[1].id).acknowledged_at is None
    client.cancel(live.id)
    assert client.wait(live.id, timeout=240).state is State.CANCELLED


def test_an_acknowledgement_of_nothing_is_refused(gateway):
    answer = http.post(f"{gateway}/v1/rollouts/ack", json={"ids": []}, timeout=240)
    assert answer.status_code == 400 and answer.json()["errors"][0]["field"] == "ids"


def test_a_large_answer_is_compressed_for_those_who_accept_it(gateway, client):
    run(client, 100, "gzip")

    def page(accept, limit):
        headers = {"Accept-Encoding": accept}
        params = {"tag": "gzip", "limit": limit}
        with http.stream("GET", f"{gateway}/v1/results", params=params, headers=headers) as response:
            return response.headers, b"".join(response.iter_raw())

    headers, packed = page("gzip", 100)
    assert headers["Content-Encoding"] == "gzip" and "Accept-Encoding" in headers["Vary"]
    for refusing in ("identity", "gzip;q=0", "identity;q=1, gzip;q=0.5", ""):
        headers, plain = page(refusing, 100)
        assert "Content-Encoding" not in headers, refusing
        assert gzip.decompress(packed) == plain and len(packed) < len(plain) / 2
    headers, _ = page("gzip", 1)
    assert "Content-Encoding" not in headers, "a small answer is not worth it"
    with Client(gateway) as local:
        assert len(local.completions(tag="gzip", limit=100).rollouts) == 100


def test_metrics_tell_what_became_of_results(gateway, client):
    text = http.get(f"{gateway}/metrics", timeout=240).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["rollout_results_acknowledged_total"]) >= 1
    assert float(values["rollout_completions"]) >= 100
    for name in (
        "rollout_results_bytes",
        'rollout_results_dropped_total{reason="size"}',
        'rollout_webhooks_total{event="given_up"}',
        "rollout_webhooks_pending",
        "rollout_completion_streams",
        "rollout_archived_total",
    ):
        assert float(values[name]) >= 0
