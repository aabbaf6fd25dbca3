"""Child processes by identity: started in a group of their own, told from a later owner of their pid.

A process is one of ours if its pid and start time were written down when it was started, or if its
environment carries the stack's random mark. Nothing is ever looked up by name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MARK = "ROLLOUT_STACK"
"""Environment variable that holds the stack's mark."""
SANDBOX_MARK = "ROLLOUT_SANDBOX_STACK"
"""The same for the sandbox host, which takes over nothing of its environment but `ROLLOUT_SANDBOX_*`."""
POLL_S = 0.03
KILL_WAIT_S = 5.0
"""Seconds that the kernel may take to end a killed process (it may sit in a disk write)."""
_STATE, _PGRP, _START = 0, 2, 19
"""Positions in /proc/PID/stat behind the command name (proc_pid_stat(5), fields 3, 5, 22)."""


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    return text.rpartition(")")[2].split()


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a live process; None when it is gone or a zombie."""
    # A child of our own that ended is collected here, so that it does not linger.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    fields = _stat(pid)
    return None if fields is None or fields[_STATE] in "ZX" else int(fields[_START])


@dataclass(frozen=True)
class Process:
    """A process we started; it leads its own session and group."""

    name: str
    pid: int
    started: int
    """Clock ticks from boot; with the pid it names the process for good."""
    log: str

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.started

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Adopted:
    """A process that is no child of ours, with what is needed of `subprocess.Popen`."""

    returncode: int | None = None
    """Nobody can tell."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        """None while it lives."""
        return None if self._process.alive else -1

    @property
    def replaced(self) -> bool:
        """Whether its pid is another process's by now."""
        return start_time(self.pid) not in (None, self._process.started)

    def terminate(self) -> None:
        _signal((self.pid, self._process.started), signal.SIGTERM)

    def wait(self, timeout: float) -> None:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It lives on.
        """
        if not _gone([(self.pid, self._process.started)], timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)


def spawn(name: str, command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> Process:
    """Start a command in a new session, its output in `log` (which is emptied)."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    started = start_time(child.pid)
    # It is collected by `start_time`, or by init when it outlives us; Popen need not warn of it.
    child.returncode = 0
    return Process(name, child.pid, started if started is not None else -1, str(log))


def marked(mark: str) -> Iterator[int]:
    """Pids of live processes, ourselves left out, whose environment carries the mark."""
    wanted = {f"{name}={mark}".encode() for name in (MARK, SANDBOX_MARK)}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            found = not wanted.isdisjoint((entry / "environ").read_bytes().split(b"\0"))
        except OSError:  # gone, or another user's
            continue
        if found and start_time(int(entry.name)) is not None:
            yield int(entry.name)


def _signal(identity: tuple[int, int], number: int) -> None:
    pid, started = identity
    if start_time(pid) == started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _gone(identities: Iterable[tuple[int, int]], within: float) -> bool:
    end = time.monotonic() + within
    left = list(identities)
    while True:
        left = [(pid, started) for pid, started in left if start_time(pid) == started]
        if not left:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)


def end(processes: Iterable[Process], grace: float) -> list[Process]:
    """TERM, then after `grace` seconds KILL; with each goes what is left of its group.

    Returns those that were alive.
    """
    live = [process for process in processes if process.alive]
    # Members are taken down before the leader ends: afterwards the group's number could be another's.
    members = {process: _members(process.pid) for process in live}
    for process in live:
        _signal((process.pid, process.started), signal.SIGTERM)
    if not _gone([(p.pid, p.started) for p in live], grace):
        for process in live:
            _signal((process.pid, process.started), signal.SIGKILL)
    rest = [identity for group in members.values() for identity in group]
    for identity in rest:
        _signal(identity, signal.SIGKILL)
    _gone([*((p.pid, p.started) for p in live), *rest], KILL_WAIT_S)
    return live


def _members(group: int) -> list[tuple[int, int]]:
    """Pid and start time of the members of a process group, its leader left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == group:
            continue
        fields = _stat(int(entry.name))
        if fields is not None and int(fields[_PGRP]) == group and fields[_STATE] not in "ZX":
            found.append((int(entry.name), int(fields[_START])))
    return found


def end_marked(mark: str, grace: float) -> int:
    """End every process that still carries the mark; returns how many there were."""
    total = 0
    for _ in range(5):  # one may start another while we look
        found = [(pid, started) for pid in marked(mark) if (started := start_time(pid)) is not None]
        if not found:
            break
        total += len(found)
        for identity in found:
            _signal(identity, signal.SIGTERM)
        if not _gone(found, grace):
            for identity in found:
                _signal(identity, signal.SIGKILL)
            _gone(found, KILL_WAIT_S)
    return total


def tail(path: str | Path, lines: int = 20) -> str:
    """The last lines of a log, or a word that there are none."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        return f"({error})"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"
