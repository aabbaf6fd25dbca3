"""The order in which INIT takes rollouts, said again in plain Python: an oracle for `rollouts/fair.lua`.

Written from docs/tenants.md and from what start-time fair queueing is, not from the script.
"""

from __future__ import annotations

from collections.abc import Mapping


class FairOrder:
    """Who waits, and how much each tenant has been served."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """
        Args:
            weights: By tenant; one that is not there has 1.
        """
        self._weights = weights or {}
        self._waiting: dict[str, dict[str, tuple[float, int]]] = {}
        self._start: dict[str, float] = {}
        """Virtual time of the tenants that have somebody waiting."""
        self._finish: dict[str, float] = {}
        self._clock = 0.0
        self.claims: dict[str, int] = {}

    def add(self, rollout_id: str, tenant: str, rank: tuple[float, int]) -> None:
        """`rank`: time of submission less what the priority is worth, then the order of submission."""
        waiting = self._waiting.setdefault(tenant, {})
        if not waiting:
            self._start[tenant] = max(self._clock, self._finish.get(tenant, 0.0))
        waiting[rollout_id] = rank

    def remove(self, rollout_id: str, tenant: str) -> None:
        self._waiting.get(tenant, {}).pop(rollout_id, None)

    def line(self, tenant: str) -> list[str]:
        """A tenant's rollouts in the order in which they go."""
        waiting = self._waiting.get(tenant, {})
        return sorted(waiting, key=waiting.__getitem__)

    def first(self) -> tuple[str, str] | None:
        """Rollout and tenant that are next."""
        tenants = [(self._start[tenant], tenant) for tenant, waiting in self._waiting.items() if waiting]
        if not tenants:
            return None
        _, tenant = min(tenants)
        return self.line(tenant)[0], tenant

    def charge(self, tenant: str) -> None:
        self._clock = self._start[tenant]
        self._start[tenant] = self._finish[tenant] = self._clock + 1 / self._weights.get(tenant, 1.0)
        self.claims[tenant] = self.claims.get(tenant, 0) + 1
