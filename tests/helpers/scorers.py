"""Functions for scorer processes, good and bad."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

calls = 0


def add(payload: dict[str, Any]) -> dict[str, Any]:
    """A sum, and which process made it as which of its calls."""
    global calls
    calls += 1
    return {"sum": payload["a"] + payload["b"], "pid": os.getpid(), "call": calls}


def environment(names: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def surroundings(payload: Any) -> dict[str, Any]:
    """What a scorer can see and do."""
    status = dict(
        line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
    )
    try:
        parent = Path(f"/proc/{os.getppid()}/environ").read_text()
    except OSError as error:
        parent = type(error).__name__
    return {
        "interfaces": [name for _, name in socket.if_nameindex()],
        "capabilities": {name: status[name] for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")},
        "no_new_privileges": status["NoNewPrivs"],
        "uid": os.getuid(),
        "parent": parent,
        "processes": [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()],
    }


def environment_of_relatives(payload: Any) -> str:
    """The environments of this process and its parent, as far as they are open to it."""
    texts = []
    for pid in {os.getpid(), os.getppid()}:
        try:
            texts.append(Path(f"/proc/{pid}/environ").read_text())
        except OSError as error:
            texts.append(str(error))
    return " ".join(texts)


def memory_of_parent(payload: Any) -> str:
    """Open the parent's memory for writing, and leave it as it is."""
    try:
        with Path(f"/proc/{os.getppid()}/mem").open("r+b"):
            return "opened"
    except OSError as error:
        return str(error)


def connect(port: int) -> str:
    """Connect to a port of the machine."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return "connected"
    except OSError as error:
        return str(error)


def crash_or_add(payload: dict[str, Any]) -> int:
    """Crash as many times as the payload says, then give a sum."""
    if "path" in payload:
        with Path(payload["path"]).open("a") as file:
            file.write("x")
        if Path(payload["path"]).stat().st_size <= payload["times"]:
            ctypes.string_at(0)
    return payload["a"] + payload["b"]


def fail(payload: Any) -> None:
    raise ValueError(f"cannot judge {payload}")


def leave(payload: Any) -> None:
    sys.exit(0)


def no_json(payload: Any) -> Any:
    return {1, 2}


def mark_and_hang(path: str) -> None:
    """Say that it runs, and in which process, then never return."""
    Path(path).write_text(str(os.getpid()))
    while True:
        time.sleep(3600)


def exits(payload: Any) -> None:
    print("last words", flush=True)
    os._exit(9)


def segfault(payload: Any) -> None:
    ctypes.string_at(0)


def eat_memory(payload: Any) -> int:
    held = []
    while True:
        held.append(bytearray(16 << 20))


def keep_memory(megabytes: int) -> int:
    """Hold on to it after the call."""
    global kept
    kept = b"x" * (megabytes << 20)
    return os.getpid()


def forks(path: str) -> int:
    """Leave a fork, a program in a session of its own, and an orphan of another program; all of them sleep.

    Their pids are in the file, in this order.
    """
    if (fork := os.fork()) == 0:
        # A fork that returns from the function would answer a second time.
        time.sleep(3600)
    program = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    shell = "sleep 3600 >/dev/null 2>&1 & echo $!"
    orphan = subprocess.check_output(["sh", "-c", shell], start_new_session=True, text=True)
    Path(path).write_text(f"{fork} {program.pid} {orphan}")
    return os.getpid()


def forks_and_hangs(path: str) -> None:
    forks(path)
    while True:
        time.sleep(3600)


def fork_returns(payload: Any) -> int:
    """Both the process and its fork come back from here."""
    return os.fork() and os.getpid()


def noise(payload: Any) -> str:
    """Write to both outputs, by Python and beneath it, more than a pipe holds."""
    for _ in range(100):
        print('{"result": "forged"}' * 50)
        sys.stderr.write("error\n" * 50)
    os.write(1, b"\x00\x00\x00\x02{}" * 20000)
    os.write(2, b"x" * 200000)
    return "quiet"


def alarm(seconds: float) -> str:
    """A time-out as math-verify makes one: by SIGALRM."""

    def ring(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        time.sleep(3600)
    except TimeoutError:
        return "rang"
    return "slept"


def leave_alarm(seconds: float) -> int:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return os.getpid()


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def hang(payload: Any) -> None:
    while True:
        time.sleep(3600)


def all_readable(payload: Any) -> dict[str, Any]:
    return {"unreadable": []}
