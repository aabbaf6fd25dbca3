"""A rolling upgrade: the parts that run Python get the code that is installed now, while rollouts go on.

Whoever asks sends HUP to the stack's supervisor, which executes itself anew, does the work between its looks
at the parts, and writes into the record how far it is. So one process alone starts parts and records them,
whatever becomes of who asked; and should that process end, the next one finishes what is recorded.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import redis
import structlog

from services.launch import StackError, parts
from services.launch.record import Record
from services.launch.supervisor import POLL_S, START_S, Interrupted, Part, stop
from services.launch.watch import Watch
from services.state.fleet import FleetStore
from services.state.redis import connect

log = structlog.get_logger("supervisor")

OLD = "old "
"""Before the name of a part that another one has replaced and that has not ended yet."""
END_S = 10.0
"""For a part to end beyond the grace that it gives its rollouts."""
ASK_S = 1.0
"""Between two signals to a supervisor, which hears none while it starts."""
BEGIN_S = 15.0
"""For a supervisor to begin."""
FOLLOW_S = 0.2
"""Between two looks of who asked for it at how far it is."""


class Upgrade:
    """The upgrade that a supervisor carries out."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._record, self._supervisor = watch, watch.record, watch.supervisor
        self._begun = time.monotonic()

    def begin(self) -> None:
        """Everything is due: who reads messages, records and turns before who writes them, so the gateway
        late."""
        names = {part.name for part in self._record.parts}
        fleets = [f"{stage} fleet" for stage in reversed(parts.STAGES)]
        capture = sorted(name for name in names if name.startswith(parts.CAPTURE))
        self._record.due = [name for name in (*fleets, *capture, "gateway", "flower") if name in names]
        self._record.told, self._record.trouble = [], ""
        self._record.upgrades += 1

    def run(self) -> None:
        """Replace what is due, until a new part does not start.

        Raises:
            Interrupted: As `Watch.turn` does.
        """
        left = [part for part in self._record.parts if part.name.startswith(OLD)]
        try:
            for part in left:  # of an upgrade that was cut off
                if not part.dismissed:
                    self._undo(part.name.removeprefix(OLD))
            while self._record.due:
                self._replace(self._record.due[0])
                del self._record.due[0]
        except Interrupted:
            raise
        except Exception as error:  # the stack has to be looked after all the same
            log.exception("the upgrade stops")
            self._record.trouble, self._record.due = str(error), []
        for name in [name for name in self._supervisor.parts if name.startswith(OLD)]:
            self._await_end(name)
        self._watch.turn(0.0)

    def _replace(self, name: str) -> None:
        self._await_end(OLD + name)  # a new worker needs its name
        old = self._supervisor.parts[name]
        if name.endswith("fleet"):
            self._replace_fleet(old)
            return
        if name.startswith(parts.CAPTURE):
            self._replace_capture(old)
            return
        self._supervisor.dismiss(name)
        if name == "flower":
            stop([old], END_S)  # it has the file of tasks open
            url, port = f"{self._record.flower_url}/healthcheck", old.command[-1].partition("=")[2]
            new = parts.flower(int(port))
        else:
            # It listens no more, and lives until its calls are answered: the new one need not wait for that.
            url, new = f"{self._record.url}/health", parts.gateway()
        self._exchange(old, new)
        self._await_end(OLD + name)
        self._supervisor.wait_for(new, lambda: self._turned(parts.answers(url)), START_S)
        self._tell(f"{name}: pid {new.pid} answers in place of pid {old.pid}")

    def _replace_fleet(self, old: Part) -> None:
        """Start the new worker beside the old one, under another name, and let the old one go then."""
        stage, slots, worker = (_option(old, name) for name in ("-Q", "-c", "-n"))
        number = "2" if worker == f"{stage}@{self._record.node}" else ""
        new = parts.fleet(stage, int(slots), self._record.node, number)
        with connect(old.env["ROLLOUT_REDIS_URL"], max_connections=2) as client:
            fleet, worker = FleetStore(client), _option(new, "-n")
            # The last one of that name may have been killed.
            self._supervisor.wait_for(old, lambda: self._turned(_without(fleet, worker)), START_S)
            self._begin_beside(old, new, lambda: _unlisted(fleet, stage, worker))
        self._tell(f"{new.name}: {worker} (pid {new.pid}) is ready, and pid {old.pid} is to end")

    def _replace_capture(self, old: Part) -> None:
        """Start the new process beside the old one, on the same port, and let the old one go then."""
        host, port = _option(old, "--host"), int(_option(old, "--port"))
        (new,) = parts.capture(host, port, 1)
        new.name, url = old.name, old.env["ROLLOUT_CAPTURE_URL"]
        self._begin_beside(old, new, lambda: parts.unheard(new, url))
        self._tell(f"{new.name}: pid {new.pid} answers in place of pid {old.pid}, which is to end")

    def _begin_beside(self, old: Part, new: Part, missing: Callable[[], str | None]) -> None:
        """Exchange a part, and let the old one go once nothing of the new one is missing."""
        try:
            self._exchange(old, new)
            self._supervisor.wait_for(new, lambda: self._turned(missing()), START_S)
        except (StackError, OSError):
            self._undo(new.name)
            raise
        self._supervisor.dismiss(old.name)

    def _exchange(self, old: Part, new: Part) -> None:
        """Start a part in the place and with the environment of another one."""
        new.env, new.log = old.env, old.log
        self._record.parts.append(new)
        self._rename({OLD + new.name: old})
        self._watch.save()  # without a pid: another supervisor would look for the process by that
        new.start()
        self._watch.turn(0.0)

    def _undo(self, name: str) -> None:
        """Have an old part back, and let go of the new one."""
        new, old = self._supervisor.parts[name], self._supervisor.parts[OLD + name]
        self._rename({name: old, OLD + name: new})
        self._supervisor.dismiss(new.name)

    def _rename(self, names: dict[str, Part]) -> None:
        for name, part in names.items():
            part.name = name
        self._supervisor.parts = {part.name: part for part in self._record.parts}

    def _await_end(self, name: str) -> None:
        """Wait for a part that was told to end, and kill it when its time is up."""
        part = self._supervisor.parts.get(name)
        if part is None:
            return
        deadline = time.monotonic() + self._record.grace_s + END_S
        while part.alive and time.monotonic() < deadline:
            self._watch.turn(POLL_S)
        self._supervisor.stop([name], 0.0)
        self._record.parts.remove(part)
        self._tell(f"{name} (pid {part.pid}) has ended")

    def _turned(self, reason: str | None) -> str | None:
        self._watch.turn(POLL_S)
        return reason

    def _tell(self, text: str) -> None:
        self._record.told.append(f"{time.monotonic() - self._begun:5.1f} s  {text}")
        self._watch.turn(0.0)


def _option(part: Part, name: str) -> str:
    return part.command[part.command.index(name) + 1]


def _unlisted(fleet: FleetStore, stage: str, worker: str) -> str | None:
    """None when the worker is ready; else why not."""
    try:
        return None if worker in fleet.alive()[stage] else "it is not among the live workers"
    except redis.RedisError as error:
        return f"Redis does not answer: {error}"


def upgrade(state_dir: Path, say: Callable[[str], None]) -> Record:
    """Have the stack in a directory upgraded, and say what happens.

    Raises:
        StackError: No stack runs there, another upgrade is followed by somebody, or this one has stopped.
    """
    file = state_dir / "stack.json"
    record = Record.load(file)
    if record is None or not record.live:
        raise StackError(f"no stack runs in {state_dir}: `rollout up` starts one")
    with os.fdopen(os.open(state_dir / "upgrade.lock", os.O_CREAT | os.O_RDWR, 0o600)) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StackError(f"another `rollout upgrade` is at work on {state_dir}; wait for it") from None
        return _follow(file, record, say)


def _follow(file: Path, record: Record, say: Callable[[str], None]) -> Record:
    before, shown = record.upgrades, 0
    begun, asked_at = time.monotonic(), float("-inf")
    while True:
        if record.upgrades != before:
            for line in record.told[shown:]:
                say(line)
            shown = len(record.told)
            if not record.due and not any(part.name.startswith(OLD) for part in record.parts):
                break
        supervisor, now = record.supervisor, time.monotonic()
        if supervisor is None or not supervisor.alive:
            raise StackError("the supervisor has ended; unless all is to end, `rollout up` starts it again")
        if record.upgrades == before and now - asked_at > ASK_S:
            if now - begun > BEGIN_S:
                raise StackError(
                    f"the supervisor (pid {supervisor.pid}) does not begin; that of 0.2.0 cannot: "
                    "`rollout down` and `rollout up` this once"
                )
            os.kill(supervisor.pid, signal.SIGHUP)
            asked_at = now
        time.sleep(FOLLOW_S)
        current = Record.load(file)
        if current is None or current.mark != record.mark:
            raise StackError("the stack was ended meanwhile")
        record = current
    if record.trouble:
        raise StackError(f"the upgrade has stopped, and what it did not replace goes on: {record.trouble}")
    return record


def _without(fleet: FleetStore, worker: str) -> str | None:
    """Have no worker of that name be known; else why not."""
    try:
        fleet.leave(worker)
    except redis.RedisError as error:
        return f"Redis does not answer: {error}"
    return None
