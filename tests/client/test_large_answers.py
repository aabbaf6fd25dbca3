"""Large answers: whole over every kind of connection, and their faults are those of httpx."""

from __future__ import annotations

import gzip
import random
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import pytest

from rollout import arrays
from rollout.client import Client, Unavailable
from rollout.schema import Trajectory
from tests.helpers.rollouts import chain, ended, sampled

STALL_S = 20.0
CHANCE = random.Random(0)
IDS = [CHANCE.randrange(2**31) for _ in range(150_000)]
LARGE = Trajectory(chains=[chain([1, 2], sampled(IDS, [-CHANCE.random() for _ in IDS]))])
RECORD = arrays.encode(LARGE)
BODY = b"".join(arrays.PackedAnswer(ended(id="a").model_dump_json(), {"a": len(RECORD)}, [RECORD]))


def sent(way: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """What the gateway does with a request, in place of what it always does."""

    def send(handler: BaseHTTPRequestHandler) -> None:
        body = gzip.compress(BODY, 0) if way == "gzip" else BODY
        handler.send_response(200)
        handler.send_header("content-type", arrays.MEDIA_TYPE)
        if way == "chunked":
            handler.send_header("transfer-encoding", "chunked")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        else:
            handler.send_header("content-length", str(len(body)))
        if way == "gzip":
            handler.send_header("content-encoding", "gzip")
        handler.end_headers()
        if way in ("cut", "stall"):
            body = body[: len(body) // 2]
            handler.close_connection = True
        handler.wfile.write(body)
        if way == "stall":
            time.sleep(STALL_S)

    return send


@pytest.mark.parametrize("way", ["plain", "chunked", "gzip"])
def test_a_large_answer_is_whole_however_it_comes(gateway, client, way):
    gateway.faults = [sent(way)] * 3
    for _ in range(3):
        assert client.get("a", include="arrays").arrays.trajectory() == LARGE
    assert gateway.connections == 1, "they go over one connection"


def test_an_answer_that_is_cut_is_asked_for_again(gateway, client):
    gateway.faults = [sent("cut"), sent("cut"), sent("plain")]
    assert client.get("a", include="arrays").arrays.trajectory() == LARGE


@pytest.mark.parametrize(
    ("way", "timeout", "name"),
    [("cut", 30.0, "RemoteProtocolError: peer closed connection"), ("stall", 0.3, "ReadTimeout")],
)
def test_a_fault_within_an_answer_is_named_as_httpx_names_it(gateway, way, timeout, name):
    gateway.faults = [sent(way)]
    began = time.monotonic()
    with (
        Client(gateway.url, retry_for=0.0, timeout=timeout) as client,
        pytest.raises(Unavailable, match=name),
    ):
        client.get("a", include="arrays")
    assert time.monotonic() - began < STALL_S
