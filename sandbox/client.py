"""Talking to one sandbox from asyncio: `SandboxClient`."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from sandbox import connection, journal, transfer
from sandbox.connection import Address, BlockingConnection
from sandbox.errors import SandboxRequestError
from sandbox.journal import Journal
from sandbox.transfer import FileInfo, Transfer, TreeChanges, TreeEntry
from sandbox.tunnel import Tunnel

REPLY_GRACE_S = 15.0
"""Beyond a command's own limit: the server's signals and a new shell take at most about half of it."""
EXEC_GRACE_S = 30.0
"""Beyond a program's own limit: all processes are ended before it and after it."""
REQUEST_TIMEOUT_S = 30.0
KERNEL_START_S = 100.0
"""More than the server gives a kernel to start. It is waited for before the cell's own time begins."""
MAX_OUTPUT_CHARS = 30_000
TRUSTED_PYTHON = "@python"
"""As first argument of `exec`: the Python that runs the sandbox's own server, mounted read-only. Only the
standard library is there: no module of the working directory, of a user or of the environment is found.
"""
TRANSFER_THREADS = ThreadPoolExecutor(64, "transfer")
"""A sandbox may be silent for long, which the few threads of the event loop shall not wait for."""


@dataclasses.dataclass(frozen=True)
class BashResult:
    """What a command did; of one that goes on (`running`) what it did since the last result."""

    output: str
    """Standard output and error as the terminal got them, decoded as UTF-8 with U+FFFD for what is not, cut
    in the middle when longer than asked for.
    """
    exit_code: int | None
    """128 + signal when the shell with the command was killed. None while the command is running."""
    cwd: str
    """The shell's directory; bytes that are not UTF-8 are surrogates, as `os.fsdecode` has it."""
    timed_out: bool
    truncated: bool
    shell_restarted: bool
    """The shell ended (`exit`, `set -e`, killed, reset) in this command or since the last one; variables and
    functions are lost, the directory is kept but for a reset.
    """
    duration_s: float
    interrupted: bool = False
    running: bool = False
    """The command was left running: `send_input` goes on with it."""
    waiting_for_input: bool = False
    """The running command is known to wait for input from the terminal. False also when that cannot be told.
    """
    suspended: bool = False
    """The command was stopped by C-z and is a background job now; `fg` continues it."""
    late_output: str = ""
    """What background jobs, and a command left running before this one, printed since the last result."""
    late_exit_code: int | None = None
    """Exit code of a command that was left running and ended by itself before this one began."""
    limit_exceeded: str | None = None
    """The sandbox was over a limit and all its processes were ended: which limit, in words."""
    previous_cwd: str = ""
    """`cwd` of the result before this one."""
    input_sent: bool = True
    """False when the command had ended before the input could be typed."""


BASH_FIELDS = frozenset(field.name for field in dataclasses.fields(BashResult))


@dataclasses.dataclass(frozen=True)
class ExecResult:
    """What a program did that the sandbox's server ran alone, with no shell. Only the two outputs are the
    word of processes in the sandbox: the program's own, and its children's.
    """

    exit_code: int | None = None
    """None when it did not end by itself: killed by a signal, at the time limit, or not started."""
    signal: int | None = None
    """Number of the signal that ended it."""
    stdout: str = ""
    """Decoded as UTF-8 with U+FFFD for what is not, cut in the middle when longer than asked for; with
    `merge_output` both outputs in the order they were written.
    """
    stderr: str = ""
    truncated: bool = False
    """Whether one of the outputs was cut."""
    timed_out: bool = False
    interrupted: bool = False
    """It was ended by a `reset`."""
    not_started: str | None = None
    """Why it could not be started: no such program or directory, no leave. The agent may have brought that
    about, so it is a result and no exception.
    """
    limit_exceeded: str | None = None
    """The sandbox was over a limit and all its processes were ended: which limit, in words."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of the program and of those children that it waited for."""


@dataclasses.dataclass(frozen=True)
class IPythonResult:
    """What a cell did."""

    output: str
    """Streams, displays, the result and a traceback in order, as plain text; cut in the middle when longer
    than asked for. Images are files, named in the text.
    """
    late_output: str
    """What threads and background processes of earlier cells printed since the last cell."""
    error: str | None
    """Name of the exception that ended the cell; None when there was none or the kernel died."""
    execution_count: int | None
    """The number in `In [n]`, from 1; None when the kernel died."""
    timed_out: bool
    interrupted: bool
    restarted: bool
    """The kernel died before or in this cell and was replaced: variables and imports are lost."""
    truncated: bool
    duration_s: float
    limit_exceeded: str | None = None
    """Why all processes were ended before or in this cell, when the sandbox was over a limit."""


@dataclasses.dataclass(frozen=True)
class EditorResult:
    """What the editor answered."""

    ok: bool
    """False: nothing was done, and the output tells the model why and what to do instead."""
    output: str


class SandboxClient:
    """One sandbox, from asyncio. Requests on it are carried out one after the other.

    Every method raises SandboxGone when the sandbox is not there any more, SandboxTimeout when its server
    does not answer, SandboxRequestError when it refuses. Cancelling a call interrupts the command inside: the
    connection is closed, which the server takes as an interrupt. With a `journal` that leaves operations
    running it does not, and another client can collect the outcome.
    """

    def __init__(self, address: str | Address):
        """`address`: `SandboxInfo.socket`."""
        self.address = Address.parse(address)
        self._line: connection.Line | None = None
        self._lock = asyncio.Lock()
        self.journal: Journal | None = None
        """What numbers the operations from now on, so that each is carried out once; see :meth:`take`."""

    async def take(self, fence: int) -> tuple[int, int] | None:
        """Have the sandbox refuse all numbered operations under a lower fence. Returns its last number and up
        to which number it was told that outcomes are known.

        None when the sandbox was started by a release that numbers nothing: it must get no journal. Raises
        SandboxTaken when a higher fence has been there.
        """
        try:
            reply = await self._ask_aside("take", fence=fence)
        except SandboxRequestError as error:
            if str(error).startswith("unknown operation"):
                return None
            raise
        return reply["last"], reply["known"]

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
        reply = await self._ask(
            "bash",
            timeout + REPLY_GRACE_S,
            command=command,
            timeout=timeout,
            max_chars=max_output_chars,
            on_timeout=on_timeout,
            quiet_timeout=quiet_timeout,
        )
        return _bash_result(reply)

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
        reply = await self._ask(
            "exec",
            timeout + EXEC_GRACE_S,
            argv=list(argv),
            timeout=timeout,
            cwd=cwd,
            env=dict(env or {}),
            stdin=_encoded(stdin),
            limits=dict(limits or {}),
            merge=merge_output,
            max_chars=max_output_chars,
        )
        return ExecResult(**reply)

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
        reply = await self._ask_aside(
            "input",
            timeout + REPLY_GRACE_S,
            text=text,
            timeout=timeout,
            quiet_timeout=quiet_timeout,
            max_chars=max_output_chars,
        )
        return _bash_result(reply)

    async def reset(self) -> BashResult:
        """End every process in the sandbox, whatever it ignores, and start a fresh shell in the workspace."""
        return _bash_result(await self._ask_aside("reset"))

    async def setup(self, env: dict[str, str]) -> None:
        """Add variables to the environment of the shell, now and whenever it is started again."""
        await self._ask("setup", env=env)

    async def interrupt(self) -> bool:
        """End the command another call is running. Returns whether there was one."""
        return (await self._ask_aside("interrupt"))["was_running"]

    async def ipython(
        self, code: str, timeout: float = 30.0, *, max_output_chars: int = MAX_OUTPUT_CHARS
    ) -> IPythonResult:
        """Run a cell in the persistent IPython kernel for at most `timeout` seconds, once it has started; an
        overrun is a result, no exception. Raises SandboxRequestError where the image has no IPython kernel.
        """
        wait_s = timeout + KERNEL_START_S + REPLY_GRACE_S
        reply = await self._ask("ipython", wait_s, code=code, timeout=timeout, max_chars=max_output_chars)
        return IPythonResult(**reply)

    async def ipython_warm(self) -> None:
        """Start the IPython kernel in the background, so that the first cell need not wait for it."""
        await self._ask_aside("ipython_warm")

    async def ipython_interrupt(self) -> bool:
        """Interrupt the cell another call is running. Returns whether there was one."""
        return (await self._ask_aside("ipython_interrupt"))["was_running"]

    async def ipython_restart(self) -> None:
        """End the IPython kernel and its variables; a cell that runs comes back as `restarted`."""
        await self._ask_aside("ipython_restart")

    async def ping(self) -> dict[str, Any]:
        """Proof of life: `shell_pid` (inside) and `uptime_s`. Answered while a command runs, too."""
        return await self._ask_aside("ping")

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Content of a regular file; a relative path starts at the workspace. At most 64 MiB."""
        reply = await self._ask("read_file", path=path, max_bytes=max_bytes)
        return base64.b64decode(reply["content"])

    async def write_file(self, path: str, content: bytes | str, mode: int | None = None) -> None:
        """Write a file, making its directories; `mode` as for chmod."""
        await self._ask("write_file", path=path, content=_encoded(content), mode=mode)

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
        reply = await self._ask(
            "editor",
            command=command,
            path=path,
            file_text=file_text,
            old_str=old_str,
            new_str=new_str,
            insert_line=insert_line,
            view_range=view_range,
            max_chars=max_output_chars,
        )
        return EditorResult(**reply)

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What is at a path; `kind` None when nothing is."""
        return FileInfo(**await self._ask("stat", path=path, follow=follow))

    async def list_dir(self, path: str = ".") -> list[FileInfo]:
        """What is in a directory, by name; at most 10,000 entries."""
        reply = await self._ask("list_dir", path=path)
        return [FileInfo(**entry) for entry in reply["entries"]]

    async def upload(
        self,
        local_path: str | os.PathLike[str],
        path: str,
        *,
        exclude: Sequence[str] = (),
        max_bytes: int = transfer.MAX_BYTES,
    ) -> Transfer:
        """Copy a local file or directory to `path` inside; a directory is merged into one there. `exclude`:
        glob patterns of names or relative paths. Raises SandboxRequestError beyond `max_bytes`.
        """
        return await self._transfer(transfer.upload, local_path, path, exclude, max_bytes)

    async def download(
        self,
        path: str,
        local_path: str | os.PathLike[str],
        *,
        exclude: Sequence[str] = (),
        max_bytes: int = transfer.MAX_BYTES,
    ) -> Transfer:
        """Copy a file, or a directory to a new one, out of the sandbox. Nothing is written outside of that:
        links that lead out are skipped, devices refused. Raises SandboxRequestError beyond `max_bytes`.
        """
        return await self._transfer(transfer.download, path, local_path, exclude, max_bytes)

    async def archive(
        self,
        path: str,
        local_file: str | os.PathLike[str],
        *,
        exclude: Sequence[str] = (),
        max_bytes: int = transfer.MAX_BYTES,
        entries: Sequence[tuple[str, int | None]] | None = None,
    ) -> Transfer:
        """Save a directory (`.` is the workspace) as a local .tar.gz file, or as a .tar file these `entries`:
        paths below it, each with a mode, or None for a tree as it is. Unpack it as hostile input.
        """
        return await self._transfer(transfer.pack, path, local_file, exclude, max_bytes, entries)

    async def note_tree(self, path: str, *, exclude: Sequence[str] = (), directories: bool = False) -> int:
        """Have the sandbox's server remember each file (and directory) below another; how many."""
        fields = {"path": path, "exclude": list(exclude), "directories": directories}
        return (await self._ask("note_tree", transfer.PIECE_TIMEOUT_S, **fields))["entries"]

    async def changed_tree(self, path: str) -> TreeChanges:
        """What became of a directory since `note_tree`. No change of content can be hidden: it goes by inode
        and ctime, too, which no process inside can set. Raises SandboxRequestError when it was not noted, or
        when there are more changes than can be told.
        """
        reply = await self._ask("changed_tree", transfer.PIECE_TIMEOUT_S, path=path)
        return TreeChanges([TreeEntry(**entry) for entry in reply["changed"]], reply["removed"])

    def tunnel(self, host: str, port: int) -> Tunnel:
        """The way out: requests to a loopback port inside are led to this address for as long as it lasts."""
        return Tunnel(self.address, host, port)

    async def close(self) -> None:
        """Close the connection; the sandbox lives on."""
        if self._line is not None:
            self._line.transport.close()
            self._line = None

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _transfer(self, function: Callable[..., Transfer], *arguments: Any) -> Transfer:
        """A transfer in a thread; cancelled, it is ended, and all of it removed, on either side."""
        line = BlockingConnection(self.address, transfer.PIECE_TIMEOUT_S)

        def move() -> Transfer:
            with line:
                return function(line.ask, *arguments)

        return await connection.in_thread(move, on_cancel=line.hang_up, threads=TRANSFER_THREADS)

    async def _ask_aside(
        self, op: str, wait_s: float = REQUEST_TIMEOUT_S, /, **fields: Any
    ) -> dict[str, Any]:
        """A request on a connection of its own, so that it is answered while another call runs a command."""
        async with SandboxClient(self.address) as aside:
            aside.journal = self.journal
            return await aside._ask(op, wait_s, **fields)

    async def _ask(self, op: str, wait_s: float = REQUEST_TIMEOUT_S, /, **fields: Any) -> dict[str, Any]:
        """A request in its turn; its reply is waited for at most `wait_s` seconds."""
        numbers = self.journal if op in journal.NUMBERED else None
        reply = None if numbers is None else numbers.recall()
        if reply is None:
            ask = connection.round_trip if numbers is None else partial(journal.round_trip, numbers)
            async with self._lock:
                try:
                    if self._line is None:
                        self._line = await connection.connect(self.address)
                    reply = await ask(self._line, self.address, {"op": op, **fields}, wait_s)
                finally:
                    if reply is None:  # cancelled, overdue or broken: the next call begins a new connection
                        await self.close()
        return connection.result_of(reply, self.address)


def _bash_result(reply: dict[str, Any]) -> BashResult:
    """What this side knows of an answer: an adopted sandbox has the server that it began with."""
    return BashResult(**{name: value for name, value in reply.items() if name in BASH_FIELDS})


def _encoded(content: bytes | str) -> str:
    return base64.b64encode(content.encode() if isinstance(content, str) else content).decode()
