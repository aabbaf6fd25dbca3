"""The one place where a connection to Redis is made."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from services.redis_address import parse

MAX_CONNECTIONS = 64
"""Per process. Callers wait for one rather than open more in a burst."""
ANSWER_S = 30.0
"""For a server to answer: it may be frozen for a while, and nobody else could."""
ANSWER_BEHIND_SENTINELS_S = 8.0
"""There, a server that does not answer is replaced; longer than any call of ours blocks (5 s)."""


class _MasterPool(SentinelConnectionPool, redis.BlockingConnectionPool):
    """Connections to whoever is the master when one is made; callers wait for a free one."""


def connect(url: str, *, max_connections: int = MAX_CONNECTIONS, retries: int = 3) -> redis.Redis:
    """A client with a bounded, blocking pool and strings as strings. Nothing is sent yet.

    Raises:
        AddressError: The URL is no address of Redis.
    """
    address = parse(url)
    options: dict[str, Any] = {
        "max_connections": max_connections,
        "timeout": 20,
        "decode_responses": True,
        # A byte that is no text makes that text a little wrong, and not everybody's page an error.
        "encoding_errors": "replace",
        "socket_timeout": ANSWER_BEHIND_SENTINELS_S if address.sentinels else ANSWER_S,
        "socket_connect_timeout": 5,
        "health_check_interval": 15,
        "retry": Retry(ExponentialBackoff(cap=1.0, base=0.05), retries=retries),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
    }
    if address.sentinels:
        sentinel = Sentinel(address.sentinels, sentinel_kwargs=address.sentinel_options())
        pool = _MasterPool(address.master, sentinel, db=address.db, **address.credentials, **options)
        return redis.Redis(connection_pool=pool)
    return redis.Redis(connection_pool=redis.BlockingConnectionPool.from_url(url, **options))


_REFUSALS = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "LOADING", "EXECABORT", "READONLY", "OOM")
"""How an answer begins that says: not now. Full, a disk that cannot be written, a failover, a start."""


def is_away(error: BaseException) -> bool:
    """Whether Redis was away, full or not to be written: the same call may succeed later."""
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return True
    refused = redis.OutOfMemoryError, redis.ReadOnlyError
    return isinstance(error, refused) or (
        isinstance(error, redis.ResponseError) and str(error).startswith(_REFUSALS)
    )


def now(client: redis.Redis) -> float:
    """Seconds by Redis' clock, by which everything is decided that nodes must agree on."""
    seconds, micros = client.time()
    return seconds + micros / 1_000_000
