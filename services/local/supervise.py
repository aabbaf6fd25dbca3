"""The process that `rollout up` leaves behind: it starts anew what ends of the stack.

`python -m services.local.supervise DIRECTORY`. The parts are nobody's children or this process's; should it
end, they go on, and the next `rollout up` starts it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import structlog

from services.local.plan import Part
from services.local.processes import Adopted, Process, start_time
from services.local.record import Record, Restarts
from services.local.supervisor import LOOK_S, Child, Supervisor

log = structlog.get_logger("supervisor")

Parts = dict[str, dict[str, Any]]
"""Command and environment by the name of the part."""


def parts_file(state_dir: Path) -> Path:
    """Holds the password of Redis: 0600, as `redis.conf`."""
    return state_dir / "parts.json"


def write_parts(state_dir: Path, parts: Parts) -> None:
    path = parts_file(state_dir)
    path.touch(mode=0o600)
    path.write_text(json.dumps(parts))


def read_parts(state_dir: Path) -> Parts:
    """Empty when none were written, or they cannot be read."""
    try:
        return json.loads(parts_file(state_dir).read_text())
    except (OSError, ValueError):
        return {}


class Watch:
    """Looks after the stack that is recorded in a directory."""

    def __init__(self, state_dir: Path) -> None:
        """
        Raises:
            FileNotFoundError: Nothing is recorded there.
        """
        self._file = state_dir / "stack.json"
        record = Record.load(self._file)
        if record is None:
            raise FileNotFoundError(self._file)
        self._record = record
        self._supervisor = Supervisor(state_dir / "logs")
        parts = read_parts(state_dir)
        for process in record.processes:
            part = Part(process.name, parts[process.name]["command"])
            child = self._supervisor.adopt(
                part, parts[process.name]["env"], Path(process.log), Adopted(process)
            )
            child.restarts = record.restarts.get(process.name, Restarts()).count

    def run(self) -> None:
        """Look until told to end, or until the stack is another's."""
        self._supervisor.listen()
        log.info("looks after the stack", parts=list(self._supervisor.children))
        while self._supervisor.signal is None:
            if not self.look():
                log.info("the stack has ended")
                return
            self._supervisor.pause(LOOK_S)

    def look(self) -> bool:
        """One look; False when there is no such stack any more."""
        self._supervisor.look()
        found = [self._as_is(child) for child in self._supervisor.children.values()]
        restarts = {name: child for name, child in self._restarts().items() if child != Restarts()}
        if found == self._record.processes and restarts == self._record.restarts:
            return self._file.exists()
        try:
            current = Record.load(self._file)
            if current is None or current.mark != self._record.mark:
                return False
            self._record.processes, self._record.restarts = found, restarts
            self._record.save(self._file)
        except OSError as error:
            # A full disk is no reason to let go of the stack, and may take no line of log either.
            with contextlib.suppress(OSError):
                log.warning("the record cannot be written; the next look tries again", error=str(error))
        return True

    def _as_is(self, child: Child) -> Process:
        known = next(one for one in self._record.processes if one.name == child.part.name)
        if known.pid == child.process.pid:
            return known
        started = start_time(child.process.pid) if child.alive else None
        return Process(known.name, child.process.pid, -1 if started is None else started, known.log)

    def _restarts(self) -> dict[str, Restarts]:
        before = self._record.restarts
        found = {}
        for name, child in self._supervisor.children.items():
            known = before.get(name, Restarts())
            ended = child.again_at is not None
            fresh = child.restarts > known.count or (ended and not known.away)
            found[name] = Restarts(
                count=child.restarts,
                away=ended,
                last_at=time.time() if fresh and ended else known.last_at,
                exit=child.exit if ended else known.exit,
            )
        return found


def main() -> None:
    """Serve until TERM."""
    os.umask(0o077)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S"),
            structlog.dev.ConsoleRenderer(colors=False),
        ]
    )
    Watch(Path(sys.argv[1])).run()


if __name__ == "__main__":
    main()
