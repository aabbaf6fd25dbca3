"""One scorer process, from the worker's side: started, called, killed with all that it started."""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from workers.scoring import metrics, wire
from workers.scoring.errors import ScorerCrashed, ScorerError, ScorerOutOfMemory, ScorerTimeout

log = structlog.get_logger("scorer")

LOAD_PATIENCE_S = 120.0
"""For the process to start and import the function's module."""
LAG_S = 0.2
"""For an answer that came in time while the event loop was late."""
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


def _warn_of(missing: str | None) -> None:
    """Say once, loudly, that scorers are less apart from the machine than they should be."""
    global _warned
    if missing and not _warned:
        _warned = True
        log.warning(f"SCORERS SEE THE MACHINE'S NETWORK AND PROCESSES: {missing}")


class _Output(asyncio.Protocol):
    """What a scorer prints: into the log up to a limit, its end kept for the report of a crash."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.tail = ""
        self.room = OUTPUT_PER_CALL
        self.context = contextvars.Context()
        """Of the call under way: its rollout is in the log, not the one that the process was started for."""

    def begin(self) -> None:
        """A call begins."""
        self.room = OUTPUT_PER_CALL
        self.context = contextvars.copy_context()

    def data_received(self, data: bytes) -> None:
        text = data.decode(errors="replace")
        self.tail = (self.tail + text)[-TAIL:]
        if shown := text[: self.room].rstrip("\n"):
            self.context.run(log.info, "scorer prints", scorer_pid=self._pid, output=shown)
        self.room = max(0, self.room - len(text))


class Scorer:
    """A living scorer process. One call at a time."""

    def __init__(self, memory_mb: int) -> None:
        self.calls = 0
        self.rss = 0
        """Resident bytes after the last call."""
        self.left_children = False
        """Whether the last function left processes behind."""
        self.modules: set[str] = set()
        """What it has imported: a call of these starts at once."""
        self._memory_mb = memory_mb
        self._begun = False

    @classmethod
    async def start(cls, memory_mb: int) -> Scorer:
        """A new process; its start costs this process no more than the exec.

        Raises:
            ScorerCrashed: The machine starts no process.
        """
        self = cls(memory_mb)
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "workers.scoring.child"]
        argv += [str(theirs.fileno()), str(os.getpid()), str(memory_mb)]
        try:
            # No preexec_fn: without one Python uses vfork, which neither copies the worker's page tables nor
            # runs code between the locks of its threads. The child sets its own limits.
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ScorerCrashed(f"no scorer process could be started: {error}") from error
        finally:
            theirs.close()
        metrics.PROCESSES.inc()
        self.pid = self._popen.pid
        self._killed = False
        self._reading: asyncio.Task[dict[str, Any]] | None = None
        self._output = _Output(self.pid)
        self._printed: asyncio.BaseTransport | None = None
        self._writer: asyncio.StreamWriter | None = None
        try:
            ours.setblocking(False)
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            loop = asyncio.get_running_loop()
            self._printed, _ = await loop.connect_read_pipe(lambda: self._output, self._popen.stdout)
        except BaseException:
            ours.close()
            self.kill()
            raise
        return self

    @property
    def gone(self) -> bool:
        """Whether the process has ended, as far as is known without asking."""
        return self._reader.at_eof()

    async def call(self, function: str, payload: Any, timeout_s: float) -> Any:
        """Run a function there. After any exception but `ScorerError` the process must be killed.

        Raises:
            ScorerLost: The process was gone before the function began.
            ScorerError, ScorerTimeout, ScorerCrashed: As `score` has it.
        """
        try:
            request = {"function": function, "payload": payload, "timeout_s": timeout_s}
            frame = wire.encode(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise ScorerError(f"{function}: the payload is no JSON: {error}") from error
        self._begun = False
        self.calls += 1
        self._output.begin()
        # Written by the transport as the child reads: a full socket must not keep us from its answer.
        self._writer.write(frame)
        reply = await self._reply(LOAD_PATIENCE_S)
        if reply is None:
            raise ScorerCrashed(f"{function} was not imported within {LOAD_PATIENCE_S:g} s")
        if "loaded" in reply:
            self._begun = True
            _warn_of(reply["loaded"])
            started = time.monotonic()
            reply = await self._reply(timeout_s)
            metrics.SECONDS.labels(function).observe(time.monotonic() - started)
            if reply is None:
                raise ScorerTimeout(f"{function} took longer than {timeout_s:g} s and was killed")
        self.rss, self.left_children = reply["rss"], reply["children"]
        if reply.get("memory"):
            raise ScorerOutOfMemory(
                f"{function} ran out of memory (ROLLOUT_SCORER_MEMORY_MB={self._memory_mb}): {reply['error']}"
            )
        if "error" in reply:
            raise ScorerError(f"{function} failed: {reply['error']}\n{reply['traceback']}")
        self.modules.add(function.partition(":")[0])
        return reply["result"]

    async def _reply(self, seconds: float) -> dict[str, Any] | None:
        """The next frame; None: it did not come in time."""
        reading = self._reading = asyncio.ensure_future(wire.read(self._reader))
        # A wait, not a timeout: one that fires in the same turn as the answer arrives would throw it away.
        for limit in (seconds, LAG_S):
            await asyncio.wait({reading}, timeout=limit)
            if reading.done():
                break
        else:
            return None
        if reading.cancelled():
            raise ScorerCrashed("the scorers were closed during the call")
        try:
            return reading.result()
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            if not self._begun and self.calls > 1:
                raise ScorerLost from error
            raise ScorerCrashed(await self._obituary()) from error

    async def _obituary(self) -> str:
        """How it died, with the last of what it printed."""
        ends = time.monotonic() + DEATH_PATIENCE_S
        while (code := self._popen.poll()) is None and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with {code}"
        printed = self._output.tail.strip()
        return f"a scorer process {how}" + (f"; it last printed:\n{printed}" if printed else "")

    def kill(self) -> None:
        """End the process and all it started; at once, and also when it is dead already."""
        if self._killed:
            return
        self._killed = True
        metrics.PROCESSES.dec()
        if self._reading is not None:
            self._reading.cancel()
        for transport in (self._writer, self._printed):
            if transport is not None:
                transport.close()
        self._end_processes()
        task = asyncio.ensure_future(self._reap())
        _reaping.add(task)
        task.add_done_callback(_reaping.discard)

    def abandon(self) -> None:
        """End the process when its event loop has been closed."""
        if not self._killed:
            self._killed = True
            metrics.PROCESSES.dec()
            self._end_processes()
            self._popen.wait(DEATH_PATIENCE_S)

    def _end_processes(self) -> None:
        if self._popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                # Stopped first, it can start no more while its descendants are looked for; some may have
                # left the group for a session of their own.
                os.kill(self.pid, signal.SIGSTOP)
            for pid in _descendants(self.pid):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _reap(self) -> None:
        """Take the dead process from the table; no thread is held while the kernel tears it down."""
        pause = 0.005
        while self._popen.poll() is None:
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 2)


_reaping: set[asyncio.Task[None]] = set()
"""The event loop keeps only weak references to its tasks."""


def _descendants(pid: int) -> list[int]:
    """Processes below one, deepest last. psutil would read all those of the machine, on the event loop."""
    children: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (thread / "children").read_text().split()]
    except OSError:
        return children
    return children + [descendant for child in children for descendant in _descendants(child)]
