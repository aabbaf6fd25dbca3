"""How long results are kept: acknowledgement, and retention by age and by size.

Only ended rollouts are in the account of `account.lua`, so a live one is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import redis

from services.settings import Settings
from services.state import keys, memory
from services.state.scripts import Operations

SWEEP_LIMIT = 500
"""Results that one call of the script frees at most: Redis does nothing else meanwhile."""
TRIM_LIMIT, TRIM_CALLS = 200, 25
"""The same of results that are forgotten, and how often it is called in a row."""
GONE_MS = 1000
"""A record is gone for certain so long after its retention: the script that ended it took its time."""


@dataclass(frozen=True)
class Dropped:
    """A trajectory that was freed before its rollout's retention was over."""

    rollout_id: str
    reason: str
    """`acknowledged` or `size`."""
    bytes: int
    acknowledged: bool


class ResultStore:
    """Acknowledges results and frees what need not be kept."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._redis = client
        self._keep_acked_ms = int(settings.keep_acked_s * 1000) if settings.keep_acked_s >= 0 else None
        self._most_bytes = settings.results_max_bytes
        self._retention_ms = int(settings.retention_s * 1000)
        self._do = Operations(client, "results/results")

    def acknowledge(self, rollout_ids: Iterable[str], tenant: str | None = None) -> list[str]:
        """Note that the trainer has them; one word each: `acknowledged`, `already`, `live`, `unknown`.

        Args:
            tenant: Those of others are `unknown`; None = everybody's.
        """
        return list(self._do("acknowledge", ids=list(rollout_ids), tenant=tenant))

    def sweep(self) -> list[Dropped]:
        """Free acknowledged trajectories whose time is over, then the oldest beyond the limit of bytes.

        Acknowledged ones go at once where memory is scarce.
        """
        keep_acked, most = self._keep_acked_ms, self._most_bytes
        room = memory.read(self._redis)
        if most < 0:
            most = int(memory.RESULTS_SHARE * room.limit)
        if room.scarce:
            keep_acked = 0
        return [Dropped(**row) for row in self._do("sweep", keep=keep_acked, most=most, limit=SWEEP_LIMIT)]

    def trim(self) -> int:
        """Forget results that are past their rollouts' retention, and lists' entries of them; how many."""
        total = 0
        for _ in range(TRIM_CALLS):
            count = self._do("trim", retention=self._retention_ms + GONE_MS, limit=TRIM_LIMIT)
            total += count
            if count < TRIM_LIMIT:
                break
        return total

    def stored_bytes(self) -> int:
        """Bytes of ended rollouts' trajectories, as stored."""
        return int(self._redis.get(keys.RESULTS_BYTES) or 0)

    def totals(self) -> dict[str, int]:
        """Sums for /metrics."""
        return {name: int(value) for name, value in self._redis.hgetall(keys.RESULTS_TOTALS).items()}
