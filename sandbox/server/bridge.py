"""The way out: what programs inside say in HTTP to a port of the loopback, led out by the server's socket.

`listen` opens the port. `accept` gives a connection of its own, a line, on which one whole request goes out
and its answer comes in as it is made; then both are closed. Until a byte of the answer was passed on, a line
that breaks costs nothing: the same request goes out on the next one, under the same id. Afterwards it is the
program that has to ask again. A program that closes, also only its sending side, takes its request back.

All is done by one thread with an event loop, for threads would count as the agent's processes. This module is
imported with the first `listen`, because asyncio takes as long as some commands do.
"""

import asyncio
import binascii
import collections
import contextlib
import itertools
import json
import os
import re
import socket
import threading

import wire
from errors import RequestError, Taken

HEAD_BYTES = 64 << 10
BODY_BYTES = 64 << 20
HELD_BYTES = 128 << 20
"""All bodies together; they are kept until an answer begins."""
PIECE_BYTES = 64 << 10
MOST_CALLS = 256
MOST_REFUSED = 32
"""Connections beyond `MOST_CALLS` that are told so at a time. Further ones wait in the kernel: if they could
use up our descriptors, a program could end the server.
"""
REQUEST_S = 60.0
"""For a whole request to come."""
HOLD_S = 120.0
"""For which a request may wait for lines, all waits together: a worker that is lost is replaced meanwhile."""
PAUSES_S = (0.05, 2.0)
"""Before a request goes out again: at first and at most; doubled each time."""
UNREAD_S = 300.0
"""For which a program may leave its answer unread."""
LINGER_S = 10.0
"""For a program that is refused to stop sending and read why; closed at once, it would read nothing."""

FIRST_LINE = re.compile(rb"[!-~]+ [!-~\x80-\xff]+ HTTP/1\.[01]")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)")
OURS = {b"connection", b"keep-alive", b"proxy-connection", b"x-rollout-call", b"x-rollout-try", b"expect"}
OURS |= {b"te", b"trailer", b"transfer-encoding", b"content-length"}
"""Headers that are not led out; some are written anew."""
REASONS = {
    400: ("Bad Request", "invalid_request_error"),
    408: ("Request Timeout", "timeout_error"),
    413: ("Content Too Large", "request_too_large"),
    431: ("Request Header Fields Too Large", "request_too_large"),
    503: ("Service Unavailable", "overloaded_error"),
}


class Refusal(Exception):
    """What the bridge answers itself: a status of REASONS, and why."""

    def __init__(self, status, message):
        super().__init__(message)
        reason, kind = REASONS[status]
        # As all the vendors' programs read it.
        body = json.dumps({"type": "error", "error": {"type": kind, "message": message}})
        head = (
            "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n"
        )
        retry = "Retry-After: 1\r\n" if status == 503 else ""
        self.answer = ((head % (status, reason, len(body))) + retry + "\r\n" + body).encode()


class Bridge:
    """One port, the lines that wait for requests, and the requests that wait for lines.

    What begins with `op_` runs in the threads of connections, all else in the loop's.
    """

    def __init__(self):
        self._listening = threading.Lock()
        self._loop = None
        self._port = None
        self._turn = 0
        self._lines = []  # that wait; each a reader and a writer
        self._used = set()
        self._wanted = collections.deque()  # futures of requests that wait
        self._calls = 0
        self._held_bytes = 0

    def op_listen(self, request, connection):
        """Open the port, once a sandbox, and have the caller lead out from now on: lines of earlier ones are
        closed, for a worker that was taken over may be stopped and hold them for ever.
        """
        port = int(request["port"])
        with self._listening:
            if self._port is None:
                listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                try:
                    listener.bind(("127.0.0.1", port))
                    listener.listen(MOST_CALLS)
                except BaseException:
                    listener.close()
                    raise
                listener.setblocking(False)
                self._port = listener.getsockname()[1]
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(listener,), daemon=True).start()
            elif port not in (0, self._port):
                raise RequestError("port is %d; the sandbox listens on %d already" % (port, self._port))
            self._turn += 1
            self._loop.call_soon_threadsafe(self._close_lines)
            return {"port": self._port, "turn": self._turn}

    def op_accept(self, request, connection):
        """Take the connection over as a line. It is answered with a request's `call` and `try`."""
        turn = int(request["turn"])
        self._check(turn)
        line = socket.socket(fileno=connection.detach())
        asyncio.run_coroutine_threadsafe(self._add(line, turn), self._loop)

    def _check(self, turn):
        if turn != self._turn:
            raise Taken("another worker leads the sandbox's requests out since")

    # -- lines ----------------------------------------------

    def _close_lines(self):
        for _, writer in [*self._lines, *self._used]:
            writer.transport.abort()

    async def _add(self, line, turn):
        reader, writer = await asyncio.open_connection(sock=line)
        if turn != self._turn:
            writer.transport.abort()
            return
        self._lines.append((reader, writer))
        self._match()

    def _match(self):
        """Give lines to requests."""
        for reader, writer in self._lines:
            if reader.at_eof() or reader.exception():
                writer.transport.abort()
        self._lines = [line for line in self._lines if not line[1].transport.is_closing()]
        while self._lines and self._wanted:
            wanted = self._wanted.popleft()
            if not wanted.done():
                wanted.set_result(self._lines.pop(0))

    async def _line(self, wait_s):
        """The next line. Raises Refusal."""
        wanted = self._loop.create_future()
        self._wanted.append(wanted)
        self._match()
        try:
            await asyncio.wait([wanted], timeout=wait_s)
        except asyncio.CancelledError:
            if not wanted.cancel():
                wanted.result()[1].transport.abort()
            raise
        if wanted.cancel():
            raise Refusal(503, "nobody outside of the sandbox took the request for %d s" % HOLD_S)
        return wanted.result()

    # -- programs ----------------------------------------------

    def _run(self, listener):
        asyncio.set_event_loop(self._loop)  # before Python 3.10 some of asyncio looks for it there
        self._loop.run_until_complete(self._serve(listener))

    async def _serve(self, listener):
        tasks = set()
        while True:
            if len(tasks) >= MOST_CALLS + MOST_REFUSED:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks = {task for task in tasks if not task.done()}
            try:
                program, _ = await self._loop.sock_accept(listener)
            except OSError:  # it has gone again, or there are no descriptors
                await asyncio.sleep(PAUSES_S[0])
                continue
            tasks.add(self._loop.create_task(self._attend(program)))

    async def _attend(self, program):
        """All that is done for one connection of a program."""
        reader, writer = await asyncio.open_connection(sock=program, limit=HEAD_BYTES)
        writer.transport.set_write_buffer_limits(0)  # what is drained has left us
        body = bytearray()
        self._calls += 1
        try:
            if self._calls > MOST_CALLS:
                raise Refusal(503, "more than %d calls at once" % MOST_CALLS)
            head = await asyncio.wait_for(self._read(reader, writer, body), REQUEST_S)
            await _first_of(self._lead_out(head, body, writer), _discard(reader))
        except Refusal as refusal:
            await _first_of(_refuse(writer, refusal, reader), asyncio.sleep(LINGER_S))
        except asyncio.TimeoutError:
            refusal = Refusal(408, "the request did not come within %d s" % REQUEST_S)
            await _first_of(_refuse(writer, refusal, reader), asyncio.sleep(LINGER_S))
        except (OSError, EOFError):
            pass  # the program is gone
        finally:
            self._calls -= 1
            self._forget(body)
            writer.transport.abort()

    def _forget(self, body):
        self._held_bytes -= len(body)
        del body[:]

    async def _read(self, reader, writer, body):
        """A request's head, as it goes out but for the end, and its `body`. Raises Refusal."""
        try:
            text = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise Refusal(431, "a head of more than %d bytes" % HEAD_BYTES)
        first, *lines = text[:-4].split(b"\r\n")
        headers = [HEADER.fullmatch(line) for line in lines]
        if not FIRST_LINE.fullmatch(first) or not all(headers):
            raise Refusal(400, "the request's head is not HTTP/1.1")
        headers = [(header[1].lower(), header[0], header[2].strip(b" \t")) for header in headers]
        sizes, codings, expected = (
            [value.lower() for name, _, value in headers if name == wanted]
            for wanted in (b"content-length", b"transfer-encoding", b"expect")
        )
        if len(sizes) + len(codings) > 1 or codings not in ([], [b"chunked"]):
            raise Refusal(400, "the body's length is told twice, or in a way that is not known here")
        size = _number(sizes[0], rb"[0-9]{1,18}", 10) if sizes else 0
        if size > BODY_BYTES:
            raise Refusal(413, "a body of %d bytes; at most %d are led out" % (size, BODY_BYTES))
        if b"100-continue" in expected:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await self._read_body(reader, body, size)
        if codings:
            await self._read_chunks(reader, body)
        kept = [first, *(line for name, line, _ in headers if name not in OURS)]
        if sizes or codings:
            kept.append(b"Content-Length: %d" % len(body))
        return b"\r\n".join(kept) + b"\r\nConnection: close\r\n"

    async def _read_body(self, reader, body, size):
        while size:
            data = await reader.read(min(size, PIECE_BYTES))
            if not data:
                raise EOFError
            if len(body) + len(data) > BODY_BYTES:
                raise Refusal(413, "a body of more than %d bytes" % BODY_BYTES)
            if self._held_bytes + len(data) > HELD_BYTES:
                raise Refusal(503, "more than %d bytes of requests at once" % HELD_BYTES)
            self._held_bytes += len(data)
            body += data
            size -= len(data)

    async def _read_chunks(self, reader, body):
        try:
            while True:
                line = await reader.readuntil(b"\r\n")
                size = _number(line.split(b";")[0].strip(), rb"[0-9A-Fa-f]{1,15}", 16)
                if not size:
                    break
                await self._read_body(reader, body, size)
                if await reader.readexactly(2) != b"\r\n":
                    raise Refusal(400, "a chunk is longer than its size")
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
        except asyncio.LimitOverrunError:
            raise Refusal(400, "a line between chunks of more than %d bytes" % HEAD_BYTES)

    async def _lead_out(self, head, body, program):
        """Send a request out until an answer begins, and pass that on. Raises Refusal."""
        call = binascii.hexlify(os.urandom(16)).decode()
        rest_s, (pause_s, most_s) = HOLD_S, PAUSES_S
        for number in itertools.count(1):
            began = self._loop.time()
            line = await self._line(rest_s)
            rest_s -= self._loop.time() - began + pause_s
            frame = wire.encode({"ok": True, "result": {"call": call, "try": number}})
            names = "X-Rollout-Call: %s\r\nX-Rollout-Try: %d\r\n\r\n" % (call, number)
            self._used.add(line)
            try:
                if await self._pass(frame + head + names.encode(), body, line, program):
                    return
            finally:
                self._used.discard(line)
                line[1].transport.abort()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)

    async def _pass(self, head, body, line, program):
        """Send a request out and its answer in; whether any of that was passed on."""
        reader, writer = line
        sending = self._loop.create_task(_send(writer, head, body))
        passed = False
        try:
            while True:
                data = await reader.read(PIECE_BYTES)
                if not data:
                    return passed
                passed = True
                program.write(data)
                if program.transport.get_write_buffer_size():
                    await asyncio.wait_for(program.drain(), UNREAD_S)
                if sending.done():
                    self._forget(body)
        except (OSError, asyncio.TimeoutError):
            return passed
        finally:
            sending.cancel()
            await asyncio.wait([sending])


async def _first_of(*coroutines):
    """Go on until one of them has ended, and raise what it raised but for a connection's end."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in done:
        with contextlib.suppress(OSError):
            task.result()


async def _send(writer, head, body):
    with contextlib.suppress(OSError):  # the line's end is seen by who reads it
        writer.write(head)
        for start in range(0, len(body), PIECE_BYTES):
            writer.write(bytes(body[start : start + PIECE_BYTES]))
            await writer.drain()


async def _refuse(writer, refusal, reader):
    writer.write(refusal.answer)
    await writer.drain()
    writer.write_eof()
    await _discard(reader)


async def _discard(reader):
    """Read to the end."""
    while await reader.read(PIECE_BYTES):
        pass


def _number(text, pattern, base):
    if not re.fullmatch(pattern, text):
        raise Refusal(400, "%r is no length" % text[:20])
    return int(text, base)
