"""A rollout in a worker's hands, and why its stage may be interrupted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from rollout.schema import Stage

CANCEL, LOST, OVERDUE, SHUTDOWN = "cancel", "lost", "overdue", "shutdown"
"""Why a stage is interrupted from outside."""


@dataclass(eq=False)
class Held:
    """A rollout this process works on."""

    rollout_id: str
    stage: Stage
    fence: int = 0
    ends_at: float = float("-inf")
    """Monotonic time of its deadline."""
    task: asyncio.Task[Any] | None = None
    reason: str | None = None
    """Set once it is to be interrupted."""
    leaving: bool = False
    """Whether RUN is to leave this worker at its next turn, for another one to go on with it."""
    moving: bool | None = None
    """Whether it leaves with its sandbox's files, for another node; None = it cannot."""
    decided: bool = False
    """Whether its outcome is known: what is left is to clean up, and nothing may throw the outcome away."""

    def interrupt(self, reason: str) -> None:
        """Cancel the work on the rollout; the first reason counts."""
        if self.reason is None:
            self.reason = reason
            if self.task is not None:
                self.task.get_loop().call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if not self.decided:
            self.task.cancel()
