"""How many streams of completions are open."""

from __future__ import annotations

import threading


class StreamSlots:
    """A bounded count of open streams."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.open = 0

    def acquire(self) -> bool:
        """Take a place; False = all are taken."""
        with self._lock:
            if self.open >= self._limit:
                return False
            self.open += 1
            return True

    def release(self) -> None:
        """Give a place back."""
        with self._lock:
            self.open -= 1
