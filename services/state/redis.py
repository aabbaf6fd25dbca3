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
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelPool
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from services.redis_address import RedisAddress, parse

MAX_CONNECTIONS = 64
"""Per process. Callers wait for one rather than open more in a burst."""
ANSWER_S = 30.0
"""For a server to answer: it may be frozen for a while, and nobody else could."""
SHORT_ANSWER_S = 8.0
"""Where there is another way, or Sentinels replace who is silent. No call of ours blocks so long (5 s)."""


class _MasterPool(SentinelConnectionPool, redis.BlockingConnectionPool):
    """Connections to whoever is the master when one is made; callers wait for a free one."""


def connect(url: str, *, max_connections: int = MAX_CONNECTIONS, retries: int = 3) -> redis.Redis:
    """A client with a bounded, blocking pool and strings as strings. Nothing is sent yet.

    Raises:
        AddressError: The URL is no address of Redis.
    """
    options = {
        "max_connections": max_connections,
        "timeout": 20,
        "health_check_interval": 15,
        "retry": Retry(ExponentialBackoff(cap=1.0, base=0.05), retries=retries),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
    }
    address = parse(url)
    pool = _pool(address, (Sentinel, _MasterPool, redis.BlockingConnectionPool), options)
    return redis.Redis(connection_pool=pool)


class LoopConnection:
    """A connection of an event loop's own: half of what a round trip by way of a thread takes. One task at a
    time uses it, and it tries once: who has more patience than that goes by `connect`.
    """

    def __init__(self, url: str) -> None:
        """Raises AddressError, as `connect`."""
        # The library would begin a task for each write, to bound it; `send` bounds all.
        options = {"socket_timeout": None, "retry": AsyncRetry(NoBackoff(), 0)}
        classes = AsyncSentinel, AsyncSentinelPool, aioredis.ConnectionPool
        self._pool = _pool(parse(url), classes, options)  # of which the connection holds a weak reference
        self._connection = self._pool.make_connection()

    async def send(self, commands: list[Sequence[Any]]) -> list[Any]:
        """The replies, in order.

        Raises:
            redis.RedisError: One command at least has failed; others may have been done.
            TimeoutError: Redis did not answer in time.
        """
        try:
            async with asyncio.timeout(SHORT_ANSWER_S):
                if not self._connection.is_connected:
                    await self._connection.connect()
                await self._connection.send_packed_command(b"".join(map(pack_command, commands)))
                return [await self._connection.read_response() for _ in commands]
        except BaseException:
            await self.close()  # what else it has to say is nobody's answer
            raise

    async def close(self) -> None:
        """Hang up; the next `send` connects anew."""
        await self._connection.disconnect(nowait=True)


def _pool(address: RedisAddress, classes: tuple[Any, Any, Any], options: dict[str, Any]) -> Any:
    """A pool of the third class, or by Sentinels of the second, with strings as strings."""
    options = {
        "decode_responses": True,
        # A byte that is no text makes that text a little wrong, and not everybody's page an error.
        "encoding_errors": "replace",
        "socket_timeout": SHORT_ANSWER_S if address.sentinels else ANSWER_S,
        "socket_connect_timeout": 5,
    } | options
    if address.sentinels:
        sentinel = classes[0](address.sentinels, sentinel_kwargs=address.sentinel_options())
        return classes[1](address.master, sentinel, db=address.db, **address.credentials, **options)
    return classes[2].from_url(address.url, **options)


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
