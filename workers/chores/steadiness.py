"""Whether Redis, its clock and this process ran on without a break, so that silence means a dead worker.

Leases and deadlines are times of Redis' clock. Nobody could extend one while Redis was away or stood still,
and a clock that jumps (a suspended machine, a step of NTP) lets all of them run out at once.
"""

from __future__ import annotations

from collections.abc import Callable

import redis

from services.state.redis import now

LEAST_SLACK_S = 1.0
"""The least difference between two clocks that counts, for a slow machine."""
LEAST_SETTLE_S = 5.0
"""The least time for workers to reach Redis again and extend their leases, where all come back at once."""


class Steadiness:
    """Compares Redis' clock with a monotonic one; `look` at it often."""

    def __init__(
        self, client: redis.Redis, lease_s: float, interval_s: float, monotonic: Callable[[], float]
    ) -> None:
        """`interval_s`: between two looks, as it is meant to be."""
        self._redis = client
        self._monotonic = monotonic
        # A worker extends its leases every third of one: what is less takes none from a living worker.
        self._slack_s = max(LEAST_SLACK_S, lease_s / 6)
        self._gap_s = interval_s + max(2 * LEAST_SLACK_S, lease_s / 3)
        self._start_s = lease_s / 2
        self._settle_s = max(LEAST_SETTLE_S, lease_s / 2)
        self._seen: tuple[float, float] | None = None
        """Redis' time and ours at the last look."""
        self._patient_until = float("-inf")

    @property
    def patient(self) -> bool:
        """Whether the workers are to have time to extend their leases before any is judged."""
        return self._monotonic() < self._patient_until

    def disturbed(self) -> None:
        """Redis was away, or did what a steady one does not."""
        self._patient_until = self._monotonic() + self._settle_s

    def look(self) -> float:
        """Seconds by which Redis' clock has jumped since the last look; 0 = it has not.

        Raises:
            redis.RedisError: It is away.
        """
        began = self._monotonic()
        at = now(self._redis)
        ended = self._monotonic()
        before, self._seen = self._seen, (at, ended)
        if before is None:
            # A worker that has just come, perhaps after an outage that others have still to recover from.
            self._patient_until = max(self._patient_until, ended + self._start_s)
            return 0.0
        passed = ended - before[1]
        jump = at - before[0] - passed
        if abs(jump) > self._slack_s + (ended - began):
            self.disturbed()
            return jump
        if passed > self._gap_s:
            self.disturbed()
        return 0.0

    def latest(self) -> float | None:
        """What Redis' clock can say at most, if all is steady; None before the first look."""
        if self._seen is None:
            return None
        at, seen = self._seen
        return at + (self._monotonic() - seen) + self._slack_s
