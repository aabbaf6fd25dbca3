"""Large answers: whole over every kind of connection, and their faults are those of httpx."""

from __future__ import annotations

import asyncio
import gzip
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rollout import arrays
from rollout.client import AsyncClient, Client, Unavailable
from rollout.schema import Rollout, RolloutRequest, State
from rollout.trajectory import Chain, Segment, Trajectory

STALL_S = 5.0


def trajectory(tokens: int) -> Trajectory:
    chance, chain = random.Random(tokens), Chain()
    chain.append(Segment(role="user", token_ids=[1, 2]))
    ids = [chance.randrange(2**31) for _ in range(tokens)]
    chain.append(
        Segment(
            role="assistant", token_ids=ids, sampled=True, logprobs=[-chance.random() for _ in range(tokens)]
        )
    )
    return Trajectory(chains=[chain])


def answer_with(left: Trajectory) -> bytes:
    now = time.time()
    rollout = Rollout(
        id="a",
        group_id="a",
        index=0,
        handler="h",
        state=State.COMPLETED,
        attempt=1,
        request=RolloutRequest(handler="h"),
        created_at=now,
        updated_at=now,
        deadline_at=now + 60,
    )
    record = arrays.encode(left)
    return b"".join(arrays.PackedAnswer(rollout.model_dump_json(), {"a": len(record)}, [record]))


LARGE = trajectory(150_000)


class Sender:
    """Answers each request with the next of `ways`, the last one for good; counts connections."""

    def __init__(self) -> None:
        self.body = answer_with(LARGE)
        self.ways = ["plain"]
        self.connections = 0
        sender = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                sender.connections += 1

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                sender.send(self, sender.ways.pop(0) if len(sender.ways) > 1 else sender.ways[0])

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def send(self, handler: BaseHTTPRequestHandler, way: str) -> None:
        body = gzip.compress(self.body, 0) if way == "gzip" else self.body
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
            handler.wfile.write(body[: len(body) // 2])
            handler.close_connection = True
            time.sleep(STALL_S if way == "stall" else 0.0)
            return
        handler.wfile.write(body)


@pytest.fixture
def sender():
    found = Sender()
    yield found
    found.server.shutdown()
    found.server.server_close()


def fetch(sender: Sender, kind: type, times: int = 1, **options) -> list[Rollout]:
    if kind is Client:
        with Client(sender.url, **options) as client:
            return [client.get("a", include="arrays") for _ in range(times)]

    async def run() -> list[Rollout]:
        async with AsyncClient(sender.url, **options) as client:
            return [await client.get("a", include="arrays") for _ in range(times)]

    return asyncio.run(run())


BOTH = pytest.mark.parametrize("kind", [Client, AsyncClient])


@BOTH
@pytest.mark.parametrize("way", ["plain", "chunked", "gzip"])
def test_a_large_answer_is_whole_however_it_comes(sender, kind, way):
    sender.ways = [way]
    for found in fetch(sender, kind, times=3):
        assert found.arrays.trajectory() == LARGE
    assert sender.connections == 1, "they go over one connection"


@BOTH
def test_an_answer_that_is_cut_is_asked_for_again(sender, kind):
    sender.ways = ["cut", "cut", "plain"]
    assert fetch(sender, kind)[0].arrays.trajectory() == LARGE


@BOTH
@pytest.mark.parametrize("way", ["cut", "stall"])
def test_a_fault_within_an_answer_is_named_as_httpx_names_it(sender, kind, way):
    sender.ways = [way]
    name = "RemoteProtocolError: peer closed connection" if way == "cut" else "ReadTimeout"
    began = time.monotonic()
    with pytest.raises(Unavailable, match=name):
        fetch(sender, kind, retry_for=0.0, timeout=0.3)
    assert time.monotonic() - began < STALL_S
