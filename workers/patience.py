"""Redis as a stage uses it: waited for while it is away or full, on none of the stage's clocks.

Every use of Redis within a stage goes through `ask` (on the event loop) or `wait_for` (in its thread).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import redis
import structlog

from services.state.redis import is_away
from workers.clocks import stopped
from workers.errors import InfrastructureError

log = structlog.get_logger("patience")

PATIENCE_S = 600.0
"""For a Redis that is away. The fence decides whether what was done meanwhile still counts."""
RETRY_S = 0.5
FULL_RETRY_S = 5.0
"""At most between two tries where it is full: each sends a whole result, which takes of its memory."""
_threads = ThreadPoolExecutor(32, thread_name_prefix="redis")
"""Not the event loop's own: a frozen Redis must not keep handlers from their threads."""

T = TypeVar("T")


class RedisAway(InfrastructureError):
    """Redis did not come back in time."""


async def ask(call: Callable[..., T], *args: Any) -> T:
    """Call something of Redis' in a thread, again and again until it is there.

    Raises:
        RedisAway: It was away for `PATIENCE_S`.
    """
    loop = asyncio.get_running_loop()
    patience = _Patience()
    with stopped():
        while True:
            try:
                return await loop.run_in_executor(_threads, call, *args)
            except redis.RedisError as error:
                pause_s = patience.check(error)
            await asyncio.sleep(pause_s)


def wait_for(call: Callable[[], T], until: float = float("-inf")) -> T:
    """The same in the caller's thread.

    Args:
        until: Monotonic time; if it is later, what is waited until.

    Raises:
        RedisAway: As for `ask`.
    """
    patience = _Patience(until)
    while True:
        try:
            return call()
        except redis.RedisError as error:
            pause_s = patience.check(error)
        time.sleep(pause_s)


class _Patience:
    """Of one call."""

    def __init__(self, until: float = float("-inf")) -> None:
        self._began = time.monotonic()
        self._ends = max(self._began + PATIENCE_S, until)
        self._pause_s = 0.0

    def check(self, error: redis.RedisError) -> float:
        """Seconds after which the call is to be made again."""
        if not is_away(error):
            raise error
        now = time.monotonic()
        if now > self._ends:
            raise RedisAway(f"Redis was away, or full, for {now - self._began:.0f} s: {error}") from error
        if not self._pause_s:
            log.warning("Redis does not answer, or takes nothing; the stage waits", error=str(error))
        full = isinstance(error, redis.OutOfMemoryError)
        self._pause_s = min(2 * self._pause_s or RETRY_S, FULL_RETRY_S) if full else RETRY_S
        return self._pause_s
