"""The one place where a connection to Redis and a Lua script are made."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

MAX_CONNECTIONS = 64
"""Per process. Callers wait for one rather than open more in a burst."""


def connect(url: str, *, max_connections: int = MAX_CONNECTIONS) -> redis.Redis:
    """A client with a bounded, blocking pool and strings as strings."""
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=20,
        decode_responses=True,
        socket_timeout=30,
        socket_connect_timeout=5,
        health_check_interval=15,
        retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), retries=3),
        retry_on_error=[redis.ConnectionError, redis.TimeoutError],
    )
    return redis.Redis(connection_pool=pool)


@lru_cache
def lua_source(name: str) -> str:
    """Text of `lua/<name>.lua`."""
    return (resources.files("services.state") / "lua" / f"{name}.lua").read_text()
