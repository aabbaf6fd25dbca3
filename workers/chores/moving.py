"""Packed files of rollouts that no rollout goes on with any more."""

from __future__ import annotations

import re
import time
from pathlib import Path

from services.state import keys
from services.state.rollouts.moving import MovingStore
from workers.chores.base import Chore
from workers.services import WorkerServices

OURS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*\.\d+\.\d+\.tar")
"""Names of `Waiting.file_name`."""
PACKING_S = 900.0
"""A younger one may be in the making."""


class Leftovers(Chore):
    """Removes them from the directory that all nodes see: those of rollouts that ended, or began anew."""

    name = "leftovers"
    interval_s = 60.0
    lock = keys.LEFTOVERS_LOCK

    def __init__(self, services: WorkerServices) -> None:
        super().__init__(services)
        self._store = MovingStore(services.redis, services.settings)
        self._directory = Path(services.settings.snapshot_dir)

    @classmethod
    def is_for(cls, services: WorkerServices) -> bool:
        return bool(services.settings.snapshot_dir)

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
