"""Who is at the other end of a Unix socket: one of ours, or somebody in a sandbox.

A read-only mount keeps nobody from connecting to a socket that lies in it. So the host asks the kernel who
has connected, and answers nobody in another user or PID namespace than its own: every container has its own.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from pathlib import Path
from typing import Any

SO_PEERPIDFD = 77
"""Linux 6.5 and newer, asm-generic/socket.h; Python has no name for it."""
CREDENTIALS = struct.Struct("3i")
NAMESPACES = ("user", "pid")


def refusal(connection: Any) -> str | None:
    """Why whoever has connected is not to be answered; None = it may be.

    The descriptor of the process keeps its pid from becoming another's meanwhile. Kernels before 6.5 give it
    only from the pid: who connects and ends before that is looked at may be taken for the next of that pid.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(raw)
    if pid <= 0:
        return "it runs in another PID namespace"
    try:
        process = _open(connection, pid)
    except OSError as error:
        return f"process {pid} has ended: {error}"
    try:
        for name in NAMESPACES:
            if _namespace(pid, name) != _namespace(os.getpid(), name):
                return f"process {pid} runs in another {name} namespace"
        ended = select.poll()  # not `select`, which takes no descriptor above 1023
        ended.register(process, select.POLLIN)
        if ended.poll(0):  # what was read may be the next one's of that pid
            return f"process {pid} has ended"
    except OSError as error:
        return f"process {pid} cannot be looked at: {error}"
    finally:
        os.close(process)
    return None if uid in (0, os.geteuid()) else f"uid {uid} is not ours"


def _open(connection: Any, pid: int) -> int:
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if isinstance(error, ProcessLookupError):
            raise
    return os.pidfd_open(pid)


def _namespace(pid: int, name: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{name}").readlink())
