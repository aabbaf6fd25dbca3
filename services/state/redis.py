"""The one place where a connection to Redis is made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import redis
import redis.asyncio as aioredis
from hiredis import pack_command
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from services.redis_address import RedisAddress, parse

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
    retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), retries=retries)
    options = _options(address) | {
        "max_connections": max_connections,
        "timeout": 20,
        "health_check_interval": 15,
        "retry": retry,
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
    }
    if address.sentinels:
        sentinel = Sentinel(address.sentinels, sentinel_kwargs=address.sentinel_options())
        pool = _MasterPool(address.master, sentinel, db=address.db, **address.credentials, **options)
        return redis.Redis(connection_pool=pool)
    return redis.Redis(connection_pool=redis.BlockingConnectionPool.from_url(url, **options))


class LoopConnection:
    """A connection of an event loop's own: a third of the time that a thread's client takes. It is used by
    one task at a time, and tries once: who has more patience than that goes by `connect`.
    """

    def __init__(self, url: str) -> None:
        """
        Raises:
            AddressError: The URL is no address of Redis.
        """
        address = parse(url)
        # The library would begin a task for each write, to bound it; `send` bounds all.
        options = _options(address) | {"socket_timeout": None, "retry": AsyncRetry(NoBackoff(), 0)}
        self._answer_s = ANSWER_BEHIND_SENTINELS_S if address.sentinels else ANSWER_S
        if address.sentinels:
            sentinel = AsyncSentinel(address.sentinels, sentinel_kwargs=address.sentinel_options())
            credentials = address.credentials
            client = sentinel.master_for(address.master, db=address.db, **credentials, **options)
        else:
            client = aioredis.Redis.from_url(url, **options)
        self._pool = client.connection_pool
        self._connection: aioredis.Connection | None = None

    async def send(self, commands: list[Sequence[Any]]) -> list[Any]:
        """The replies, in order.

        Raises:
            redis.RedisError: One command at least has failed; others may have been done.
            TimeoutError: Redis did not answer in time.
        """
        try:
            async with asyncio.timeout(self._answer_s):
                if self._connection is None:
                    self._connection = await self._pool.get_connection()
                await self._connection.send_packed_command(b"".join(map(pack_command, commands)))
                return [await self._connection.read_response() for _ in commands]
        except BaseException:
            await self.close()  # what else it has to say is nobody's answer
            raise

    async def close(self) -> None:
        """Hang up; the next `send` connects anew."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)


def _options(address: RedisAddress) -> dict[str, Any]:
    return {
        "decode_responses": True,
        # A byte that is no text makes that text a little wrong, and not everybody's page an error.
        "encoding_errors": "replace",
        "socket_timeout": ANSWER_BEHIND_SENTINELS_S if address.sentinels else ANSWER_S,
        "socket_connect_timeout": 5,
    }


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
