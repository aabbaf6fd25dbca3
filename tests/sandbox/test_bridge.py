"""The way out of a sandbox: programs inside, a server outside, and what breaks between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from sandbox import connection
from sandbox.client import ExecResult, SandboxClient
from sandbox.errors import SandboxRequestError, SandboxTaken
from sandbox.host_client import HostClient
from sandbox.server import wire
from sandbox.spec import SandboxInfo, SandboxSpec
from sandbox.tunnel import Tunnel
from tests.helpers.sandboxes import server_modules
from tests.sandbox.conftest import run, sandbox_on

anywhere = sandbox_on("apptainer", "bubblewrap", "local-unsafe")
box = sandbox_on("apptainer")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PRELUDE = """
import hashlib, http.client, json, socket, sys, threading, time, urllib.request
PORT = int(sys.argv[1])
URL = "http://127.0.0.1:%d" % PORT
def post(path="/", body=b"x", headers={}, timeout=100):
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=timeout)
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers
def until(status, body=b"x"):
    # until the answer is this one
    end = time.monotonic() + 30
    while time.monotonic() < end:
        answer = post(body=body)
        if answer[0] == status: return answer
        time.sleep(0.1)
"""


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


class Outside:
    """A server outside; `calls` are the requests that it got, each (id, try, headers)."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.calls: list[tuple[str, int, dict[str, str]]] = []
        self._port = 0
        self._runner: web.AppRunner | None = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        names = request.headers.getall("X-Rollout-Call"), request.headers.getall("X-Rollout-Try")
        assert all(len(values) == 1 for values in names)
        self.calls.append((names[0][0], int(names[1][0]), dict(request.headers)))
        return await self.handler(request)

    async def begin(self) -> int:
        """Listen, always on the same port."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self._port

    async def end(self) -> None:
        """Close all connections and the port."""
        assert self._runner is not None
        await self._runner.cleanup()


@contextlib.asynccontextmanager
async def outside(handler: Handler = _echo) -> AsyncIterator[tuple[Outside, int]]:
    """A server, and the port on which it listens."""
    server = Outside(handler)
    port = await server.begin()
    try:
        yield server, port
    finally:
        await server.end()


async def program(info: SandboxInfo, port: int, text: str, timeout: float = 60) -> ExecResult:
    """What a program inside says that reaches the way out at `port`."""
    async with SandboxClient(info.socket) as client:
        script = PRELUDE + textwrap.dedent(text)
        return await client.exec(["python3", "-c", script, str(port)], timeout, max_output_chars=1 << 20)


async def told(info: SandboxInfo, port: int, text: str, timeout: float = 60) -> list:
    """The lines of JSON that a program printed, which must have ended well."""
    result = await program(info, port, text, timeout)
    assert result.exit_code == 0, result
    return [json.loads(line) for line in result.stdout.splitlines()]


def led(info: SandboxInfo, text: str, handler: Handler = _echo, timeout: float = 60) -> tuple[list, list]:
    """What a program inside told, and the calls that the server outside got."""

    async def scenario() -> tuple[list, list]:
        async with outside(handler) as (server, port), Tunnel(info.socket, "127.0.0.1", port) as tunnel:
            return await told(info, tunnel.port, text, timeout), server.calls

    return run(scenario())


# -- what is led out ------------------------------------------------------------------------------


def test_a_request_is_answered_by_the_server_outside(anywhere):
    async def answer(request: web.Request) -> web.Response:
        body = await request.text()
        return web.json_response([request.method, request.path_qs, body, request.headers["Authorization"]])

    text = """
    request = urllib.request.Request(URL + "/v1/x?y=z", b"hi", {"Authorization": "Bearer k"})
    print(urllib.request.urlopen(request).read().decode())
    print(urllib.request.urlopen(urllib.request.Request(URL, headers={"Authorization": ""})).read().decode())
    """
    (first, second), calls = led(anywhere, text, answer)
    assert first == ["POST", "/v1/x?y=z", "hi", "Bearer k"]
    assert second == ["GET", "/", "", ""]
    assert [number for _, number, _ in calls] == [1, 1]
    assert calls[0][0] != calls[1][0]
    assert calls[0][2]["Connection"] == "close"


def test_an_answer_streams_as_it_is_made(box):
    """Each piece is written when the program has said that it read the one before."""
    heard = asyncio.Queue()

    async def piece_by_piece(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            await heard.put(await request.text())
            return web.Response()
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(20):
            await response.write(b"%d\n" % number)
            assert await asyncio.wait_for(heard.get(), 10) == str(number)
        return response

    text = """
    for line in urllib.request.urlopen(URL):
        post(body=line.strip())
        print(int(line))
    """
    assert led(box, text, piece_by_piece)[0] == list(range(20))


def test_chunks_go_out_with_a_length(box):
    text = """
    print(json.dumps(len(post(body=(b"x" * n for n in (1, 70000, 5, 200000)))[1])))
    print(json.dumps(len(post(body=iter(()))[1])))
    """
    told, calls = led(box, text)
    assert told == [270006, 0]
    assert [headers["Content-Length"] for _, _, headers in calls] == ["270006", "0"]
    assert not any("Transfer-Encoding" in headers for _, _, headers in calls)


def test_twenty_megabytes_go_out_and_come_back(box):
    text = """
    import os
    body = os.urandom(20 << 20)
    print(json.dumps(post(body=body)[1] == body))
    """
    assert led(box, text)[0] == [True]


def test_two_hundred_calls_at_once_are_served(box):
    arrived = 0
    everybody = asyncio.Event()

    async def wait_for_all(request: web.Request) -> web.Response:
        nonlocal arrived
        arrived += 1
        if arrived == 200:
            everybody.set()
        await everybody.wait()
        return await _echo(request)

    text = """
    told = []
    def call(number):
        told.append((number, int(post(body=b"%d" % number)[1])))
    threads = [threading.Thread(target=call, args=(number,)) for number in range(200)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(json.dumps(sorted(told)))
    """
    (answers,), calls = led(box, text, wait_for_all)
    assert answers == [[number, number] for number in range(200)]
    assert len({call for call, _, _ in calls}) == len(calls) == 200


def test_an_upgrade_is_led_out_as_any_request_and_upgrades_nothing(box):
    text = """
    print(json.dumps(post(headers={"Upgrade": "websocket", "Connection": "Upgrade"})[0]))
    """
    (status,), ((_, _, headers),) = led(box, text)
    assert status == 200
    assert headers["Connection"] == "close"


def test_a_body_is_asked_for_where_the_program_expects_that(box):
    text = """
    import re
    line = socket.create_connection(("127.0.0.1", PORT))
    line.sendall(b"POST / HTTP/1.1\\r\\nHost: h\\r\\nExpect: 100-continue\\r\\nContent-Length: 2\\r\\n\\r\\n")
    first = line.recv(1000)
    line.sendall(b"hi")
    rest = b""
    while data := line.recv(1000): rest += data
    print(json.dumps([first.decode(), rest[:15].decode(), rest[-2:].decode()]))
    """
    (words,), _ = led(box, text)
    assert words == ["HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 200 OK", "hi"]


# -- what is not ----------------------------------------------------------------------------------


def test_nothing_else_can_be_reached(box):
    async def scenario() -> list:
        async with outside() as (_, port), Tunnel(box.socket, "127.0.0.1", port) as tunnel:
            with socket.create_server(("127.0.0.1", 0)) as other:
                text = f"""
                for place in ("127.0.0.1", {port}), ("127.0.0.1", {other.getsockname()[1]}), ("10.0.0.1", 80):
                    try:
                        socket.create_connection(place, 5)
                        print(json.dumps("reached"))
                    except OSError as error:
                        print(json.dumps(error.strerror))
                """
                return await told(box, tunnel.port, text)

    assert run(scenario()) == ["Connection refused", "Connection refused", "Network is unreachable"]


def test_headers_of_ours_are_not_the_programs_to_write(box):
    text = """
    forged = {"x-rollout-CALL": "mine", "X-Rollout-Try": "7", "Connection": "keep-alive", "TE": "trailers"}
    print(json.dumps(post(headers={**forged, "X-Rollout": "kept"})[0]))
    """
    (status,), ((call, number, headers),) = led(box, text)
    assert status == 200
    assert (len(call), number, headers["X-Rollout"]) == (32, 1, "kept")
    assert "TE" not in headers


def test_what_is_not_plain_http_is_refused_inside(box):
    text = r"""
    def raw(text):
        line = socket.create_connection(("127.0.0.1", PORT))
        line.sendall(text)
        answer = b""
        while data := line.recv(1000): answer += data
        return int(answer.split()[1])
    post, end = b"POST / HTTP/1.1\r\n", b"\r\n\r\n"
    for request in (
        b"nonsense" + end,
        post + b"X-Rollout-Call : mine" + end,
        post + b"A: b\r\n X-Rollout-Call: mine" + end,
        post + b"A: b\nX-Rollout-Call: mine" + end,
        post + b"Content-Length: 1\r\nContent-Length: 2" + end,
        post + b"Content-Length: 1\r\nTransfer-Encoding: chunked" + end,
        post + b"Transfer-Encoding: gzip, chunked" + end,
        post + b"Content-Length: -1" + end,
        post + b"Transfer-Encoding: chunked" + end + b"+1\r\nx\r\n0\r\n\r\n",
        post + b"Transfer-Encoding: chunked" + end + b"1\r\nxy\r\n0\r\n\r\n",
        post + b"A: " + b"x" * 70000 + end,
        post + b"Content-Length: 99999999999" + end,
    ):
        print(raw(request))
    """
    statuses, calls = led(box, text)
    assert statuses == [400] * 10 + [431, 413]
    assert calls == []


def test_a_body_of_seventy_megabytes_is_refused_inside(box):
    text = """
    body = b"x" * (70 << 20)
    print(json.dumps([post(body=body)[0], post(body=iter([body[:1 << 20]] * 70))[0]]))
    print(json.dumps(json.loads(post(body=body)[1])["error"]["type"]))
    """
    (statuses, kind), calls = led(box, text)
    assert statuses == [413, 413]
    assert kind == "refused_in_sandbox"
    assert calls == []


def test_of_too_many_calls_some_are_told_to_come_back(box):
    text = """
    lines = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(256)]
    print(json.dumps(until(503)[2]["Retry-After"]))
    for line in lines: line.close()
    print(until(200)[0])
    """
    assert led(box, text)[0] == ["1", 200]


def test_bodies_are_bounded_all_together_and_room_comes_back(box):
    text = """
    head = b"POST / HTTP/1.1\\r\\nContent-Length: %d\\r\\n\\r\\n" % (64 << 20)
    lines = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(2)]
    for line in lines: line.sendall(head + b"x" * (63 << 20))
    # Else it may be the second of them that is refused.
    queues = lambda: {row.split()[4] for row in [*open("/proc/net/tcp")][1:]}
    while queues() != {"00000000:00000000"}: time.sleep(0.1)
    print(until(503, b"x" * (3 << 20))[0])
    for line in lines: line.close()
    print(until(200, b"x" * (3 << 20))[0])
    """
    assert led(box, text)[0] == [503, 200]


def test_an_answer_that_does_not_wait_for_the_body_comes_through(box):
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401)

    statuses, calls = led(box, "print(post(body=b'x' * (20 << 20))[0])", refuse)
    assert statuses == [401]
    assert len(calls) == 1


# -- what breaks ----------------------------------------------------------------------------------


def test_a_connection_that_breaks_before_the_answer_costs_the_program_nothing(box):
    async def answer_the_third(request: web.Request) -> web.Response:
        body = await request.read()
        if int(request.headers["X-Rollout-Try"]) < 3:
            request.transport.abort()
        return web.Response(body=body)

    (told,), calls = led(box, "print(json.dumps([post(body=b'once')[1].decode()]))", answer_the_third)
    assert told == ["once"]
    assert [number for _, number, _ in calls] == [1, 2, 3]
    assert len({call for call, _, _ in calls}) == 1


def test_a_server_that_comes_back_answers_what_was_asked_meanwhile(box, monkeypatch):
    tries, lead = [], Tunnel._pass
    monkeypatch.setattr(Tunnel, "_pass", lambda *line: tries.append(line) or lead(*line))

    async def scenario() -> tuple[list, list]:
        async with outside() as (server, port), Tunnel(box.socket, "127.0.0.1", port) as tunnel:
            await server.end()
            asked = asyncio.create_task(told(box, tunnel.port, "print(post()[0])"))
            while len(tries) < 3:
                await asyncio.sleep(0.01)
            await server.begin()
            return await asked, server.calls

    answer, calls = run(scenario())
    assert answer == [200]
    assert len(calls) == 1
    assert calls[0][1] > 2


def test_it_is_known_outside_that_a_program_was_not_answered(box):
    async def scenario() -> list[tuple[int, bool]]:
        async with outside() as (server, port), Tunnel(box.socket, "127.0.0.1", port) as tunnel:
            assert await told(box, tunnel.port, "print(post()[0])") == [200]
            known = [await tunnel.led()]
            await server.end()
            # The program loses its patience before the bridge does.
            asked = "try: post(timeout=1)\nexcept TimeoutError: print(1)"
            assert await told(box, tunnel.port, asked) == [1]
            known.append(await tunnel.led())
            await server.begin()
            assert await told(box, tunnel.port, "print(post()[0])") == [200]
            return [*known, await tunnel.led()]

    (before, *_), *_ = known = run(scenario())
    assert known == [(before, False), (before, True), (before, False)]


def test_an_answer_that_breaks_off_is_broken_for_the_program_and_not_asked_again(box):
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        if len(whole.calls) == 1:
            await asyncio.sleep(0.2)
            request.transport.abort()
        return response

    async def scenario() -> tuple[list, list]:
        nonlocal whole
        async with outside(break_off) as (whole, port), Tunnel(box.socket, "127.0.0.1", port) as tunnel:
            return await told(box, tunnel.port, text), whole.calls

    whole: Outside
    text = """
    for _ in range(2):
        try:
            print(json.dumps(post()[1].decode()))
        except http.client.IncompleteRead as error:
            print(json.dumps(["broken", error.partial.decode()]))
    """
    answers, calls = run(scenario())
    assert answers == [["broken", "half"], "half"]
    assert [number for _, number, _ in calls] == [1, 1]
    assert calls[0][0] != calls[1][0]


TUNNEL = """
import asyncio, sys
from sandbox.tunnel import Tunnel
async def lead():
    async with Tunnel(sys.argv[1], "127.0.0.1", int(sys.argv[2])) as tunnel:
        print(tunnel.port, flush=True)
        await tunnel.gone.wait()
asyncio.run(lead())
"""


@contextlib.asynccontextmanager
async def tunnel_process(
    info: SandboxInfo, port: int
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A tunnel in a process of its own, and the port inside."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TUNNEL, info.socket, str(port)), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process, int(await process.stdout.readline())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def replaced(info: SandboxInfo, number: signal.Signals) -> tuple[list, list, bool]:
    """What is told and got when a tunnel's process gets a signal in mid-call, and another one comes."""
    first = asyncio.Event()

    async def second_time(request: web.Request) -> web.Response:
        if request.headers["X-Rollout-Try"] == "1":
            first.set()
            await asyncio.sleep(60)
        return await _echo(request)

    async def scenario() -> tuple[list, list, bool]:
        async with outside(second_time) as (server, port), tunnel_process(info, port) as (process, inside):
            asked = asyncio.create_task(told(info, inside, "print(post()[0])"))
            await first.wait()
            process.send_signal(number)
            await asyncio.sleep(0.5)
            async with Tunnel(info.socket, "127.0.0.1", port) as tunnel:
                assert tunnel.port == inside
                answer = await asyncio.wait_for(asked, 20)
                process.send_signal(signal.SIGCONT) if number == signal.SIGSTOP else None
                await asyncio.wait_for(process.wait(), 20)
                return answer, server.calls, tunnel.gone.is_set()

    return run(scenario())


def test_a_call_goes_on_through_the_tunnel_of_another_process(box):
    for number in (signal.SIGKILL, signal.SIGSTOP):
        answer, calls, gone = replaced(box, number)
        assert answer == [200]
        assert len(calls) == 2 and calls[0][1] == 1 < calls[1][1]
        assert calls[0][0] == calls[1][0]
        assert not gone


def test_a_tunnel_that_another_one_followed_ends(box):
    async def scenario() -> list:
        async with (
            outside() as (_, port),
            Tunnel(box.socket, "127.0.0.1", port) as old,
            Tunnel(box.socket, "127.0.0.1", port) as new,
        ):
            await asyncio.wait_for(old.gone.wait(), 20)
            return await told(box, new.port, "print(post(timeout=20)[0])")

    assert run(scenario()) == [200]


def test_a_tunnel_ends_with_its_sandbox(shared_state):
    async def scenario() -> None:
        host = HostClient(shared_state)
        info = await host.start(SandboxSpec(runtime="local-unsafe"))
        async with Tunnel(info.socket, "127.0.0.1", 9) as tunnel:
            assert await host.release(info.id)
            await asyncio.wait_for(tunnel.gone.wait(), 10)

    run(scenario())


def test_a_second_port_is_refused_and_the_same_one_is_given_again(box):
    async def scenario() -> None:
        ask = partial(connection.exchange, box.socket, timeout=10)
        first = await ask({"op": "listen", "port": 0})
        assert (await ask({"op": "listen", "port": first["port"]}))["port"] == first["port"]
        with pytest.raises(SandboxRequestError, match=f"listens on {first['port']} already"):
            await ask({"op": "listen", "port": 1 + first["port"]})
        with pytest.raises(SandboxTaken):
            await ask({"op": "accept", "turn": first["turn"]})

    run(scenario())


def test_a_program_that_goes_away_takes_its_call_back_at_once(box):
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        if request.method == "POST":
            await {"/began": began, "/ended": ended}[request.path].wait()
            return web.Response()
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.set()
            raise
        return web.Response()

    text = """
    line = socket.create_connection(("127.0.0.1", PORT))
    line.sendall(b"GET / HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n")
    post("/began")
    line.close()
    print(post("/ended", timeout=20)[0])
    """
    assert led(box, text, wait)[0] == [200]


def test_a_program_that_never_reads_holds_its_own_call_alone(box):
    written = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal written
        if request.path != "/flood":
            return await _echo(request)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x" * (1 << 20))
            written += 1
        return response

    text = """
    lines = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(3)]
    for line in lines: line.sendall(b"GET /flood HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n")
    time.sleep(1)
    print(json.dumps([post()[0] for _ in range(20)]))
    """
    (statuses,), _ = led(box, text, flood)
    assert statuses == [200] * 20
    assert written < 100  # MiB, of three


def test_the_way_out_goes_on_across_programs_and_resets(box):
    async def scenario() -> list:
        async with outside() as (_, port), Tunnel(box.socket, "127.0.0.1", port) as tunnel:
            answers = await told(box, tunnel.port, "print(post()[0])")
            async with SandboxClient(box.socket) as client:
                await client.reset()
                command = f"python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:{tunnel.port}\").status)'"
                answers.append(int((await client.bash(command)).output))
            return answers + await told(box, tunnel.port, "print(post()[0])")

    assert run(scenario()) == [200, 200, 200]


# -- patience, of a bridge in this process ---------------------------------------------------------


@pytest.fixture
def bridge(monkeypatch) -> Iterator[Callable[..., tuple[int, Callable[[], socket.socket]]]]:
    """Begins a bridge with other constants: its port, and a function that opens a line to it."""
    lines: list[socket.socket] = []

    def begin(**constants: float) -> tuple[int, Callable[[], socket.socket]]:
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)
        bridge = module.Bridge(0)
        told = bridge.op_listen({"port": 0}, None)

        def line() -> socket.socket:
            ours, theirs = socket.socketpair()
            ours.settimeout(10)
            lines.append(ours)
            bridge.op_accept({"turn": told["turn"]}, theirs)
            return ours

        begin.led = lambda: bridge.op_led({}, None)
        return told["port"], line

    with server_modules("bridge") as (module,):
        yield begin
    for line in lines:
        line.close()


def asking(port: int, text: bytes = b"GET / HTTP/1.1\r\n\r\n") -> socket.socket:
    """A program's connection on which that much was sent."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(10)
    connection.sendall(text)
    return connection


def test_a_request_that_does_not_come_whole_is_given_up(bridge):
    port, _ = bridge(REQUEST_S=0.3)
    for part in (b"", b"GET /", b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nx"):
        with asking(port, part) as program:
            assert program.recv(100) == b""


def test_a_request_that_nobody_takes_is_told_to_come_back(bridge):
    port, _ = bridge(HOLD_S=0.3)
    with asking(port) as program:
        answer = program.recv(1000)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1\r\n" in answer
    assert bridge.led() == {"unanswered": 1, "cut_off": True}


def test_a_request_that_breaks_every_line_is_not_sent_for_ever(bridge):
    port, line = bridge(TRIES=3)
    with asking(port) as program:
        for number in (1, 2, 3):
            with line() as outside:
                assert wire.receive(outside)["result"]["try"] == number
        assert program.recv(1000).startswith(b"HTTP/1.1 503 ")


def test_lines_that_broke_while_they_waited_cost_a_request_nothing(bridge):
    port, line = bridge()
    for _ in range(3):
        line().close()
    with line() as outside, asking(port) as program:
        assert wire.receive(outside)["ok"]
        outside.sendall(b"answer")
        assert program.recv(100) == b"answer"


def test_a_program_that_leaves_with_its_answer_was_answered(bridge):
    port, line = bridge(PAUSES_S=(0.001, 0.001))
    line().close()
    with line() as outside:
        with asking(port) as program:
            assert wire.receive(outside)["ok"]
            assert bridge.led()["cut_off"]
            outside.sendall(b"answer")
            assert program.recv(100) == b"answer"
        while outside.recv(1000):
            pass  # until the line is closed
        assert not bridge.led()["cut_off"]


def test_an_answer_that_is_not_read_is_given_up_with_its_line(bridge):
    port, line = bridge(UNREAD_S=0.3)
    with line() as outside, asking(port):
        assert wire.receive(outside)["ok"]
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                outside.sendall(b"x" * (1 << 20))


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_of_calls(bridge):
    port, line = bridge(PAUSES_S=(0.001, 0.001))
    before = descriptors()
    for _ in range(50):
        line().close()
        with line() as outside, asking(port, b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi") as program:
            assert wire.receive(outside)["ok"]
            outside.sendall(b"answer")
            assert program.recv(100) == b"answer"
    deadline = time.monotonic() + 10
    while descriptors() > before:
        assert time.monotonic() < deadline, descriptors() - before
        time.sleep(0.05)


def test_connections_beyond_the_bounds_take_no_descriptors(bridge):
    port, _ = bridge(MOST_CALLS=4, MOST_REFUSED=2, LINGER_S=0.5)
    before = descriptors()
    programs = [asking(port, b"") for _ in range(60)]
    time.sleep(0.3)
    assert before + 60 < descriptors() <= before + 60 + 6
    for program in programs:
        program.close()
