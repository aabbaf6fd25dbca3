"""How long rollouts wait for room on the backends, by policy and tenant."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import redis
from pydantic_core import from_json

from rollout.schema.base import DEFAULT_POLICY
from services.state import keys
from services.state.tenants import DEFAULT_TENANT


@dataclass
class Waits:
    """Of a tenant's rollouts, for a policy."""

    seconds: float = 0.0
    """Of waits that ended, however they did."""
    ended: int = 0
    waiting: int = 0
    """Rollouts that wait now."""
    longest_s: float = 0.0
    """Of them who waits longest."""


def waits(client: redis.Redis) -> dict[tuple[str, str], Waits]:
    """All there were, by policy and tenant."""
    with client.pipeline() as pipe:
        pipe.hgetall(keys.BACKEND_WAITS)
        pipe.hvals(keys.BACKEND_ASKS)
        pipe.time()
        totals, asks, (now, _) = pipe.execute()
    found: defaultdict[tuple[str, str], Waits] = defaultdict(Waits)
    for name, value in totals.items():
        policy, tenant, *n = name.split(" ")
        if n:
            found[policy, tenant].ended = int(value)
        else:
            found[policy, tenant].seconds = int(value) / 1000
    for raw in asks:
        ask = from_json(raw.partition(" ")[2])
        its = found[ask.get("policy", DEFAULT_POLICY), ask.get("tenant", DEFAULT_TENANT)]
        its.waiting += 1
        its.longest_s = max(its.longest_s, now - ask["since"] / 1000)
    return dict(found)
