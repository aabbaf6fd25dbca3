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
                patience.check(error)
            await asyncio.sleep(RETRY_S)


def wait_for(call: Callable[[], T]) -> T:
    """The same in the caller's thread.

    Raises:
        RedisAway: As for `ask`.
    """
    patience = _Patience()
    while True:
        try:
            return call()
        except redis.RedisError as error:
            patience.check(error)
        time.sleep(RETRY_S)


class _Patience:
    """Of one call."""

    def __init__(self) -> None:
        self._ends = time.monotonic() + PATIENCE_S
        self._told = False

    def check(self, error: redis.RedisError) -> None:
        """Return if the call is to be made again."""
        if not is_away(error):
            raise error
        if time.monotonic() > self._ends:
            raise RedisAway(f"Redis was away for {PATIENCE_S:.0f} s: {error}") from error
        if not self._told:
            self._told = True
            log.warning("Redis does not answer, or takes nothing; the stage waits", error=str(error))
