"""Backends as Redis has them: their description, and what changes about each and for each of its policies."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import redis

from rollout.schema import Backend, BackendStats
from services.state import keys

LIVE_FIELDS = {
    *("healthy", "reachable", "error", "draining", "paused"),
    *("live_rollouts", "load", "stats", "policy_version", "versions", "rejected", "policy"),
}
"""Of `Backend`: kept apart from its description, because they change."""


@lru_cache(maxsize=1024)
def described(raw: str) -> Backend:
    """A description."""
    return Backend.model_validate_json(raw)


def fleet(client: redis.Redis, policy: str | None = None, backend_id: str | None = None) -> list[Backend]:
    """All backends, those of a policy as they serve it, or the one that is named; the least loaded first."""
    if backend_id is None:
        known = client.hgetall(keys.BACKENDS)
    else:
        raw = client.hget(keys.BACKENDS, backend_id)
        known = {backend_id: raw} if raw else {}
    its = {name: raw for name, raw in known.items() if policy is None or policy in described(raw).served}
    with client.pipeline(transaction=False) as pipe:
        for name, raw in its.items():
            # Its score is the same in all heaps that it is in.
            pipe.zscore(keys.backends_load(keys.of(next(iter(described(raw).served)))), name)
            pipe.hgetall(keys.backend(name))
        live = pipe.execute()
    rows = zip(its.values(), live[::2], live[1::2], strict=True)
    backends = [_backend(raw, load or 0.0, counters, policy) for raw, load, counters in rows]
    return sorted(backends, key=lambda backend: (backend.load, backend.id))


def verdict_of(by: Literal["health", "weights"], policy: str) -> str:
    """The field with why a backend cannot be used."""
    return "error" if by == "health" else f"rejected{keys.of(policy)}"


def _backend(raw: str, load: float, live: dict[str, str], policy: str | None = None) -> Backend:
    known, stats = described(raw), live.get("stats")
    versions = {name: live.get(f"version{keys.of(name)}") or None for name in known.served}
    told = ((name, live.get(f"rejected{keys.of(name)}")) for name in known.served)
    rejected = {name: why for name, why in told if why}
    first = next(iter(known.served))
    backend = known.model_copy(
        update={
            "load": load,
            "live_rollouts": int(live.get("live", 0)),
            "policy": first,
            "policy_version": versions[first],
            "versions": {name: version for name, version in versions.items() if version},
            "rejected": rejected,
            # All of its policies must be wrong before it is of no use.
            "healthy": "error" not in live and len(rejected) < len(known.served),
            "reachable": "error" not in live,
            "error": live.get("error") or next(iter(rejected.values()), None),
            "draining": "draining" in live,
            "paused": "paused" in live,
            "stats": BackendStats.model_validate_json(stats) if stats else None,
        }
    )
    return backend.of(policy) if policy else backend
