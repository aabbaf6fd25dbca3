"""The way out: what programs inside say in HTTP to a port of the loopback, led out by the server's socket.

`listen` opens the port. `accept` gives a connection, a line, on which one whole request goes out and its
answer comes in as it is made; then both are closed. Until a byte of the answer was passed on, a line that
breaks costs nothing: the same request goes out on the next one, under the same id. Afterwards it is the
program that has to ask again. A program that closes, also only its sending side, takes its request back.

One thread does all, for threads count as the agent's processes. It is imported with the first `listen`.
"""

import asyncio
import binascii
import contextlib
import json
import os
import re
import socket
import threading

import wire
from errors import RequestError, Taken

HEAD_BYTES, BODY_BYTES, PIECE_BYTES = 64 << 10, 64 << 20, 64 << 10
HELD_BYTES = 128 << 20  # all bodies together; each is kept until its answer begins
MOST_CALLS, MOST_REFUSED = 256, 32  # at a time; more wait in the kernel: our descriptors are not the agent's
REQUEST_S = 60.0  # for a whole request to come
HOLD_S = 120.0  # for a request to wait for a line: a worker that is lost is replaced meanwhile
TRIES, PAUSES_S = 64, (0.05, 2.0)  # of a request, in two minutes; pauses at first and at most
UNREAD_S = 300.0  # for an answer to be left unread
LINGER_S = 10.0  # for a program that is refused to stop sending; closed at once, it would not read why

FIRST_LINE = re.compile(rb"[!-~]+ [!-~\x80-\xff]+ HTTP/1\.[01]")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)")
CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;.*)?\r\n")
# Headers that are not led out; some are written anew.
OURS = {b"connection", b"keep-alive", b"proxy-connection", b"x-rollout-call", b"x-rollout-try", b"expect"}
OURS |= {b"te", b"trailer", b"transfer-encoding", b"content-length"}


class Refusal(Exception):
    """The bridge's own answer, a status of HTTP and why, in a form that all the vendors' programs read."""

    def answer(self):
        status, message = self.args
        body = json.dumps({"type": "error", "error": {"type": "refused_in_sandbox", "message": message}})
        head = "HTTP/1.1 %d Refused\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        return (head % (status, len(body)) + "Connection: close\r\nRetry-After: 1\r\n\r\n" + body).encode()


class Bridge:
    """One port and its lines. What begins with `op_` runs in connections' threads, all else in the loop's."""

    def __init__(self, port):
        """Listen. `port`: 0 for any that is free. Raises OSError."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", port))
        listener.listen(MOST_CALLS)
        listener.setblocking(False)
        self._port = listener.getsockname()[1]
        self._turn = 0
        self._lines = []  # each a reader and a writer
        self._calls = self._held_bytes = 0
        self._unanswered, self._cut_off = 0, False
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)  # before Python 3.10 a queue looks for it there
        self._idle = asyncio.Queue()  # of the lines those that wait
        serving = self._serve(listener)
        threading.Thread(target=self._loop.run_until_complete, args=(serving,), daemon=True).start()

    def op_listen(self, request, connection):
        """Have the caller lead out from now on. Lines of others are closed, for who is stopped keeps them."""
        if request["port"] not in (0, self._port):
            raise RequestError(
                "port is %r; the sandbox listens on %d already" % (request["port"], self._port)
            )
        self._turn += 1
        self._loop.call_soon_threadsafe(self._close_lines)
        return {"port": self._port, "turn": self._turn}

    def op_accept(self, request, connection):
        """Take the connection over as a line. It is answered with a request's `call` and `try`."""
        if request["turn"] != self._turn:
            raise Taken("another worker leads the sandbox's requests out since")
        line = socket.socket(fileno=connection.detach())
        asyncio.run_coroutine_threadsafe(self._add(line, request["turn"]), self._loop)

    def op_led(self, request, connection):
        """How many requests were given up since nobody outside answered, and whether the last try failed."""
        return {"unanswered": self._unanswered, "cut_off": self._cut_off}

    def _close_lines(self):
        for _, writer in self._lines:
            writer.transport.abort()
        while not self._idle.empty():
            self._idle.get_nowait()

    async def _add(self, socket, turn):
        line = _, writer = await asyncio.open_connection(sock=socket)
        if turn == self._turn:
            self._lines = [one for one in [*self._lines, line] if not one[1].transport.is_closing()]
            self._idle.put_nowait(line)
        else:
            writer.transport.abort()

    async def _serve(self, listener):
        tasks = set()
        while True:
            if len(tasks) >= MOST_CALLS + MOST_REFUSED:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks = {task for task in tasks if not task.done()}
            try:
                program, _ = await self._loop.sock_accept(listener)
                tasks.add(self._loop.create_task(self._attend(program)))
            except OSError:  # it has gone again, or there are no descriptors
                await asyncio.sleep(PAUSES_S[0])

    async def _attend(self, program):
        """All that is done for one connection of a program."""
        reader, writer = await asyncio.open_connection(sock=program, limit=HEAD_BYTES)
        writer.transport.set_write_buffer_limits(0)  # what is drained has left us
        body, gone = bytearray(), None
        self._calls += 1
        try:
            if self._calls > MOST_CALLS:
                raise Refusal(503, "more than %d calls at once" % MOST_CALLS)
            head = await asyncio.wait_for(self._read(reader, writer, body), REQUEST_S)
            more = reader if head.startswith(b"CONNECT ") else None
            gone = None if more else self._loop.create_task(_discard(reader))
            out = self._loop.create_task(self._lead_out(head, body, writer, more))
            await asyncio.wait([out, gone] if gone else [out], return_when=asyncio.FIRST_COMPLETED)
            if not out.cancel():
                out.result()
        except Refusal as refusal:
            with contextlib.suppress(OSError):
                writer.write(refusal.answer())
                writer.write_eof()
            gone = gone or self._loop.create_task(_discard(reader))
            await asyncio.wait([gone], timeout=LINGER_S)
        except (OSError, EOFError, asyncio.TimeoutError):
            pass  # the program is gone, or does not say what it wants
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
            first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            headers = [HEADER.fullmatch(line) for line in lines]
            if not FIRST_LINE.fullmatch(first) or not all(headers):
                raise Refusal(400, "the request's head is not HTTP/1.1")
            told = [(header[1].lower(), header[2].strip().lower()) for header in headers]
            sizes = [value for name, value in told if name == b"content-length"]
            codings = [value for name, value in told if name == b"transfer-encoding"]
            known = all(size.isdigit() and len(size) < 16 for size in sizes) and codings in ([], [b"chunked"])
            if not known or len(sizes + codings) > 1:
                raise Refusal(400, "the body's length is told twice, or in a way that is not known here")
            if (b"expect", b"100-continue") in told:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if sizes:
                await self._read_body(reader, body, int(sizes[0]))
            elif codings:
                await self._read_chunks(reader, body)
        except asyncio.LimitOverrunError:
            raise Refusal(431, "a head, or a line between chunks, of more than %d bytes" % HEAD_BYTES)
        kept = [first, *(header[0] for header in headers if header[1].lower() not in OURS)]
        kept += [b"Content-Length: %d" % len(body)] * len(sizes + codings)
        return b"\r\n".join(kept) + b"\r\nConnection: close\r\n"

    async def _read_body(self, reader, body, size):
        if len(body) + size > BODY_BYTES:
            raise Refusal(413, "a body of more than %d bytes" % BODY_BYTES)
        while size:
            data = await reader.read(min(size, PIECE_BYTES))
            if not data:
                raise EOFError
            if self._held_bytes + len(data) > HELD_BYTES:
                raise Refusal(503, "more than %d bytes of requests at once" % HELD_BYTES)
            self._held_bytes += len(data)
            body += data
            size -= len(data)

    async def _read_chunks(self, reader, body):
        size = 1
        while size:
            chunk = CHUNK.fullmatch(await reader.readuntil(b"\r\n"))
            if chunk is None:
                raise Refusal(400, "the size of a chunk is no number")
            size = int(chunk[1], 16)
            await self._read_body(reader, body, size)
            if size and await reader.readexactly(2) != b"\r\n":
                raise Refusal(400, "a chunk is longer than its size")

    async def _lead_out(self, head, body, program, more):
        """Send a request out until an answer begins, and pass that on. Raises Refusal.

        `more`: where the program goes on to say what is to go out behind the request; None = it does not.
        """
        call = binascii.hexlify(os.urandom(16)).decode()
        for number in range(1, TRIES + 1):
            line = self._loop.create_task(self._idle.get())
            try:
                if not (await asyncio.wait([line], timeout=HOLD_S))[0]:
                    self._cut_off = True
                    break
                names = b"X-Rollout-Call: %s\r\nX-Rollout-Try: %d\r\n\r\n" % (call.encode(), number)
                frame = wire.encode({"ok": True, "result": {"call": call, "try": number}})
                if await self._pass(frame + head + names, body, *line.result(), program, more):
                    return
                self._cut_off = True
            finally:
                if not line.cancel():
                    line.result()[1].transport.abort()
            await asyncio.sleep(min(PAUSES_S[0] * 2**number, PAUSES_S[1]))
        self._unanswered += 1
        raise Refusal(503, "nobody outside of the sandbox answers")

    async def _pass(self, head, body, reader, writer, program, more):
        """Send a request out and its answer in; whether any of that was passed on."""
        passed, saying = False, None
        try:
            writer.write(head)
            for start in range(0, len(body), PIECE_BYTES):
                writer.write(body[start : start + PIECE_BYTES])
                await writer.drain()
            while True:
                data = await reader.read(PIECE_BYTES)
                if not data:
                    return passed
                passed, self._cut_off = True, False  # the program may leave before the line does
                if more and saying is None:
                    saying = self._loop.create_task(_copy(more, writer))
                self._forget(body)
                program.write(data)
                if program.transport.get_write_buffer_size():
                    await asyncio.wait_for(program.drain(), UNREAD_S)
        except (OSError, asyncio.TimeoutError):
            return passed
        finally:
            if saying is not None:
                saying.cancel()


async def _copy(reader, writer):
    """What comes goes out, until the program closes: then so does the line."""
    with contextlib.suppress(OSError):
        while True:
            data = await reader.read(PIECE_BYTES)
            if not data:
                break
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def _discard(reader):
    with contextlib.suppress(OSError):
        while await reader.read(PIECE_BYTES):
            pass
