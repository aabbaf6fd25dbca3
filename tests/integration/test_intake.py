"""Slow and half requests at a real gateway: what they get, and what they cost others."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection

import psutil
import pytest

from rollout.schema import RolloutRequest
from services.state import keys
from services.state.fleet import FleetStore
from tests.helpers.gateways import started_gateway
from tests.helpers.keys import HEADER, HEADERS, metric
from tests.helpers.live import Live
from tests.helpers.stack import Stack, free_port, healthy, wait_until
from tests.helpers.waiters import Waiters
from workers.handlers.noop import Noop

PATIENCE_S = 120.0
HEAD_S = 10.0
HALVES = {
    "line": b"GET /v1/sta",
    "head": b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
    "small body": b"POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 900\r\n\r\n{",
    "large body": b"POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    + HEADER.encode()
    + b"Content-Length: 9000000\r\n\r\n{",
}


CHUNKED = (
    b"POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Type: application/json\r\n" + HEADER.encode() + b"\r\n"
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """A gateway that knows a handler, and no worker."""
    directory = tmp_path_factory.mktemp("intake")
    with Stack(directory, directory / "sbx", {"ROLLOUT_HANDLERS": ""}) as stack:
        FleetStore(stack.redis.client).put_handlers([Noop().info()])
        yield stack


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


@contextmanager
def half_sent(port: int, count: int, what: bytes):
    with ExitStack() as open_ones:
        made = [open_ones.enter_context(connect(port)) for _ in range(count)]
        for connection in made:
            connection.sendall(what)
        yield made


def p99_s(url: str, count: int = 100) -> float:
    """Of honest callers, each call on a connection of its own, four at a time."""
    host = url.removeprefix("http://")

    def ask(_: int) -> float:
        began = time.perf_counter()
        with closing(HTTPConnection(host, timeout=PATIENCE_S)) as caller:
            caller.request("GET", "/v1/handlers", headers=HEADERS)
            assert caller.getresponse().status == 200
        return time.perf_counter() - began

    with ThreadPoolExecutor(4) as pool:
        return sorted(pool.map(ask, range(count)))[int(count * 0.99) - 1]


def answer(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    while more := connection.recv(1 << 16):
        data += more
    return data


def refused(url: str, reason: str) -> float:
    return metric(url, f'rollout_gateway_refused_total{{reason="{reason}"}}')


@pytest.mark.parametrize("kind", HALVES)
def test_half_sent_requests_cost_others_nothing(gateway, kind):
    alone = p99_s(gateway.url)
    for count in (64, 500):
        with half_sent(gateway.port, count, HALVES[kind]):
            beside = p99_s(gateway.url)
            worker = psutil.Process(gateway.gateway.pid).children()[0]
            print(f"{kind}: p99 {alone * 1e3:.1f} ms alone, {beside * 1e3:.1f} ms beside {count} of them")
            # With a thread for each of them it is their time limit, or for ever.
            assert beside < max(10 * alone, 2.0)
            assert worker.num_threads() < 100


def test_what_does_not_come_to_its_end_is_answered_and_closed(gateway):
    kinds = ("line", "head", "small body")
    before = refused(gateway.url, "slow")
    with ExitStack() as halves, ThreadPoolExecutor(len(kinds)) as threads:
        began = time.monotonic()
        connections = [halves.enter_context(half_sent(gateway.port, 1, HALVES[kind]))[0] for kind in kinds]
        for closed in threads.map(lambda connection: (answer(connection), time.monotonic()), connections):
            assert closed[0].startswith(b"HTTP/1.1 408 ")
            assert HEAD_S - 1 < closed[1] - began < HEAD_S + 10
    assert refused(gateway.url, "slow") == before + len(kinds)


def test_one_byte_a_second_does_not_make_it_last_longer(gateway):
    with connect(gateway.port) as connection:
        began, received = time.monotonic(), b""
        connection.settimeout(0.5)
        while not received and time.monotonic() - began < 3 * HEAD_S:
            connection.sendall(b"G")
            with suppress(TimeoutError):
                received = connection.recv(1000)
        assert received.startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < HEAD_S + 10


def test_a_large_body_without_a_key_is_refused_before_it_is_sent(gateway):
    half = HALVES["large body"].replace(HEADER.encode(), b"")
    with half_sent(gateway.port, 1, half) as (connection,):
        received = connection.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 401 ")
        # And what would be its body is no request.
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"HTTP/1.1" not in answer(connection)


def test_bodies_that_come_in_pieces_or_are_large_come_whole(gateway):
    body = json.dumps({"handler": "noop", "task": {"reward": 1.0}}).encode() + b" " * 60_000
    head = "POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + HEADER
    with connect(gateway.port) as connection:
        for request in (body, b'{"handler": "noop"}', body):
            connection.sendall(f"{head}Content-Length: {len(request)}\r\n\r\n".encode())
            for at in range(0, len(request), 7001):
                connection.sendall(request[at : at + 7001])
                time.sleep(0.01)
            received = b""
            while not received.rstrip().endswith(b"]}") and (data := connection.recv(1 << 16)):
                received += data
            assert received.startswith(b"HTTP/1.1 20"), received
    large = [RolloutRequest(handler="noop", metadata={"x": "y" * 10_000}) for _ in range(900)]
    assert len(gateway.client.submit(large)) == 900


def test_a_client_that_waits_to_be_told_to_send_its_body_is_told(gateway):
    body = json.dumps({"handler": "noop"}).encode() + b" " * 60_000
    head = "POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + HEADER
    with connect(gateway.port) as connection:
        connection.sendall(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        received = b""
        while b"HTTP/1.1 20" not in received:
            data = connection.recv(1 << 16)
            assert data, received
            received += data


def test_requests_sent_at_once_are_answered_one_after_the_other(gateway):
    one_request = f"GET /v1/handlers HTTP/1.1\r\nHost: 127.0.0.1\r\n{HEADER}"
    with connect(gateway.port) as connection:
        connection.sendall((f"{one_request}\r\n" * 20 + f"{one_request}Connection: close\r\n\r\n").encode())
        assert answer(connection).count(b"HTTP/1.1 200 ") == 21


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 40_000, b"431"),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(200)) + b"\r\n", b"431"),
        (b"\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"POST /v1/rollouts HTTP/1.1\r\nTransfer-Encoding: nope\r\n\r\n", b"501"),
        (
            b"POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n"
            b"Content-Type: application/json\r\n" + HEADER.encode() + b"\r\n",
            b"413",
        ),
        # However long it is, and whether or not it is one.
        *((CHUNKED + chunks, b"411") for chunks in (b"2\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\nno number\r\n")),
        (CHUNKED + b"5000\r\n" + b" " * 0x5000 + b"\r\n0\r\n\r\n", b"411"),
    ],
)
def test_what_is_too_large_or_has_no_length_is_refused_and_the_connection_closed(gateway, sent, status):
    with connect(gateway.port) as connection:
        connection.sendall(sent)
        received = answer(connection)
        assert received.startswith(b"HTTP/1.1 " + status), received
        assert received.count(b"HTTP/1.1 ") == 1
        head, _, body = received.partition(b"\r\n\r\n")
        assert b"Content-Type: application/problem+json" in head
        problem = json.loads(body)
        assert problem["status"] == int(status) and problem["title"] and problem["detail"]


def test_one_address_has_no_more_connections_than_it_may(gateway):
    env = {"ROLLOUT_GATEWAY_ADDRESS_CONNECTIONS": "20"}
    with started_gateway(gateway, "capped", free_port(), env) as process:
        port = int(process.url.rpartition(":")[2])
        with half_sent(port, 20, HALVES["line"]), connect(port) as more:
            assert answer(more) == b""
            with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.7", 0)) as neighbour:
                neighbour.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert neighbour.recv(1000).startswith(b"HTTP/1.1 200 ")
        # They count no more when they have gone.
        wait_until(lambda: healthy(process.url), PATIENCE_S, "an answer")
        assert refused(process.url, "address") >= 1


def test_500_long_polls_of_one_address_wait_beside_half_sent_requests(gateway):
    (new,) = gateway.client.submit([RolloutRequest(handler="noop")])
    paths = [f"/v1/rollouts/{new.id}?wait=50"] * 500
    alone = p99_s(gateway.url)
    with (
        half_sent(gateway.port, 64, HALVES["head"]),
        Waiters("127.0.0.1", gateway.port, paths) as waiters,
    ):
        wait_until(
            lambda: metric(gateway.url, "rollout_gateway_waiters") == 500, PATIENCE_S, "all of them to wait"
        )
        assert p99_s(gateway.url) < max(10 * alone, 2.0)
        gateway.client.cancel(new.id)
        assert waiters.read_answers(PATIENCE_S)
        assert waiters.statuses() == [200] * 500


def test_where_all_places_are_taken_the_half_sent_make_room(gateway):
    with half_sent(gateway.port, 1500, HALVES["line"]), ExitStack() as more:
        for number in range(1600):
            address = (f"127.0.1.{number % 200 + 1}", 0)
            made = socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S, source_address=address)
            more.enter_context(made).sendall(HALVES["line"])
        assert p99_s(gateway.url, 50) < 5.0
        assert refused(gateway.url, "full") > 0


def test_readers_of_streams_who_take_nothing_keep_no_thread_from_those_who_do(gateway):
    redis, lags, end = gateway.redis.client, [], 0
    names = [f"slow-{number}" for number in range(2)]
    for name in names:
        gateway.client.submit(RolloutRequest(handler="noop", id=name))
        redis.hset(keys.record(name), mapping={"state": "running", "attempt": 1})
    asks = f"GET /v1/live?rollout={names[0]} HTTP/1.1\r\nHost: 127.0.0.1\r\n{HEADER}\r\n".encode()
    with ExitStack() as opened:
        for _ in range(40):
            slow = opened.enter_context(socket.socket())
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", gateway.port))
            slow.sendall(asks)
        reader = opened.enter_context(Live(gateway.url, rollout=names[1]))
        reader.until("rollout")
        piece = {"operation": 1, "kind": "bash", "running": True}
        for number in range(80):
            flood = {"offset": end, "end": (end := end + 60_000), "text": "y" * 60_000}
            redis.publish(keys.live(names[0]), json.dumps(piece | flood))
            told = {"offset": number, "end": number + 1, "text": f"{time.time():.6f}\n"}
            redis.publish(keys.live(names[1]), json.dumps(piece | told))
            time.sleep(0.1)
        wait_until(lambda: reader.text().count("\n") >= 75, PATIENCE_S, "what was printed")
    for at, name, data in reader.events:
        lags += [at - float(line) for line in data["text"].splitlines()] if name == "output" else []
    assert max(lags) < 2.0, sorted(lags)[-5:]
