"""Has all that an agent started stand still, so that what is copied meanwhile is of one moment.

By signals, for most nodes give no cgroup that could be frozen. A process that is missed would have to stay
unseen in two looks in a row before the copy and in one after it; who ran in between has run more often.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path

from sandbox import processes
from sandbox.errors import SnapshotError

STOP_S = 5.0
"""Who does not stand still by then is not copied."""
BY_LEVEL_S = 0.5
"""For so long nobody is stopped before its parent: a shell that ran on would take its job for suspended."""
DEEP_S = 0.5
"""Who has not come out of the kernel by then stops when it does."""
PAUSE_S = 0.001
ENDS = "ends"


@dataclasses.dataclass(frozen=True)
class _Process:
    pid: int
    started: int
    states: frozenset[str]
    """Of its threads; the first may have ended while others run."""
    ran: int
    """How often its threads have run and been put off: who stood still all the time has not."""
    below_still: bool

    def is_still(self, deep: bool) -> bool:
        return self.states <= set("TtZXD" if deep else "TtZX")


class Still:
    """The processes of one sandbox, but those of its runtime and its server. All of it blocks."""

    def __init__(self, pid: int, protected: list[int], mark: Path) -> None:
        """`mark`: a file that says to the next host that they were stopped, should this one be killed."""
        self._pid = pid
        self._protected = set(protected)
        self._mark = mark
        self._stopped: dict[tuple[int, int], None] = {}
        """Process and start time, parents first. Who had stopped before is not among them."""
        self._known: dict[tuple[int, int], int] = {}
        """How often each had run."""

    def stop(self, ends: bool = False) -> None:
        """Stop them all. Raises SnapshotError when they do not let themselves be stopped."""
        self._mark.write_text(ENDS if ends else "")
        began, before = time.monotonic(), None
        while True:
            took = time.monotonic() - began
            seen = self._look()
            loose = [process for process in seen if not process.is_still(deep=took > DEEP_S)]
            self._known = _runs(seen)
            if not loose and self._known == before:
                return
            before = None if loose else self._known
            if took > STOP_S:
                raise SnapshotError(f"{len(loose)} processes of the sandbox do not stand still")
            for process in loose:
                if process.below_still or took > BY_LEVEL_S:
                    self._stopped[process.pid, process.started] = None
                    processes.send_to(process.pid, process.started, signal.SIGSTOP)
            time.sleep(PAUSE_S)

    def check(self) -> None:
        """Raises SnapshotError unless all have stood still: a timer may wake who was stopped."""
        if _runs(self._look()) != self._known:
            raise SnapshotError("processes of the sandbox did not stand still")

    def go_on(self) -> None:
        """Continue those that were stopped, children first."""
        for pid, started in reversed(self._stopped):
            processes.send_to(pid, started, signal.SIGCONT)
        self._mark.unlink(missing_ok=True)

    def recover(self) -> None:
        """Continue what a killed host had stopped; it cannot be told from what had stopped itself."""
        if self._mark.exists() and self._mark.read_text() != ENDS:
            self._stopped = {(process.pid, process.started): None for process in self._look()}
            self.go_on()

    def _look(self) -> list[_Process]:
        seen, front = [], [(self._pid, True)]
        while front:
            parent, still = front.pop(0)
            for pid in processes.children(parent):
                if pid in self._protected:
                    front.append((pid, True))
                    continue
                process = _process(pid, still)
                seen.append(process)
                front.append((pid, process.is_still(deep=False)))
        return seen


def _process(pid: int, below_still: bool) -> _Process:
    """What is gone while one looks at it has not stood still."""
    states, started, ran = set(), -1, 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            fields = (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()
            states.add(fields[0])
            told = (thread / "status").read_text(errors="replace").split()
            ran += int(told[-1]) + int(told[-3])  # voluntary_ctxt_switches and nonvoluntary_ctxt_switches
            started = int(fields[19]) if int(thread.name) == pid else started
    except (FileNotFoundError, ProcessLookupError):
        states.add("gone")
    return _Process(pid, started, frozenset(states), ran, below_still)


def _runs(seen: list[_Process]) -> dict[tuple[int, int], int]:
    return {(process.pid, process.started): process.ran for process in seen}
