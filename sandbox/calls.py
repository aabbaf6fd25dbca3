"""The operations of a sandbox, free of I/O: `SandboxClient` and `SyncSandboxClient` both drive these.

Each is a generator: it yields :class:`Request`\\ s, is sent their results, and returns the operation's value.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar

REPLY_GRACE_S = 15.0
"""Beyond a command's own limit: the server's escalation of signals and a new shell take at most about half of
it.
"""
EXEC_GRACE_S = 30.0
"""Beyond a program's own limit: all processes are ended before it and after it."""
REQUEST_TIMEOUT_S = 30.0
KERNEL_START_S = 100.0
"""More than the server gives a kernel to start. It is waited for before the cell's own time begins."""
MAX_OUTPUT_CHARS = 30_000

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Request:
    """One frame to the sandbox's server."""

    body: dict[str, Any]
    timeout_s: float = REQUEST_TIMEOUT_S
    """Seconds to wait for the reply."""
    aside: bool = False
    """On a connection of its own, so that it is answered while another call runs a command."""


Call = Generator[Request, dict[str, Any], T]


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


def _bash_result(reply: dict[str, Any]) -> BashResult:
    names = {field.name for field in dataclasses.fields(BashResult)}
    return BashResult(**{key: value for key, value in reply.items() if key in names})


def bash(
    command: str,
    timeout: float,
    max_output_chars: int,
    on_timeout: str = "kill",
    quiet_timeout: float | None = None,
) -> Call[BashResult]:
    """Run a command in the persistent shell."""
    body = {
        "op": "bash",
        "command": command,
        "timeout": timeout,
        "max_chars": max_output_chars,
        "on_timeout": on_timeout,
        "quiet_timeout": quiet_timeout,
    }
    return _bash_result((yield Request(body, timeout + REPLY_GRACE_S)))


TRUSTED_PYTHON = "@python"
"""As first argument of `exec`: the Python that runs the sandbox's own server, mounted read-only. Only the
standard library is there: no module of the working directory, of a user or of the environment is found.
"""


@dataclasses.dataclass(frozen=True)
class ExecResult:
    """What a program did that the sandbox's server ran alone, with no shell. Only the two outputs are the
    word of processes in the sandbox: the program's own, and its children's.
    """

    exit_code: int | None
    """None when it did not end by itself: killed by a signal, at the time limit, or not started."""
    signal: int | None
    """Number of the signal that ended it."""
    stdout: str
    """Decoded as UTF-8 with U+FFFD for what is not, cut in the middle when longer than asked for; with
    `merge_output` both outputs in the order they were written.
    """
    stderr: str
    truncated: bool
    """Whether one of the outputs was cut."""
    timed_out: bool
    interrupted: bool
    """It was ended by a `reset`."""
    not_started: str | None
    """Why it could not be started: no such program or directory, no leave. The agent may have brought that
    about, so it is a result and no exception.
    """
    limit_exceeded: str | None
    """The sandbox was over a limit and all its processes were ended: which limit, in words."""
    wall_s: float
    cpu_s: float
    """Of the program and of those children that it waited for."""


def execute(
    argv: Sequence[str],
    timeout: float,
    cwd: str | None,
    env: Mapping[str, str] | None,
    stdin: bytes | str,
    limits: Mapping[str, float] | None,
    merge_output: bool,
    max_output_chars: int,
) -> Call[ExecResult]:
    """Run a program alone."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    body = {
        "op": "exec",
        "argv": list(argv),
        "timeout": timeout,
        "cwd": cwd,
        "env": dict(env or {}),
        "stdin": base64.b64encode(data).decode(),
        "limits": dict(limits or {}),
        "merge": merge_output,
        "max_chars": max_output_chars,
    }
    return ExecResult(**(yield Request(body, timeout + EXEC_GRACE_S)))


def send_input(
    text: str, timeout: float, quiet_timeout: float | None, max_output_chars: int
) -> Call[BashResult]:
    """Type to the running command."""
    body = {
        "op": "input",
        "text": text,
        "timeout": timeout,
        "quiet_timeout": quiet_timeout,
        "max_chars": max_output_chars,
    }
    return _bash_result((yield Request(body, timeout + REPLY_GRACE_S, aside=True)))


def reset() -> Call[BashResult]:
    """End all processes and start a fresh shell."""
    return _bash_result((yield Request({"op": "reset"}, aside=True)))


def setup(env: dict[str, str]) -> Call[None]:
    """Add environment variables."""
    yield Request({"op": "setup", "env": env})


def interrupt() -> Call[bool]:
    """End the running command."""
    return (yield Request({"op": "interrupt"}, aside=True))["was_running"]


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


def ipython(code: str, timeout: float, max_output_chars: int) -> Call[IPythonResult]:
    """Run a cell in the persistent IPython kernel."""
    body = {"op": "ipython", "code": code, "timeout": timeout, "max_chars": max_output_chars}
    return IPythonResult(**(yield Request(body, timeout + KERNEL_START_S + REPLY_GRACE_S)))


def ipython_warm() -> Call[None]:
    """Start the kernel in the background."""
    yield Request({"op": "ipython_warm"}, aside=True)


def ipython_interrupt() -> Call[bool]:
    """Interrupt the running cell."""
    return (yield Request({"op": "ipython_interrupt"}, aside=True))["was_running"]


def ipython_restart() -> Call[None]:
    """End the kernel and start another."""
    yield Request({"op": "ipython_restart"}, aside=True)


@dataclasses.dataclass(frozen=True)
class EditorResult:
    """What the editor answered."""

    ok: bool
    """False: nothing was done, and the output tells the model why and what to do instead."""
    output: str


def editor(command: str, path: str, options: dict[str, Any]) -> Call[EditorResult]:
    """One command of the file editor."""
    return EditorResult(**(yield Request({"op": "editor", "command": command, "path": path, **options})))


def ping() -> Call[dict[str, Any]]:
    """Proof of life."""
    return (yield Request({"op": "ping"}, aside=True))


def read_file(path: str, max_bytes: int | None) -> Call[bytes]:
    """Content of a regular file."""
    result = yield Request({"op": "read_file", "path": path, "max_bytes": max_bytes})
    return base64.b64decode(result["content"])


def write_file(path: str, content: bytes | str, mode: int | None) -> Call[None]:
    """Write a file, making its directories."""
    data = content.encode() if isinstance(content, str) else content
    body = {"op": "write_file", "path": path, "content": base64.b64encode(data).decode(), "mode": mode}
    yield Request(body)
