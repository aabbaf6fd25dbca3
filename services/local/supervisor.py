"""Keeps programs alive, and ends them in order: those of one Slurm job, or of the stack of one machine.

The batch script of a Slurm job becomes this process, so Slurm's signals arrive here: USR1 means that the end
is near, or that somebody wants the job to end (then `control/` says how long it may take); TERM that it is
now.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.local import paths
from services.local.plan import Part
from services.local.processes import Adopted, tail

log = structlog.get_logger("supervisor")

START_S = 180.0
"""For a part to answer: imports from a parallel file system that a hundred nodes read at once are slow."""
SETTLED_S = 60.0
"""A part that lived so long starts anew at once when it ends."""
LONGEST_PAUSE_S = 30.0
KILL_S = 5.0
POLL_S = 0.1
LOOK_S = 1.0
"""Between two looks at the parts."""
KEEPS_ENDING = 2
"""Ends in a row from which on somebody should be told."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
"""Loaded here: little is safe between fork and exec, where other threads may have held locks."""


def _die_with_parent() -> None:
    """A Redis that outlived a killed supervisor would write beside the next one."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Child:
    """A running part."""

    part: Part
    env: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | Adopted
    started: float
    failures: int = 0
    """Ends in a row without having settled."""
    restarts: int = 0
    """How often it was started anew."""
    exit: int | None = 0
    """Status of the last end; below 0 = the signal that ended it, None = nobody saw it."""
    again_at: float | None = None
    """When it is to be started anew; None while it runs."""
    wanted: bool = True

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class Supervisor:
    """Starts parts, starts them anew when they end, ends them."""

    def __init__(
        self, logs: Path, error: type[RuntimeError] = RuntimeError, *, die_with_parent: bool = False
    ) -> None:
        """
        Args:
            error: Raised where a part does not start.
            die_with_parent: The parts end with this process, however it ends.
        """
        self.logs = logs
        self._error = error
        self._before_exec = _die_with_parent if die_with_parent else None
        logs.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, Child] = {}
        self.signal: int | None = None
        """The gravest signal so far: TERM before USR1."""

    def listen(self) -> None:
        """Take note of signals from now on."""
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)
        # A hang-up of the terminal that an allocation was made from is no reason to end.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _hear(self, number: int, _frame: object) -> None:
        if self.signal != signal.SIGTERM:
            self.signal = signal.SIGTERM if number == signal.SIGINT else number

    def pause(self, seconds: float) -> None:
        """Wait, until a signal came at most.

        No event of `threading`: its lock may be held by the very code that a signal interrupts.
        """
        end = time.monotonic() + seconds
        while self.signal is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left))

    def note_end(self, near: bool) -> None:
        """What USR1 says, for a step: Slurm's signals to steps reach every process in them."""
        if near and self.signal is None:
            self.signal = signal.SIGUSR1

    @property
    def near_limit(self) -> bool:
        """Whether all that is known is that the end is near."""
        return self.signal == signal.SIGUSR1

    @property
    def ends_now(self) -> bool:
        return self.signal == signal.SIGTERM

    def start(self, part: Part, env: Mapping[str, str]) -> Child:
        path = part_log(self.logs, part.name)
        child = self.children[part.name] = Child(
            part, dict(env), path, self._spawn(part, env, path), time.monotonic()
        )
        log.info("started", part=part.name, pid=child.process.pid, log=str(path))
        return child

    def adopt(self, part: Part, env: Mapping[str, str], path: Path, process: Adopted) -> Child:
        """Look after a part that somebody else has started."""
        child = self.children[part.name] = Child(part, dict(env), path, process, time.monotonic())
        return child

    def _spawn(self, part: Part, env: Mapping[str, str], path: Path) -> subprocess.Popen[bytes]:
        with path.open("ab") as output:
            return subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=paths.REPO,
                start_new_session=True,
                preexec_fn=self._before_exec,
            )

    def look(self) -> None:
        """Start anew what has ended; ever later where it ends at once."""
        now = time.monotonic()
        for child in self.children.values():
            if not child.wanted or child.alive:
                continue
            if child.again_at is None:
                child.failures = 0 if now - child.started > SETTLED_S else child.failures + 1
                child.exit = child.process.returncode
                pause = min(LONGEST_PAUSE_S, 2.0**child.failures)
                child.again_at = now + pause
                # What it left behind may hold its port.
                _kill_group(child.process)
                with contextlib.suppress(OSError):  # the disk of the log may be full
                    log.error(
                        "ended by itself and will be started anew",
                        part=child.part.name,
                        exit=child.exit,
                        in_s=pause,
                        log=str(child.log),
                    )
            elif now >= child.again_at and self.signal is None:
                try:
                    child.process = self._spawn(child.part, child.env, child.log)
                except OSError as error:  # no memory, no process, no disk: there may be some later
                    child.again_at = now + LONGEST_PAUSE_S
                    with contextlib.suppress(OSError):
                        log.error("cannot be started anew yet", part=child.part.name, error=str(error))
                    continue
                child.started = now
                child.again_at = None
                child.restarts += 1

    def failing(self) -> dict[str, str]:
        """Parts that keep ending, and how."""
        now = time.monotonic()
        return {
            name: f"{ended(child.exit)}, {child.failures} times in a row"
            for name, child in self.children.items()
            if child.failures >= KEEPS_ENDING and not (child.alive and now - child.started > SETTLED_S)
        }

    def wait_for(self, child: Child, missing: Callable[[], str | None], patience_s: float = START_S) -> None:
        """Wait until `missing` gives None.

        Raises:
            RuntimeError: The part ended, or does not answer in time; with the end of its log.
            Interrupted: The job is to end.
        """
        deadline = time.monotonic() + patience_s
        while (reason := missing()) is not None:
            if self.signal is not None:
                raise Interrupted
            if not child.alive or time.monotonic() > deadline:
                what = f"is not ready after {patience_s:.0f} s ({reason})" if child.alive else "ended"
                raise self._error(f"{child.part.name} {what}. The end of {child.log}:\n{tail(child.log)}")
            self.pause(POLL_S)

    def lives(self, name: str) -> bool:
        """Whether there is such a part and it runs."""
        return name in self.children and self.children[name].alive

    def dismiss(self, names: list[str]) -> None:
        """TERM to all of these at once; they are not started anew. `stop` still has to be called."""
        for name in names:
            if child := self.children.get(name):
                child.wanted = False
                if child.alive:
                    child.process.terminate()

    def stop(self, names: list[str], grace_s: float) -> None:
        """TERM to all of these at once, KILL after `grace_s`; with each goes its session."""
        self.dismiss(names)
        chosen = [self.children[name] for name in names if name in self.children]
        deadline = time.monotonic() + grace_s
        while any(child.alive for child in chosen) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for child in chosen:
            if child.alive:
                log.warning("did not end in time and is killed", part=child.part.name, after_s=grace_s)
            _kill_group(child.process)
            try:
                child.process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                log.error("cannot be killed", part=child.part.name, pid=child.process.pid)
            self.children.pop(child.part.name, None)

    def stop_all(self, grace_s: float) -> None:
        """End whatever is left."""
        self.stop(list(self.children), grace_s)


def part_log(directory: Path, part: str) -> Path:
    """What a program says, in a job's directory of logs."""
    return directory / f"{part.replace(' ', '-')}.log"


def ended(status: int | None) -> str:
    """How a process ended, for people."""
    if status is None:
        return "nobody saw how"
    return f"signal {-status}" if status < 0 else f"exit code {status}"


def _kill_group(process: subprocess.Popen | Adopted) -> None:
    """What is left of a part's group: its number is nobody else's while a member lives.

    Of a group that was not ours to wait for, no member may have lived for long.
    """
    if isinstance(process, Adopted) and process.replaced:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Interrupted(Exception):
    """The job was told to end while it waited for something."""
