"""The scorer process: `python -m workers.scoring.child FD PARENT MEMORY_MB`, started by `process.py`.

It takes calls from one socket, one after the other, on its main thread. It must stay light: only the standard
library is imported here, the rest by the functions that are called.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pkgutil
import resource
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from workers.scoring import wire
from workers.scoring.isolation import die_with, isolate

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
MAX_TRACEBACK = 4000
"""Characters of a traceback that are sent; the end says what happened."""
CPU_SLACK_S = 60
OOM_SCORE = "500"
"""The kernel, out of memory, shall take a scorer before its worker."""


def _prepare(channel: socket.socket, parent: int, memory_mb: int) -> None:
    die_with(parent)
    # What a function starts and forgets comes back to this process, which then says so.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    limit = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)

    def forked() -> None:
        # A fork must neither answer in our name nor outlive us.
        channel.close()
        die_with(os.getppid())

    os.register_at_fork(after_in_child=forked)


def _limit_cpu(seconds: float) -> None:
    """A backstop for when the worker is stopped and cannot keep the time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = usage.ru_utime + usage.ru_stime
    soft = int(used + seconds * (os.cpu_count() or 1)) + CPU_SLACK_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def _failure(error: BaseException) -> dict[str, Any]:
    lines = "".join(traceback.format_exception(error))
    return {
        "error": _printable(f"{type(error).__name__}: {error}"[:MAX_TRACEBACK]),
        "traceback": _printable(lines[-MAX_TRACEBACK:]),
        "memory": isinstance(error, MemoryError),
    }


def _printable(text: str) -> str:
    """A model can say half a surrogate pair, and no record of a failure can carry it."""
    return text.encode(errors="backslashreplace").decode()


def _has_children() -> bool:
    """Whether the function left processes behind; those that have ended are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _answer(channel: socket.socket, call: dict[str, Any], missing: str | None) -> bytes:
    """Do one call; the frame that answers it. `missing`: what :func:`isolate` said."""
    me = os.getpid()
    try:
        function = pkgutil.resolve_name(call["function"])
        channel.sendall(wire.encode({"loaded": missing}))
        _limit_cpu(call["timeout_s"])
        outcome = {"result": function(call["payload"])}
    except BaseException as error:
        outcome = _failure(error)
    if os.getpid() != me:
        os._exit(0)
    # An alarm that the function left set would end the next one.
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    state = {"children": _has_children(), "rss": _rss_bytes()}
    try:
        return wire.encode(outcome | state)
    except (TypeError, ValueError, RecursionError) as error:
        return wire.encode(_failure(TypeError(f"the result is no JSON: {error}")) | state)


def main(argv: list[str]) -> None:
    fd, parent, memory_mb = (int(word) for word in argv)
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    missing = isolate()
    _prepare(channel, parent, memory_mb)
    with suppress(EOFError, ConnectionError):  # the worker is gone, or has no more use for this process
        while True:
            channel.sendall(_answer(channel, wire.receive(channel), missing))


if __name__ == "__main__":
    main(sys.argv[1:])
