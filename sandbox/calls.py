"""The operations of a sandbox, free of I/O: `SandboxClient` and `SyncSandboxClient` both drive these.

Each is a generator: it yields :class:`Request`\\ s, is sent their results, and returns the operation's value.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Generator
from typing import Any, TypeVar

REPLY_GRACE_S = 15.0
"""Beyond a command's own limit: the server's escalation of signals and a new shell take at most about half of
it.
"""
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


def bash(command: str, timeout: float, max_output_chars: int) -> Call[BashResult]:
    """Run a command in the persistent shell."""
    body = {"op": "bash", "command": command, "timeout": timeout, "max_chars": max_output_chars}
    return BashResult(**(yield Request(body, timeout + REPLY_GRACE_S)))


def send_input(text: str) -> Call[None]:
    """Type to the running command."""
    yield Request({"op": "input", "text": text}, aside=True)


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
