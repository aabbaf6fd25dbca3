"""One scorer process, from the worker's side: started, called, killed with all that it started.

All of it blocks, and runs on the threads of `pool.py`; `kill` may be called from any thread.
"""

from __future__ import annotations

import contextvars
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import Gauge

from sandbox import processes
from workers.errors import HandlerError, InfrastructureError
from workers.scoring import metrics, wire

log = structlog.get_logger("scorer")

LOAD_PATIENCE_S = 120.0
"""For the process to start and import the function's module."""
DEATH_PATIENCE_S = 5.0
OUTPUT_PER_CALL = 4000
"""Characters of what a function prints that go to the log; a flood is cut."""
TAIL = 2000
"""Characters of it that are told when the process dies."""
_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|TZ|TMPDIR|LANG|LANGUAGE|LC_[A-Z]+|LD_LIBRARY_PATH|PYTHON(HOME|UTF8|WARNINGS)"
    r"|VIRTUAL_ENV|XDG_[A-Z]+_HOME|COVERAGE_[A-Z_]+"
)
"""Variables that a scorer gets. All others stay here: any may hold a password, whatever its name."""


class ScorerError(HandlerError):
    """The function raised, cannot be imported, or answered with what JSON cannot carry."""

    outcome = "error"
    """Of the call, among the metrics."""


class ScorerTimeout(InfrastructureError):
    """The function took longer than it may; its process was killed.

    Machine or answer, nobody knows yet: a handler whose scorer can be slowed down by what a model wrote takes
    a second look (see `score_or_blame`). Left alone, it is a failure that is tried again.
    """

    outcome = "timeout"


class ScorerCrashed(InfrastructureError):
    """The function's process died, did not start, or ran out of memory."""

    outcome = "crashed"


class ScorerOutOfMemory(ScorerCrashed):
    """The function ran into the memory limit of its process."""


class ScorerLost(Exception):
    """The process was gone before it began with the call."""


def _environment() -> dict[str, str]:
    """What a program needs to run at all, and what makes it the same everywhere."""
    env = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
    # Thread pools of numerical libraries reserve address space by the core, which RLIMIT_AS counts.
    env |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Python orders sets of strings by a seed of each process: what is made from one must be made again alike.
    env["PYTHONHASHSEED"] = "0"
    # What the worker can import, the function's module included, wherever that path came from.
    env["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    return env


_warned = False


def warn_of(missing: str | None) -> None:
    """Say once, loudly, that scorers are less apart from the machine than they should be."""
    global _warned
    if missing and not _warned:
        _warned = True
        log.warning(f"SCORERS SEE THE MACHINE'S NETWORK AND PROCESSES: {missing}")


class Child:
    """A process for code that is not trusted: started, listened to, killed with all that it started."""

    noun = "child"
    crashed: type[InfrastructureError] = InfrastructureError
    living: Gauge | None = None

    def __init__(self, program: list[str], *words: str, env: dict[str, str], cwd: str | None = None) -> None:
        """Start it; behind `program` it is told its end of the channel, our pid, and `words`.

        Raises:
            InfrastructureError: The machine starts no process (`crashed`).
        """
        self._lock = threading.Lock()
        self._killed = False
        self._channel, far_end = socket.socketpair()
        argv = [*program, str(far_end.fileno()), str(os.getpid()), *words]
        try:
            # No preexec_fn: without one Python uses vfork, which neither copies the worker's page tables nor
            # runs code between the locks of its threads. The child sets its own limits.
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                pass_fds=[far_end.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._channel.close()
            raise self.crashed(f"no {self.noun} process could be started: {error}") from error
        finally:
            far_end.close()
        self.pid = self._popen.pid
        if self.living is not None:
            self.living.inc()
        self.listen(contextvars.Context())
        self._ended, self._group_killed = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, name=f"{self.noun}-{self.pid}", daemon=True).start()

    def listen(self, context: contextvars.Context) -> None:
        """From now on what it prints belongs to the one whose log lines this context makes."""
        self._tail, self._room, self._context = "", OUTPUT_PER_CALL, context

    def _listen(self) -> None:
        """Read what it prints, into the log up to a limit; once `kill` is through, collect the process.

        Until then its number, which is its group's, too, is nobody else's.
        """
        assert self._popen.stdout is not None
        with self._popen.stdout as stdout:
            while part := os.read(stdout.fileno(), 1 << 16):
                text = part.decode(errors="replace")
                self._tail = (self._tail + text)[-TAIL:]
                if shown := text[: self._room].rstrip("\n"):
                    self._context.run(log.info, f"{self.noun} prints", pid=self.pid, output=shown)
                self._room = max(0, self._room - len(text))
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._ended.set()
        self._group_killed.wait()
        self._popen.wait()

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return self._status() is not None

    def _status(self) -> int | None:
        """Its exit status or, below 0, the signal that ended it; None while it lives."""
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # the listener has collected it
            return self._popen.wait()
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def obituary(self) -> str:
        """How it died, with the last of what it printed."""
        self._ended.wait(DEATH_PATIENCE_S)
        code = self._status()
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with {code}"
        printed = self._tail.strip()
        return f"the {self.noun} process {how}" + (f"; it last printed:\n{printed}" if printed else "")

    def kill(self) -> None:
        """End the process and all it started; at once, and also when it is dead already."""
        with self._lock:
            if self._killed:
                return
            self._killed = True
        if self.living is not None:
            self.living.dec()
        # Stopped first, it can start no more while its descendants are looked for; some may have left the
        # group for a session of their own.
        processes.send([self.pid], signal.SIGSTOP)
        processes.send(processes.descendants(self.pid))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._group_killed.set()
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # wakes who waits for an answer

    def end(self) -> None:
        """Kill it, where no call of it is under way."""
        self.kill()
        self._channel.close()


class Scorer(Child):
    """A living scorer process. One call at a time."""

    noun = "scorer"
    crashed = ScorerCrashed
    living = metrics.PROCESSES

    def __init__(self, memory_mb: int) -> None:
        """Start it.

        Raises:
            ScorerCrashed: The machine starts no process.
        """
        self.calls = 0
        self.rss = 0
        """Resident bytes after the last call."""
        self.left_children = False
        """Whether the last function left processes behind."""
        self.modules: set[str] = set()
        """What it has imported: a call of these starts at once."""
        self._memory_mb = memory_mb
        super().__init__([sys.executable, "-m", "workers.scoring.child"], str(memory_mb), env=_environment())

    def call(
        self, function: str, payload: Any, timeout_s: float, context: contextvars.Context | None = None
    ) -> Any:
        """Run a function there. After any exception but `ScorerError` the process must be killed.

        Args:
            context: Of the caller, for the log lines of what the function prints.

        Raises:
            ScorerLost: The process was gone before the function began.
            ScorerError, ScorerTimeout, ScorerCrashed: As `score` has it.
        """
        try:
            frame = wire.encode({"function": function, "payload": payload, "timeout_s": timeout_s})
        except (TypeError, ValueError, RecursionError) as error:
            raise ScorerError(f"{function}: the payload is no JSON: {error}") from error
        self.calls += 1
        self.listen(context or contextvars.Context())
        begun = False
        try:
            self._channel.settimeout(LOAD_PATIENCE_S)
            self._channel.sendall(frame)
            reply = wire.receive(self._channel, LOAD_PATIENCE_S)
            if "loaded" in reply:
                begun = True
                warn_of(reply["loaded"])
                with metrics.SECONDS.labels(function).time():
                    reply = wire.receive(self._channel, timeout_s)
        except TimeoutError as error:
            if begun:
                raise ScorerTimeout(f"{function} took longer than {timeout_s:g} s and was killed") from error
            raise ScorerCrashed(f"{function} was not imported within {LOAD_PATIENCE_S:g} s") from error
        except (EOFError, OSError, ValueError) as error:
            if self._killed:
                raise ScorerCrashed("the scorers were closed during the call") from error
            if not begun and self.calls > 1:
                raise ScorerLost from error
            raise ScorerCrashed(self.obituary()) from error
        self.rss, self.left_children = reply["rss"], reply["children"]
        if reply.get("memory"):
            raise ScorerOutOfMemory(
                f"{function} ran out of memory (ROLLOUT_SCORER_MEMORY_MB={self._memory_mb}): {reply['error']}"
            )
        if "error" in reply:
            raise ScorerError(f"{function} failed: {reply['error']}\n{reply['traceback']}")
        self.modules.add(function.partition(":")[0])
        return reply["result"]
