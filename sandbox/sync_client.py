"""`SyncSandboxClient`: `SandboxClient` for blocking code."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from sandbox import aio, calls, errors, transfer
from sandbox.address import Address
from sandbox.calls import (
    MAX_OUTPUT_CHARS,
    BashResult,
    Call,
    EditorResult,
    ExecResult,
    IPythonResult,
    Request,
    T,
)
from sandbox.server import wire
from sandbox.transfer import FileInfo, Transfer, TreeChanges


class SyncSandboxClient:
    """:class:`SandboxClient` for blocking code; same methods, same errors. Safe to share between threads."""

    def __init__(self, address: str):
        """`address`: `SandboxInfo.socket`."""
        self._path = Address.parse(address)
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def bash(
        self,
        command: str,
        timeout: float = 30.0,
        *,
        max_output_chars: int = MAX_OUTPUT_CHARS,
        on_timeout: str = "kill",
        quiet_timeout: float | None = None,
    ) -> BashResult:
        """See :meth:`SandboxClient.bash`."""
        return self._drive(calls.bash(command, timeout, max_output_chars, on_timeout, quiet_timeout))

    def exec(
        self,
        argv: Sequence[str],
        timeout: float = 30.0,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str = b"",
        limits: Mapping[str, float] | None = None,
        merge_output: bool = False,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> ExecResult:
        """See :meth:`SandboxClient.exec`."""
        return self._drive(
            calls.execute(argv, timeout, cwd, env, stdin, limits, merge_output, max_output_chars)
        )

    def send_input(
        self,
        text: str,
        timeout: float = 30.0,
        *,
        quiet_timeout: float | None = None,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> BashResult:
        """See :meth:`SandboxClient.send_input`."""
        return self._drive(calls.send_input(text, timeout, quiet_timeout, max_output_chars))

    def reset(self) -> BashResult:
        """See :meth:`SandboxClient.reset`."""
        return self._drive(calls.reset())

    def setup(self, env: dict[str, str]) -> None:
        """See :meth:`SandboxClient.setup`."""
        self._drive(calls.setup(env))

    def interrupt(self) -> bool:
        """See :meth:`SandboxClient.interrupt`."""
        return self._drive(calls.interrupt())

    def ipython(
        self, code: str, timeout: float = 30.0, *, max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> IPythonResult:
        """See :meth:`SandboxClient.ipython`."""
        return self._drive(calls.ipython(code, timeout, max_output_chars))

    def ipython_warm(self) -> None:
        """See :meth:`SandboxClient.ipython_warm`."""
        self._drive(calls.ipython_warm())

    def ipython_interrupt(self) -> bool:
        """See :meth:`SandboxClient.ipython_interrupt`."""
        return self._drive(calls.ipython_interrupt())

    def ipython_restart(self) -> None:
        """See :meth:`SandboxClient.ipython_restart`."""
        self._drive(calls.ipython_restart())

    def ping(self) -> dict[str, Any]:
        """See :meth:`SandboxClient.ping`."""
        return self._drive(calls.ping())

    def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """See :meth:`SandboxClient.read_file`."""
        return self._drive(calls.read_file(path, max_bytes))

    def write_file(self, path: str, content: bytes | str, mode: int | None = None) -> None:
        """See :meth:`SandboxClient.write_file`."""
        self._drive(calls.write_file(path, content, mode))

    def editor(
        self,
        command: str,
        path: str,
        *,
        file_text: str | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        view_range: list[int] | None = None,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> EditorResult:
        """See :meth:`SandboxClient.editor`."""
        options = {
            "file_text": file_text,
            "old_str": old_str,
            "new_str": new_str,
            "insert_line": insert_line,
            "view_range": view_range,
            "max_chars": max_output_chars,
        }
        return self._drive(calls.editor(command, path, options))

    def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """See :meth:`SandboxClient.stat`."""
        return self._drive(transfer.stat(path, follow))

    def list_dir(self, path: str = ".") -> list[FileInfo]:
        """See :meth:`SandboxClient.list_dir`."""
        return self._drive(transfer.list_dir(path))

    def upload(
        self,
        local_path: str | os.PathLike[str],
        path: str,
        *,
        exclude: Sequence[str] = (),
        max_bytes: int = transfer.MAX_BYTES,
    ) -> Transfer:
        """See :meth:`SandboxClient.upload`."""
        return self._drive_apart(transfer.upload(local_path, path, exclude, max_bytes))

    def download(
        self,
        path: str,
        local_path: str | os.PathLike[str],
        *,
        exclude: Sequence[str] = (),
        max_bytes: int = transfer.MAX_BYTES,
    ) -> Transfer:
        """See :meth:`SandboxClient.download`."""
        return self._drive_apart(transfer.download(path, local_path, exclude, max_bytes))

    def archive(
        self,
        path: str,
        local_file: str | os.PathLike[str],
        *,
        exclude: Sequence[str] = (),
        max_bytes: int = transfer.MAX_BYTES,
    ) -> Transfer:
        """See :meth:`SandboxClient.archive`."""
        return self._drive_apart(transfer.pack(path, local_file, exclude, max_bytes))

    def note_tree(self, path: str, *, exclude: Sequence[str] = ()) -> int:
        """See :meth:`SandboxClient.note_tree`."""
        return self._drive(transfer.note_tree(path, exclude))

    def changed_tree(self, path: str) -> TreeChanges:
        """See :meth:`SandboxClient.changed_tree`."""
        return self._drive(transfer.changed_tree(path))

    def close(self) -> None:
        """Close the connection; the sandbox lives on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> SyncSandboxClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _drive(self, call: Call[T]) -> T:
        try:
            request = next(call)
            while True:
                request = call.send(self._carry_out(request))
        except StopIteration as end:
            return end.value

    def _drive_apart(self, call: Call[T]) -> T:
        with contextlib.closing(call), _connect(self._path) as sock:
            value = None
            while True:
                ended, value = transfer.advance(call, value)
                if ended:
                    return value
                reply = _round_trip(sock, value.body, value.timeout_s, self._path)
                value = aio.result_of(reply, self._path)

    def _carry_out(self, request: Request) -> dict[str, Any]:
        if request.aside:
            return exchange(self._path, request.body, request.timeout_s)
        with self._lock:
            answered = False
            try:
                if self._socket is None:
                    self._socket = _connect(self._path)
                reply = _round_trip(self._socket, request.body, request.timeout_s, self._path)
                answered = reply is not None
            finally:
                if not answered:
                    self.close()
            return aio.result_of(reply, self._path)


def exchange(address: str | Address, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """:func:`sandbox.aio.exchange` for blocking code."""
    address = Address.parse(address)
    with _connect(address) as sock:
        return aio.result_of(_round_trip(sock, request, timeout, address), address)


def _connect(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(address.path)
        sock.sendall(address.greeting())
    except OSError as error:
        sock.close()
        raise errors.SandboxGone(f"nobody listens on {address}: {error}") from error
    return sock


def _round_trip(
    sock: socket.socket, request: dict[str, Any], timeout: float, path: Address
) -> dict[str, Any] | None:
    sock.settimeout(timeout)
    try:
        wire.send(sock, request)
        return wire.receive(sock)
    except TimeoutError as error:
        raise errors.SandboxTimeout(f"no answer to {request['op']!r} from {path} in {timeout:g} s") from error
    except OSError as error:
        raise errors.SandboxGone(f"the connection to {path} broke: {error}") from error
