"""What the ProRL API remembers of each tenant: whether it was started, its jobs, its LLM servers."""

from __future__ import annotations

import json
from dataclasses import dataclass

import redis

from services.state import keys
from services.state.redis import now

FORGET_S = 8 * 86400.0
"""No rollout is older than its deadline, of a week at most."""


@dataclass(frozen=True)
class Run:
    """Where the API stands between `/start` and `/stop`."""

    running: bool | None
    """None: it was never started or stopped."""
    number: int
    """How often it was stopped: ids of jobs count within one run."""


class ProrlStore:
    """The API's state in Redis, so that a gateway may restart at any time."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def run(self, tenant: str) -> Run:
        running, number = self._redis.hmget(keys.prorl(tenant), "running", "number")
        return Run(None if running is None else running == "1", int(number or 0))

    def start(self, tenant: str) -> bool:
        """False: it was running already."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(keys.prorl(tenant), "running")
            pipe.hset(keys.prorl(tenant), "running", "1")
            return pipe.execute()[0] != "1"

    def stop(self, tenant: str) -> list[str]:
        """Take no more jobs; answers with the rollouts that may be under way."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(keys.prorl(tenant), "running", "0")
            pipe.hincrby(keys.prorl(tenant), "number", 1)
            pipe.zrange(keys.prorl_jobs(tenant), 0, -1)
            return pipe.execute()[-1]

    def began(self, tenant: str, rollout_id: str) -> None:
        """Note a rollout before it is submitted."""
        at = now(self._redis)
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.zadd(keys.prorl_jobs(tenant), {rollout_id: at}, nx=True)
            pipe.zremrangebyscore(keys.prorl_jobs(tenant), "-inf", at - FORGET_S)
            pipe.execute()

    def ended(self, tenant: str, *rollout_ids: str) -> None:
        """Forget rollouts that have ended."""
        if rollout_ids:
            self._redis.zrem(keys.prorl_jobs(tenant), *rollout_ids)

    def jobs(self, tenant: str) -> list[str]:
        """Rollouts that may not have ended, the oldest first."""
        return self._redis.zrange(keys.prorl_jobs(tenant), 0, -1)

    # -- LLM servers -------------------------------------------------------------------------

    def add_server(self, tenant: str, address: str, backend_id: str, *, made: bool) -> None:
        """Note an address and the backend that it is; `made`: the backend is there because of it."""
        server = json.dumps({"backend": backend_id, "made": made})
        # A second time says nothing new, and would say that somebody else has made it.
        self._redis.hsetnx(keys.prorl_servers(tenant), address, server)

    def servers(self, tenant: str) -> list[str]:
        """Addresses as they were given."""
        return sorted(self._redis.hkeys(keys.prorl_servers(tenant)))

    def clear_servers(self, tenant: str) -> list[str]:
        """Forget all addresses; answers with the backends that were made for them."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hvals(keys.prorl_servers(tenant))
            pipe.delete(keys.prorl_servers(tenant))
            known = [json.loads(server) for server in pipe.execute()[0]]
        return sorted({server["backend"] for server in known if server["made"]})
