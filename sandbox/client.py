"""Talking to one sandbox: `SandboxClient` for asyncio and `SyncSandboxClient`, its blocking twin."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import socket
import threading
from typing import Any

from sandbox import aio, errors, paths
from sandbox.server import wire

REPLY_GRACE_S = 15.0
"""Beyond a command's own limit: the server's escalation of signals and a new shell take at most about half of
it.
"""
REQUEST_TIMEOUT_S = 30.0
MAX_OUTPUT_CHARS = 30_000


@dataclasses.dataclass(frozen=True)
class BashResult:
    """What a command did."""

    output: str
    """Standard output and error as the terminal got them, cut in the middle when longer than asked for."""
    exit_code: int | None
    """None when the command was ended by force and the shell with it gave no code."""
    cwd: str
    timed_out: bool
    truncated: bool
    shell_restarted: bool
    """The shell ended (`exit`, `set -e`, killed); variables and functions are lost, the directory is kept."""
    duration_s: float
    interrupted: bool = False


def _bash_request(command: str, timeout: float, max_output_chars: int) -> dict[str, Any]:
    return {"op": "bash", "command": command, "timeout": timeout, "max_chars": max_output_chars}


def _read_request(path: str, max_bytes: int | None) -> dict[str, Any]:
    return {"op": "read_file", "path": path, "max_bytes": max_bytes}


def _write_request(path: str, content: bytes | str, mode: int | None) -> dict[str, Any]:
    data = content.encode() if isinstance(content, str) else content
    return {"op": "write_file", "path": path, "content": base64.b64encode(data).decode(), "mode": mode}


class SandboxClient:
    """One sandbox, from asyncio. Requests on it are carried out one after the other.

    Every method raises SandboxGone when the sandbox is not there any more, SandboxTimeout when its server
    does not answer, SandboxRequestError when it refuses. Cancelling a call interrupts the command inside: the
    connection is closed, which the server takes as an interrupt.
    """

    def __init__(self, socket_path: str):
        self._path = paths.check_socket_path(socket_path)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()

    async def bash(
        self, command: str, timeout: float = 30.0, *, max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> BashResult:
        """Run `command` in the persistent shell for at most `timeout` seconds; an overrun is a result, no
        exception.
        """
        request = _bash_request(command, timeout, max_output_chars)
        return BashResult(**await self._call(request, timeout + REPLY_GRACE_S))

    async def send_input(self, text: str) -> None:
        """Type `text` (or `C-c`, `C-d`, `C-z`) to the command another call is running."""
        request = {"op": "bash", "command": text, "is_input": True}
        await aio.exchange(self._path, request, REQUEST_TIMEOUT_S)

    async def interrupt(self) -> bool:
        """End the command another call is running. Returns whether there was one."""
        return (await aio.exchange(self._path, {"op": "interrupt"}, REQUEST_TIMEOUT_S))["was_running"]

    async def ping(self) -> dict[str, Any]:
        """Proof of life: `shell_pid` (inside) and `uptime_s`. Answered while a command runs, too."""
        return await aio.exchange(self._path, {"op": "ping"}, REQUEST_TIMEOUT_S)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Content of a regular file; a relative path starts at the workspace. At most 64 MiB."""
        result = await self._call(_read_request(path, max_bytes), REQUEST_TIMEOUT_S)
        return base64.b64decode(result["content"])

    async def write_file(self, path: str, content: bytes | str, mode: int | None = None) -> None:
        """Write a file, making its directories; `mode` as for chmod."""
        await self._call(_write_request(path, content, mode), REQUEST_TIMEOUT_S)

    async def close(self) -> None:
        """Close the connection; the sandbox lives on."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _call(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        async with self._lock:
            answered = False
            try:
                if self._streams is None:
                    self._streams = await aio.connect(self._path)
                reader, writer = self._streams
                async with asyncio.timeout(timeout):
                    await aio.send(writer, request)
                    reply = await aio.receive(reader)
                answered = reply is not None
            except TimeoutError as error:
                raise errors.SandboxTimeout(f"no answer from {self._path} in {timeout:g} s") from error
            except ConnectionError as error:
                raise errors.SandboxGone(f"the connection to {self._path} broke: {error}") from error
            finally:
                if not answered:  # cancelled, overdue or broken: the next call starts on a new connection
                    await self.close()
            return aio.result_of(reply, self._path)


class SyncSandboxClient:
    """:class:`SandboxClient` for blocking code; same methods, same errors. Safe to share between threads."""

    def __init__(self, socket_path: str):
        self._path = paths.check_socket_path(socket_path)
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def bash(
        self, command: str, timeout: float = 30.0, *, max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> BashResult:
        """See :meth:`SandboxClient.bash`."""
        return BashResult(
            **self._call(_bash_request(command, timeout, max_output_chars), timeout + REPLY_GRACE_S)
        )

    def send_input(self, text: str) -> None:
        """See :meth:`SandboxClient.send_input`."""
        self._exchange({"op": "bash", "command": text, "is_input": True})

    def interrupt(self) -> bool:
        """See :meth:`SandboxClient.interrupt`."""
        return self._exchange({"op": "interrupt"})["was_running"]

    def ping(self) -> dict[str, Any]:
        """See :meth:`SandboxClient.ping`."""
        return self._exchange({"op": "ping"})

    def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """See :meth:`SandboxClient.read_file`."""
        return base64.b64decode(self._call(_read_request(path, max_bytes), REQUEST_TIMEOUT_S)["content"])

    def write_file(self, path: str, content: bytes | str, mode: int | None = None) -> None:
        """See :meth:`SandboxClient.write_file`."""
        self._call(_write_request(path, content, mode), REQUEST_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection; the sandbox lives on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> SyncSandboxClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _call(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        with self._lock:
            answered = False
            try:
                if self._socket is None:
                    self._socket = _connect(self._path)
                reply = _round_trip(self._socket, request, timeout, self._path)
                answered = reply is not None
            finally:
                if not answered:
                    self.close()
            return aio.result_of(reply, self._path)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        return exchange(self._path, request, REQUEST_TIMEOUT_S)


def exchange(socket_path: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """:func:`sandbox.aio.exchange` for blocking code."""
    with _connect(socket_path) as sock:
        return aio.result_of(_round_trip(sock, request, timeout, socket_path), socket_path)


def _connect(socket_path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(paths.check_socket_path(socket_path))
    except OSError as error:
        sock.close()
        raise errors.SandboxGone(f"nobody listens on {socket_path}: {error}") from error
    return sock


def _round_trip(
    sock: socket.socket, request: dict[str, Any], timeout: float, path: str
) -> dict[str, Any] | None:
    sock.settimeout(timeout)
    try:
        wire.send(sock, request)
        return wire.receive(sock)
    except TimeoutError as error:
        raise errors.SandboxTimeout(f"no answer to {request['op']!r} from {path} in {timeout:g} s") from error
    except OSError as error:
        raise errors.SandboxGone(f"the connection to {path} broke: {error}") from error
