"""Rollouts that leave a node short of disk, and packed files that no rollout goes on with any more."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rollout.schema import Stage
from sandbox.room import Floors, shortages
from services.handback import Mover
from services.queues import Ref
from services.state import keys
from services.state.rollouts.moving import MovingStore
from workers.chores.base import Chore
from workers.held import SHUTDOWN, Held
from workers.services import WorkerServices

OURS = re.compile(r"\.?[A-Za-z0-9][A-Za-z0-9._:-]*\.\d+\.\d+\.tar(\.[0-9a-f]{8})?")
"""Names of `Waiting.file_name`, and what a sandbox host that was killed had not finished of one."""
PACKING_S = 900.0
"""A younger one may be in the making."""
LOOKS = 3
"""For so many in a row a node is short of disk before a rollout leaves it for that."""
MOST_STAY = 1000
"""Ids that are kept of those that could not leave."""
LEAVES_S = 120.0
"""For it to come to its next turn; then another one may."""
ANSWER_S = 900.0
"""For the sandbox host to pack its files."""


class Leftovers(Chore):
    """Removes them from the directory that all nodes see: those of rollouts that ended, or began anew."""

    name = "leftovers"
    setting = "snapshot_dir"
    interval_s = 60.0
    lock = keys.LEFTOVERS_LOCK

    def __init__(self, services: WorkerServices) -> None:
        super().__init__(services)
        self._store = MovingStore(services.redis, services.settings)
        self._directory = Path(services.settings.snapshot_dir)

    def tick(self) -> None:
        """Look at all that have lain there for a while."""
        if not self._directory.is_dir():  # nothing has moved yet
            return
        before = time.time() - PACKING_S
        ours = [path for path in self._directory.iterdir() if OURS.fullmatch(path.name)]
        old = [path for path in ours if path.lstat().st_mtime < before]
        for path in set(old) - self._store.needed(old):
            path.unlink(missing_ok=True)
            self.log.info("packed files removed: no rollout goes on with them", path=str(path))


class Relief(Chore):
    """Has the rollout with the largest sandbox leave a node that stays short of disk, one at a time."""

    name = "relief"
    stage, setting = Stage.RUN, "snapshot_dir"
    interval_s = 2.0

    def __init__(self, services: WorkerServices) -> None:
        super().__init__(services)
        self._floors = Floors(services.settings.node_min_free_disk_mb, 0)
        self._looks = 0
        self._stay: deque[str] = deque(maxlen=MOST_STAY)
        """Ids of those that could not leave."""

    def tick(self) -> None:
        """Look, and after some looks in a row act."""
        self._looks = self._looks + 1 if shortages(self._services.host.state, self._floors) else 0
        if self._looks < LOOKS:
            return
        others, _ = self._services.other_nodes("", Stage.RUN)
        others -= {node for node, its in self._services.fleet.admissions().items() if its.stopped}
        sizes = {
            box["owner"].rpartition("/")[0]: box.get("on_disk", 0)
            for box in (self._ask(self._services.host.list()) if others else ())
        }
        here = list(self._services.held.values())
        may = [held for held in here if held.moving is not None and held.rollout_id not in self._stay]
        largest = max(may, key=lambda held: sizes.get(held.rollout_id, 0), default=None)
        if others and largest is not None:
            self._looks = 0
            self._move(largest, random.choice(sorted(others)))

    def _move(self, held: Held, to: str) -> None:
        its = self.log.bind(rollout_id=held.rollout_id, to=to)
        its.warning("the node is short of disk: the rollout with the largest sandbox leaves at its next turn")
        held.moving = held.leaving = True
        ends_at = time.monotonic() + LEAVES_S
        while held in list(self._services.held.values()):
            if self.stopping.wait(0.1):
                return
            if time.monotonic() > ends_at:
                held.moving = held.leaving = False
                its.warning("it has not come to its next turn: it stays")
                return
        services = self._services
        node, dispatcher = services.settings.node, services.dispatcher
        mover = Mover(services.redis, services.settings, node, dispatcher, services.host)
        if held.reason == SHUTDOWN and not self._ask(mover.move_one(held.rollout_id, to)):
            self._stay.append(held.rollout_id)
            attempt = services.store.get(held.rollout_id).attempt
            dispatcher.send(Stage.RUN, Ref(id=held.rollout_id, attempt=attempt, node=node))

    def _ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._services.loop).result(ANSWER_S)
