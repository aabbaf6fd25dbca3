"""Connections to a sandbox or its host: a Unix socket, a key for a sandbox, the frames of `server/wire.py`.

The key is what keeps an agent out of other sandboxes, to whom such a socket was shown: unlike the host, a
server cannot look at who has connected, for from inside its namespaces all others are nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import re
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from sandbox import errors, paths
from sandbox.server import wire

KEY = re.compile(r"(.*)#([0-9a-f]{32})")

T = TypeVar("T")


class NotListening(errors.SandboxGone):
    """Nobody took the connection, so nothing of the request was done."""


def new_key() -> str:
    """128 random bits."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Address:
    """Where a server is reached. Shown as the path alone, for it comes into logs and error messages."""

    path: str
    key: str | None = None

    @classmethod
    def parse(cls, text: str | Address) -> Address:
        """Read `PATH#KEY` or `PATH`. Raises SandboxError for a path that no socket can have."""
        if isinstance(text, Address):
            return text
        match = KEY.fullmatch(text)
        path, key = (match[1], match[2]) if match else (text, None)
        return cls(paths.check_socket_path(path), key)

    def greeting(self) -> bytes:
        """What goes first on a connection."""
        return wire.encode({"key": self.key}) if self.key else b""

    def text(self) -> str:
        """The address as `parse` reads it."""
        return f"{self.path}#{self.key}" if self.key else self.path

    def __str__(self) -> str:
        return self.path


# ---------------------------------------------------------------------------------- asyncio


class Line(asyncio.Protocol):
    """Carries one request after the other: with streams a short command would take a tenth longer."""

    reply: asyncio.Future[bytearray | None] | None = None
    """To the request under way; None at the end of the connection."""

    def __init__(self) -> None:
        self._received = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if (missing := wire.HEADER.size - len(self._received)) <= 0:
            size = wire.HEADER.unpack_from(self._received)[0]
            missing += size
            if self.reply is None or self.reply.done() or missing < 0 or size > wire.MAX_FRAME_BYTES:
                self.transport.abort()  # nobody has asked for that
            elif missing == 0:
                self.reply.set_result(self._received[wire.HEADER.size :])
                self._received.clear()

    def connection_lost(self, error: Exception | None) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_result(None)


async def connect(address: str | Address) -> Line:
    """Open a Unix socket and show its key. Raises NotListening when nobody is there."""
    address = Address.parse(address)
    try:
        _, line = await asyncio.get_running_loop().create_unix_connection(Line, address.path)
    except OSError as error:
        raise NotListening(f"nobody listens on {address}: {error}") from error
    line.transport.write(address.greeting())
    return line


async def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Write one frame."""
    writer.write(wire.encode(message))
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Read one frame; None when the peer closed the connection."""
    try:
        size = wire.HEADER.unpack(await reader.readexactly(wire.HEADER.size))[0]
        wire.check_size(size)
        return json.loads((await reader.readexactly(size)).decode())
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def round_trip(
    line: Line, address: Address, request: dict[str, Any], timeout: float
) -> dict[str, Any] | None:
    """Send a request and return the reply; None when the connection was closed. Raises SandboxTimeout."""
    loop = asyncio.get_running_loop()
    reply = line.reply = loop.create_future()
    timer = loop.call_later(timeout, lambda: reply.done() or reply.set_exception(TimeoutError()))
    try:
        line.transport.write(wire.encode(request))
        body = None if line.transport.is_closing() else await reply
        return None if body is None else json.loads(body.decode())
    except TimeoutError as error:
        problem = f"no answer to {request['op']!r} from {address} in {timeout:g} s"
        raise errors.SandboxTimeout(problem) from error
    finally:
        timer.cancel()


def result_of(reply: dict[str, Any] | None, address: str | Address) -> dict[str, Any]:
    """The result in a reply. Raises what the other side reports, or SandboxGone when there was no reply."""
    if reply is None:
        raise errors.SandboxGone(f"the connection to {address} was closed before the answer came")
    if not reply.get("ok"):
        raise errors.from_wire(reply.get("error", {}))
    return reply["result"]


async def exchange(address: str | Address, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """One request on a connection of its own. Raises SandboxGone, SandboxTimeout or what the other side
    reports.
    """
    address = Address.parse(address)
    line = await connect(address)
    with contextlib.closing(line.transport):
        return result_of(await round_trip(line, address, request, timeout), address)


async def in_thread(
    function: Callable[..., T],
    *args: Any,
    on_cancel: Callable[[], None] = lambda: None,
    threads: Executor | None = None,
) -> T:
    """Run a blocking function in a thread (None = of the loop's) and, even when cancelled, wait until it has
    ended. `on_cancel` may hasten that.
    """
    run = contextvars.copy_context().run
    task = asyncio.get_running_loop().run_in_executor(threads, run, function, *args)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # taken note of; the cancellation is what counts
        raise


# ---------------------------------------------------------------------------------- in a thread


class BlockingConnection:
    """A connection for code that runs in a thread, such as a transfer with its file I/O."""

    def __init__(self, address: str | Address, timeout: float):
        """`timeout`: seconds for which the other side may be silent."""
        self._address = Address.parse(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        self._hung_up = False

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """One request. Raises SandboxGone, SandboxTimeout or what the other side reports."""
        try:
            if self._hung_up:
                raise ConnectionAbortedError("it was given up")
            wire.send(self._socket, {"op": op, **fields})
            return result_of(wire.receive(self._socket), self._address)
        except TimeoutError as error:
            silence = f"{self._socket.gettimeout():g} s"
            raise errors.SandboxTimeout(f"no answer to {op!r} from {self._address} in {silence}") from error
        except OSError as error:
            raise errors.SandboxGone(f"the connection to {self._address} broke: {error}") from error

    def hang_up(self) -> None:
        """Have the request under way, which another thread waits for, and all later ones end with
        SandboxGone.
        """
        self._hung_up = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> BlockingConnection:
        """Connect. Raises NotListening."""
        try:
            self._socket.connect(self._address.path)
            self._socket.sendall(self._address.greeting())
        except OSError as error:
            self._socket.close()
            raise NotListening(f"nobody listens on {self._address}: {error}") from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()
