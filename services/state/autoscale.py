"""What the autoscaler last saw and decided, and what it has done so far."""

from __future__ import annotations

import json
from typing import Any

import redis

from services.state import keys
from services.state.redis import now

COUNTERS = (
    *("slots_raised", "slots_lowered", "nodes_added", "nodes_drained", "engines_added", "engines_drained"),
    "failures",
)
"""Sums: slots, nodes and engines given and taken, and decisions that could not be carried out."""
FRESH_S = 120.0
"""What is older says nothing of now: the autoscaler has stopped."""


class AutoscaleStore:
    """Written by the elected autoscaler, read by /metrics."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def put(self, state: dict[str, Any]) -> None:
        """Keep the latest decision: `stages` (stage → fields of a load, and `need`) and `nodes` (kind → up,
        coming, target)."""
        self._redis.set(keys.AUTOSCALE, json.dumps({"at": now(self._redis), **state}))

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of `COUNTERS`."""
        if by:
            self._redis.hincrby(keys.AUTOSCALE_TOTALS, name, by)

    def get(self) -> dict[str, Any] | None:
        """The latest decision; None where no autoscaler runs."""
        raw = self._redis.get(keys.AUTOSCALE)
        state = json.loads(raw) if raw else None
        return state if state and state["at"] > now(self._redis) - FRESH_S else None

    def totals(self) -> dict[str, int]:
        """Each of `COUNTERS`."""
        stored = self._redis.hgetall(keys.AUTOSCALE_TOTALS)
        return {name: int(stored.get(name, 0)) for name in COUNTERS}
