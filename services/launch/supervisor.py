"""Keeps programs alive and ends them with all that they started: those of a stack, or of one Slurm job.

A process is one of ours if its pid and start time were written down when it was started, or if its
environment carries the stack's random mark. Nothing is ever looked up by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import structlog

from services.launch import paths

log = structlog.get_logger("supervisor")

MARK = "ROLLOUT_STACK"
"""Environment variable that holds the stack's mark."""
SANDBOX_MARK = "ROLLOUT_SANDBOX_STACK"
"""The same for the sandbox host, which takes over nothing of its environment but `ROLLOUT_SANDBOX_*`."""
START_S = 180.0
"""For a part to answer: imports from a parallel file system that a hundred nodes read at once are slow."""
SETTLED_S = 60.0
"""A part that lived so long starts anew at once when it ends."""
LONGEST_PAUSE_S = 30.0
KILL_S = 5.0
"""The kernel may take so long to end a killed process, which may sit in a disk write."""
POLL_S = 0.05
LOOK_S = 1.0
"""Between two looks at the parts."""
KEEPS_ENDING = 2
"""Ends in a row from which on somebody should be told."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
"""Loaded here: little is safe between fork and exec, where other threads may have held locks."""


# ------------------------------------------------------------------------------ processes


def is_alive(process: psutil.Process) -> bool:
    """Whether that very process runs. A zombie does not; one of our own children is collected."""
    try:
        process.wait(0)
    except psutil.TimeoutExpired:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def started_at(process: psutil.Process) -> float:
    """Seconds from boot to the start of the process: no change of the clock changes them."""
    boot = psutil.boot_time()
    return round(process.create_time() - boot, 2)


def _end(processes: list[psutil.Process], grace_s: float) -> None:
    """Send TERM, and KILL to what lives on after `grace_s` seconds."""
    _send(processes, signal.SIGTERM)
    if not _wait_gone(processes, grace_s):
        stubborn = [process for process in processes if is_alive(process)]
        pids = [process.pid for process in stubborn]
        log.warning("did not end in time and is killed", pids=pids, after_s=grace_s)
        _send(stubborn, signal.SIGKILL)
        if not _wait_gone(stubborn, KILL_S):
            log.error("cannot be killed", pids=pids)


def marked(mark: str) -> Iterator[psutil.Process]:
    """Live processes, ourselves left out, whose environment carries the mark."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it is gone, a zombie, or another user's
            environment = process.environ()
            if mark in (environment.get(MARK), environment.get(SANDBOX_MARK)) and process.pid != os.getpid():
                yield process


def end_marked(mark: str, grace_s: float) -> int:
    """End every process that still carries the mark; returns how many there were."""
    total = 0
    for _ in range(5):  # one may start another while we look
        strays = list(marked(mark))
        if not strays:
            break
        total += len(strays)
        _end(strays, grace_s)
    return total


def _send(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended, and its pid may be another's
            process.send_signal(number)


def _wait_gone(processes: Iterable[psutil.Process], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    living = list(processes)
    while living := [process for process in living if is_alive(process)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _group(leader: psutil.Process) -> list[psutil.Process]:
    """Members of the group that a process leads or led, itself left out.

    The group's number is nobody else's while a member lives; afterwards it may be.
    """
    if psutil.pid_exists(leader.pid) and not leader.is_running():
        return []
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if process.pid != leader.pid and os.getpgid(process.pid) == leader.pid:
                members.append(process)
    return members


# ------------------------------------------------------------------------------ parts


@dataclass
class Part:
    """A program to keep running, and how it fares: its fields are what a stack's record has of it."""

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    log: str = ""
    pid: int = 0
    started: float = 0.0
    """Seconds from boot; with the pid it names the process for good."""
    restarts: int = 0
    """How often it was started anew."""
    away: bool = False
    """True: it has ended and waits for that."""
    ended_at: float | None = None
    """When it ended last; seconds since the epoch."""
    exit: int | None = None
    """Status of its last end; below 0 = the signal that ended it, None = nobody saw it."""
    dismissed: bool = False
    """It is not started anew when it ends."""

    def __post_init__(self) -> None:
        self._process: psutil.Process | None = None
        self.begun = time.monotonic()
        """When it was started, or first looked after."""
        self.failures = 0
        """Ends in a row without having settled."""
        self.again_at: float | None = None
        """When it is to be started anew, by the monotonic clock; None while it runs."""

    @property
    def process(self) -> psutil.Process | None:
        """The process that was started as this part; None when its pid is nobody's or another's by now."""
        if self._process is None and self.pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(self.pid)
                self._process = process if started_at(process) == self.started else None
        return self._process

    @property
    def alive(self) -> bool:
        return self.process is not None and is_alive(self.process)

    @property
    def group(self) -> list[psutil.Process]:
        """Members of its group, itself left out; of a part that ended unseen those that carry its mark."""
        if self.process is not None:
            return _group(self.process)
        mark = self.env.get(MARK)
        members = []
        for process in marked(mark) if mark and self.pid else ():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == self.pid:
                    members.append(process)
        return members

    def start(self, before_exec: Callable[[], None] | None = None) -> None:
        """Start it, in a session of its own.

        Raises:
            OSError: There is no memory, no process, no disk, or no such program.
        """
        with Path(self.log).open("ab") as output:
            child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=paths.REPO,
                start_new_session=True,
                preexec_fn=before_exec,
            )
        self._process = psutil.Process(child.pid)
        # It is collected by `is_alive`, or by init when it outlives us; Popen need not warn of it.
        child.returncode = 0
        self.pid, self.started = child.pid, started_at(self._process)
        self.begun, self.again_at, self.away = time.monotonic(), None, False


def stop(parts: Iterable[Part], grace_s: float) -> list[Part]:
    """TERM to all of these at once, KILL after `grace_s` seconds; with each goes its group.

    Returns:
        Those that were alive.
    """
    chosen = list(parts)
    living = [part for part in chosen if part.alive]
    before = [member for part in chosen for member in part.group]
    _end([part.process for part in living if part.process is not None], grace_s)
    rest = [*before, *(member for part in chosen for member in part.group)]
    _send(rest, signal.SIGKILL)
    _wait_gone(rest, KILL_S)
    return living


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
        self.parts: dict[str, Part] = {}
        self.signal: int | None = None
        """The gravest signal so far: TERM before USR1."""

    # -- signals -----------------------------------------------------------------------------

    def listen(self) -> None:
        """Take note of signals from now on.

        USR1 means that the end is near, or that somebody wants a Slurm job to end; TERM that it is now.
        """
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
        deadline = time.monotonic() + seconds
        while self.signal is None and (rest := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_S, rest))

    @property
    def near_limit(self) -> bool:
        """Whether all that is known is that the end is near."""
        return self.signal == signal.SIGUSR1

    @property
    def ends_now(self) -> bool:
        return self.signal == signal.SIGTERM

    # -- start -------------------------------------------------------------------------------

    def start(self, part: Part, env: Mapping[str, str]) -> Part:
        """Start a part with this environment; it logs to `part_log` unless it names another file."""
        part.env = dict(env)
        part.log = part.log or str(part_log(self.logs, part.name))
        part.start(self._before_exec)
        self.parts[part.name] = part
        return part

    def wait_for(
        self,
        part: Part,
        missing: Callable[[], str | None],
        patience_s: float = START_S,
        beside: Iterable[Part] = (),
    ) -> None:
        """Wait until `missing` gives None.

        Args:
            beside: Further parts that must not end meanwhile.

        Raises:
            RuntimeError: A part ended, or does not answer in time; with the end of its log.
            Interrupted: The job is to end.
        """
        together = [part, *beside]
        deadline = time.monotonic() + patience_s
        while (reason := missing()) is not None:
            if self.signal is not None:
                raise Interrupted
            if gone := next((other for other in together if not other.alive), None):
                raise self.failure(gone, "ended")
            if time.monotonic() > deadline:
                raise self.failure(part, f"is not ready after {patience_s:.0f} s ({reason})")
            self.pause(POLL_S)

    def failure(self, part: Part, what: str) -> RuntimeError:
        """An error that says what became of a part, with the end of its log."""
        return self._error(f"{part.name} {what}. The end of {part.log}:\n{tail(part.log)}")

    # -- keep alive --------------------------------------------------------------------------

    def look(self) -> None:
        """Start anew what has ended; ever later where it ends at once."""
        now = time.monotonic()
        for part in self.parts.values():
            if part.dismissed or part.alive:
                continue
            if part.again_at is None:
                self._note_end(part, now)
            elif now >= part.again_at and self.signal is None:
                self._start_anew(part, now)

    def _note_end(self, part: Part, now: float) -> None:
        part.failures = 0 if now - part.begun > SETTLED_S else part.failures + 1
        pause_s = min(LONGEST_PAUSE_S, 2.0**part.failures)
        part.again_at = now + pause_s
        part.away, part.ended_at, part.exit = True, time.time(), None
        if part.process is not None:
            with contextlib.suppress(psutil.TimeoutExpired):  # somebody else's child, not collected yet
                part.exit = part.process.wait(0)
        # What it left behind may hold its port.
        _send(part.group, signal.SIGKILL)
        with contextlib.suppress(OSError):  # the disk of the log may be full
            log.error(
                "ended by itself and will be started anew",
                part=part.name,
                exit=part.exit,
                in_s=pause_s,
                log=part.log,
            )

    def _start_anew(self, part: Part, now: float) -> None:
        try:
            part.start(self._before_exec)
        except OSError as error:  # no memory, no process, no disk: there may be some later
            part.again_at = now + LONGEST_PAUSE_S
            with contextlib.suppress(OSError):
                log.error("cannot be started anew yet", part=part.name, error=str(error))
            return
        part.restarts += 1

    def failing(self) -> dict[str, str]:
        """Parts that keep ending, and how."""
        now = time.monotonic()
        return {
            name: f"{ended(part.exit)}, {part.failures} times in a row"
            for name, part in self.parts.items()
            if part.failures >= KEEPS_ENDING and not (part.alive and now - part.begun > SETTLED_S)
        }

    def lives(self, name: str) -> bool:
        """Whether there is such a part and it runs."""
        return name in self.parts and self.parts[name].alive

    # -- end ---------------------------------------------------------------------------------

    def dismiss(self, name: str) -> None:
        """TERM to a part, which is not started anew. `stop` still has to be called."""
        if part := self.parts.get(name):
            part.dismissed = True
            if part.process is not None and part.alive:
                _send([part.process], signal.SIGTERM)

    def send(self, number: int) -> None:
        """A signal to every part that runs, and to none of what they started."""
        _send([part.process for part in self.parts.values() if part.process and part.alive], number)

    def stop(self, names: Iterable[str], grace_s: float) -> list[Part]:
        """See `stop`; none of these is looked after any more."""
        return stop([self.parts.pop(name) for name in list(names) if name in self.parts], grace_s)

    def stop_all(self, grace_s: float) -> list[Part]:
        """End whatever is left."""
        return self.stop(list(self.parts), grace_s)


class Interrupted(Exception):
    """The job was told to end while it waited for something."""


def _die_with_parent() -> None:
    """A Redis that outlived a killed supervisor would write beside the next one."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


# ------------------------------------------------------------------------------ for people


def part_log(directory: Path, part: str) -> Path:
    """What a program says, in a directory of logs."""
    return directory / f"{part.replace(' ', '-')}.log"


def ended(status: int | None) -> str:
    """How a process ended."""
    if status is None:
        return "nobody saw how"
    return f"signal {-status}" if status < 0 else f"exit code {status}"


def tail(path: str | Path, lines: int = 20) -> str:
    """The last lines of a log, or a word that there are none."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        return f"({error})"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"
