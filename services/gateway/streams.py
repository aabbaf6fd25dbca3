"""How many streams of completions are open."""

from __future__ import annotations

import math
import threading
from collections import Counter


class TenantFull(Exception):
    """A tenant has as many places as one may."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} taken")
        self.count = count


def most_each(limit: int, share: float) -> int:
    """Places of so many that one tenant may have."""
    return math.ceil(limit * share)


class StreamSlots:
    """A bounded count of open streams."""

    def __init__(self, limit: int, share: float = 1.0) -> None:
        """
        Args:
            share: Of them that one tenant may have.
        """
        self._limit = limit
        self._most_each = most_each(limit, share)
        self._lock = threading.Lock()
        self.open = 0
        self._of: Counter[str | None] = Counter()

    def acquire(self, tenant: str | None) -> bool:
        """Take a place for a tenant (None = no matter whose); False = all are taken.

        Raises:
            TenantFull: The tenant has as many as one may.
        """
        with self._lock:
            if tenant is not None and self._of[tenant] >= self._most_each:
                raise TenantFull(self._of[tenant])
            if self.open >= self._limit:
                return False
            self.open += 1
            self._of[tenant] += 1
            return True

    def release(self, tenant: str | None) -> None:
        """Give a place back."""
        with self._lock:
            self.open -= 1
            self._of[tenant] -= 1
            if not self._of[tenant]:
                del self._of[tenant]
