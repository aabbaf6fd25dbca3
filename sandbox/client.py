"""Talking to one sandbox from asyncio: `SandboxClient`. Its blocking twin is in `sync_client.py`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from sandbox import aio, calls, errors, transfer
from sandbox.address import Address
from sandbox.calls import (
    MAX_OUTPUT_CHARS,
    TRUSTED_PYTHON,
    BashResult,
    Call,
    EditorResult,
    ExecResult,
    IPythonResult,
    Request,
    T,
)
from sandbox.transfer import FileInfo, Transfer, TreeChanges

__all__ = [
    "TRUSTED_PYTHON",
    "BashResult",
    "EditorResult",
    "ExecResult",
    "FileInfo",
    "IPythonResult",
    "SandboxClient",
    "Transfer",
    "TreeChanges",
]


class SandboxClient:
    """One sandbox, from asyncio. Requests on it are carried out one after the other.

    Every method raises SandboxGone when the sandbox is not there any more, SandboxTimeout when its server
    does not answer, SandboxRequestError when it refuses. Cancelling a call interrupts the command inside: the
    connection is closed, which the server takes as an interrupt.
    """

    def __init__(self, address: str):
        """`address`: `SandboxInfo.socket`."""
        self._path = Address.parse(address)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()

    async def bash(
        self,
        command: str,
        timeout: float = 30.0,
        *,
        max_output_chars: int = MAX_OUTPUT_CHARS,
        on_timeout: str = "kill",
        quiet_timeout: float | None = None,
    ) -> BashResult:
        """Run `command` in the persistent shell for at most `timeout` seconds; an overrun is a result, no
        exception.

        A command that overruns is ended (`on_timeout="kill"`) or left running (`"keep"`). With `"keep"` that
        also happens after `quiet_timeout` seconds without output (None: never), and as soon as the command is
        known to wait for input. Raises SandboxRequestError while an earlier command is left running.
        """
        return await self._drive(calls.bash(command, timeout, max_output_chars, on_timeout, quiet_timeout))

    async def exec(
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
        """Run a program alone for at most `timeout` seconds; an overrun is a result, no exception. What
        decides a reward is run by this: exit code and times are the server's word, which nobody can forge.

        Every other process of the sandbox, shell and kernel included, is ended before it starts, and all that
        it leaves behind after it: nothing of the agent's runs meanwhile. The next `bash` has a new shell.

        Args:
            argv: Program and arguments; no shell takes part. `TRUSTED_PYTHON` is the server's own Python.
            cwd: A relative one starts at the workspace, which is the default.
            env: Added to the sandbox's own variables; what the agent exported is not there. HOME is a new,
                empty directory, unless it is given here.
            limits: `memory_mb` (address space), `cpu_s`, `file_mb`: of each process, on top of the sandbox's.
            merge_output: Standard error goes where standard output goes.
            max_output_chars: Of each output.
        """
        return await self._drive(
            calls.execute(argv, timeout, cwd, env, stdin, limits, merge_output, max_output_chars)
        )

    async def send_input(
        self,
        text: str,
        timeout: float = 30.0,
        *,
        quiet_timeout: float | None = None,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> BashResult:
        """Type `text` and a line end, or a control key (`C-c`, `C-d`, `C-z`, …), to the running command.

        For one that was left running: then wait as `bash` with `on_timeout="keep"` does, and return what it
        printed since the last result; "" only waits. For one that another call waits for: return at once,
        with no output. Raises SandboxRequestError when no command is running.
        """
        return await self._drive(calls.send_input(text, timeout, quiet_timeout, max_output_chars))

    async def reset(self) -> BashResult:
        """End every process in the sandbox, whatever it ignores, and start a fresh shell in the workspace."""
        return await self._drive(calls.reset())

    async def setup(self, env: dict[str, str]) -> None:
        """Add variables to the environment of the shell, now and whenever it is started again."""
        await self._drive(calls.setup(env))

    async def interrupt(self) -> bool:
        """End the command another call is running. Returns whether there was one."""
        return await self._drive(calls.interrupt())

    async def ipython(
        self, code: str, timeout: float = 30.0, *, max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> IPythonResult:
        """Run a cell in the persistent IPython kernel for at most `timeout` seconds, once it has started; an
        overrun is a result, no exception. Raises SandboxRequestError where the image has no IPython kernel.
        """
        return await self._drive(calls.ipython(code, timeout, max_output_chars))

    async def ipython_warm(self) -> None:
        """Start the IPython kernel in the background, so that the first cell need not wait for it."""
        await self._drive(calls.ipython_warm())

    async def ipython_interrupt(self) -> bool:
        """Interrupt the cell another call is running. Returns whether there was one."""
        return await self._drive(calls.ipython_interrupt())

    async def ipython_restart(self) -> None:
        """End the IPython kernel and its variables; a cell that runs comes back as `restarted`."""
        await self._drive(calls.ipython_restart())

    async def ping(self) -> dict[str, Any]:
        """Proof of life: `shell_pid` (inside) and `uptime_s`. Answered while a command runs, too."""
        return await self._drive(calls.ping())

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Content of a regular file; a relative path starts at the workspace. At most 64 MiB."""
        return await self._drive(calls.read_file(path, max_bytes))

    async def write_file(self, path: str, content: bytes | str, mode: int | None = None) -> None:
        """Write a file, making its directories; `mode` as for chmod."""
        await self._drive(calls.write_file(path, content, mode))

    async def editor(
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
        """`view`, `create`, `str_replace`, `insert` or `undo_edit` at an absolute path. A mistake of the
        model is a result with `ok` false, no exception.
        """
        options = {
            "file_text": file_text,
            "old_str": old_str,
            "new_str": new_str,
            "insert_line": insert_line,
            "view_range": view_range,
            "max_chars": max_output_chars,
        }
        return await self._drive(calls.editor(command, path, options))

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What is at a path; `kind` None when nothing is."""
        return await self._drive(transfer.stat(path, follow))

    async def list_dir(self, path: str = ".") -> list[FileInfo]:
        """What is in a directory, by name; at most 10,000 entries."""
        return await self._drive(transfer.list_dir(path))

    async def upload(
        self,
        local_path: str | os.PathLike[str],
        path: str,
        *,
        exclude: Sequence[str] = (),
        max_bytes: int = transfer.MAX_BYTES,
    ) -> Transfer:
        """Copy a local file or directory to `path` inside; a directory is merged into one there.

        `exclude`: glob patterns of names or relative paths. Raises SandboxRequestError beyond `max_bytes`.
        """
        return await self._drive_apart(transfer.upload(local_path, path, exclude, max_bytes))

    async def download(
        self,
        path: str,
        local_path: str | os.PathLike[str],
        *,
        exclude: Sequence[str] = (),
        max_bytes: int = transfer.MAX_BYTES,
    ) -> Transfer:
        """Copy a file, or a directory to a new one, out of the sandbox. Nothing is written outside of
        `local_path`: links that lead out of it are skipped, devices refused. Raises SandboxRequestError
        beyond `max_bytes`.
        """
        return await self._drive_apart(transfer.download(path, local_path, exclude, max_bytes))

    async def archive(
        self,
        path: str,
        local_file: str | os.PathLike[str],
        *,
        exclude: Sequence[str] = (),
        max_bytes: int = transfer.MAX_BYTES,
    ) -> Transfer:
        """Save a directory (`.` is the workspace) as a local .tar.gz file. Unpack it as hostile input."""
        return await self._drive_apart(transfer.pack(path, local_file, exclude, max_bytes))

    async def note_tree(self, path: str, *, exclude: Sequence[str] = ()) -> int:
        """Have the sandbox's server remember what every file below a directory is; answers how many."""
        return await self._drive(transfer.note_tree(path, exclude))

    async def changed_tree(self, path: str) -> TreeChanges:
        """What became of a directory since `note_tree`. No change of content can be hidden: it goes by inode
        and ctime, too, which no process inside can set. Raises SandboxRequestError when it was not noted, or
        when there are more changes than can be told.
        """
        return await self._drive(transfer.changed_tree(path))

    async def close(self) -> None:
        """Close the connection; the sandbox lives on."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _drive(self, call: Call[T]) -> T:
        try:
            request = next(call)
            while True:
                request = call.send(await self._carry_out(request))
        except StopIteration as end:
            return end.value

    async def _drive_apart(self, call: Call[T]) -> T:
        """A transfer: on a connection of its own, its local file I/O in a thread."""
        reader, writer = await aio.connect(self._path)
        try:
            value = None
            while True:
                ended, value = await aio.in_thread(transfer.advance, call, value)
                if ended:
                    return value
                value = await self._carry_out_apart(value, reader, writer)
        finally:
            writer.close()
            await aio.in_thread(call.close)

    async def _carry_out_apart(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(request.timeout_s):
                await aio.send(writer, request.body)
                return aio.result_of(await aio.receive(reader), self._path)
        except TimeoutError as error:
            raise errors.SandboxTimeout(f"no answer from {self._path} in {request.timeout_s:g} s") from error
        except ConnectionError as error:
            raise errors.SandboxGone(f"the connection to {self._path} broke: {error}") from error

    async def _carry_out(self, request: Request) -> dict[str, Any]:
        if request.aside:
            return await aio.exchange(self._path, request.body, request.timeout_s)
        async with self._lock:
            answered = False
            try:
                if self._streams is None:
                    self._streams = await aio.connect(self._path)
                reader, writer = self._streams
                async with asyncio.timeout(request.timeout_s):
                    await aio.send(writer, request.body)
                    reply = await aio.receive(reader)
                answered = reply is not None
            except TimeoutError as error:
                raise errors.SandboxTimeout(
                    f"no answer from {self._path} in {request.timeout_s:g} s"
                ) from error
            except ConnectionError as error:
                raise errors.SandboxGone(f"the connection to {self._path} broke: {error}") from error
            finally:
                if not answered:  # cancelled, overdue or broken: the next call starts on a new connection
                    await self.close()
            return aio.result_of(reply, self._path)
