"""The process that `rollout up` leaves behind: it starts anew what ends of the stack, and upgrades it.

`python -m services.launch.watch DIRECTORY`. The parts are nobody's children or its own; should it end, they
go on, and the next `rollout up` starts it again. HUP has it execute itself anew, as the same process with the
code that is installed by then, and upgrade the stack.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import structlog

from services import logs
from services.launch import StackError
from services.launch.record import Record
from services.launch.supervisor import LOOK_S, Interrupted, Part, Supervisor, marked, started_at
from services.settings import settings

log = structlog.get_logger("supervisor")

UPGRADE = "--upgrade"
"""Argument of the process that is to begin an upgrade."""
RECORD, PART = ([field.name for field in fields(kind)] for kind in (Record, Part))
"""What is written down."""


class Watch:
    """Looks after the stack that is recorded in a directory, and keeps the record."""

    def __init__(self, state_dir: Path) -> None:
        """
        Raises:
            FileNotFoundError: Nothing is recorded here.
        """
        self._dir, self._file = state_dir, state_dir / "stack.json"
        record = Record.load(self._file)
        if record is None:
            raise FileNotFoundError(self._file)
        self.record = record
        self.supervisor = Supervisor(state_dir / "logs", StackError)
        self.supervisor.parts = {part.name: part for part in record.parts}
        self.supervisor.listen()
        for part in record.parts:
            if not part.pid:
                self._adopt(part)
        self._saved = self._to_save()
        self._is_asked = False
        log.info("looks after the stack", parts=list(self.supervisor.parts))

    def _adopt(self, part: Part) -> None:
        """Find the process of a part that was started just before the last supervisor was killed."""
        known = {part.pid for part in self.record.parts}
        for process in marked(self.record.mark):
            with contextlib.suppress(psutil.Error, OSError):
                leads = os.getsid(process.pid) == process.pid
                if leads and process.pid not in known and process.cmdline() == part.command:
                    part.pid, part.started = process.pid, started_at(process)

    def listen(self) -> None:
        """Hear from now on that an upgrade is asked for."""
        signal.signal(signal.SIGHUP, self._hear)

    def _hear(self, _number: int, _frame: object) -> None:
        self._is_asked = True

    def turn(self, pause_s: float = LOOK_S) -> None:
        """Look once, and write down what has changed.

        Raises:
            Interrupted: It was told to end, or the stack is another's.
        """
        self.supervisor.look()
        try:
            if not _is_current(self.record, self._file):
                log.info("the stack has ended")
                raise Interrupted
            self.save()
            if self._is_asked:
                self._execute_anew()
        except (StackError, OSError) as error:
            # A full disk is no reason to let go of the stack, and may take no line of log either.
            with contextlib.suppress(OSError):
                log.warning("the record cannot be written; the next look tries again", error=str(error))
        self.supervisor.pause(pause_s)
        if self.supervisor.signal is not None:
            raise Interrupted

    def save(self) -> None:
        """Write down what has changed.

        Raises:
            OSError: The file cannot be written.
        """
        if (now := self._to_save()) != self._saved:
            self.record.save(self._file)
            self._saved = now

    def _to_save(self) -> list[Any]:
        """What the file is to hold, to be compared.

        No deep copy: that of all parts' environments took more than the rest of a look.
        """
        record = self.record
        rest = [getattr(record, name) for name in RECORD if name not in ("parts", "supervisor")]
        rest = [list(value) if isinstance(value, list) else value for value in rest]
        return [rest, [[getattr(part, name) for name in PART] for part in record.parts]]

    def _execute_anew(self) -> None:
        """Go on with the code that is installed now, in the same process: its children stay its own."""
        self._is_asked = False
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until `listen`
        os.execv(sys.executable, [*command(self._dir), UPGRADE])


def command(state_dir: Path) -> list[str]:
    """How it is started."""
    return [sys.executable, "-m", "services.launch.watch", str(state_dir)]


def _is_current(record: Record, file: Path) -> bool:
    """Whether the file is still that of this stack; `up` may have started its supervisor anew meanwhile."""
    current = Record.load(file)
    if current is None or current.mark != record.mark:
        return False
    record.supervisor = current.supervisor
    return True


def main() -> None:
    """Look after a stack until TERM."""
    os.umask(0o077)
    logs.configure(settings())
    watch = Watch(Path(sys.argv[1]))
    with contextlib.suppress(Interrupted):
        if UPGRADE in sys.argv or watch.record.due:
            # What looks after a stack for weeks need not hold what only this needs.
            from services.launch.upgrade import Upgrade

            upgrade = Upgrade(watch)
            if UPGRADE in sys.argv:
                upgrade.begin()
                watch.turn(0.0)  # or one signal would have it begin twice
            watch.listen()
            upgrade.run()
        watch.listen()
        while True:
            watch.turn()


if __name__ == "__main__":
    main()
