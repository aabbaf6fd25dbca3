"""Redis as a stage uses it: waited for while it is away or full, on none of the stage's clocks.

Every use of Redis within a stage goes through `ask` (on the event loop) or `wait_for` (in its thread).
"""

from __future__ import annotations

import asyncio
import threading
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
REFUSED_RETRY_S = 5.0
"""At most between two tries where it answers and refuses: each may send it a whole result to read."""
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


def wait_for(
    call: Callable[[], T], stopping: threading.Event | None = None, until: float = float("-inf")
) -> T:
    """The same in the caller's thread.

    Args:
        stopping: The worker's. Once it is set there is one more try: nobody extends a lease any more, and the
            worker cannot end before this thread does.
        until: Monotonic time; if it is later, what is waited until.

    Raises:
        RedisAway: As for `ask`, or the worker stops.
    """
    stopping = stopping or threading.Event()
    patience = _Patience(until)
    while True:
        try:
            return call()
        except redis.RedisError as error:
            pause_s = patience.check(error, ends=stopping.is_set())
        stopping.wait(pause_s)


class _Patience:
    """Of one call."""

    def __init__(self, until: float = float("-inf")) -> None:
        self._began = time.monotonic()
        self._ends = max(self._began + PATIENCE_S, until)
        self._pause_s = 0.0

    def check(self, error: redis.RedisError, ends: bool = False) -> float:
        """Seconds after which the call is to be made again."""
        if not is_away(error):
            raise error
        now = time.monotonic()
        if ends or now > self._ends:
            raise RedisAway(f"Redis was away, or full, for {now - self._began:.0f} s: {error}") from error
        if not self._pause_s:
            log.warning("Redis does not answer, or takes nothing; the stage waits", error=str(error))
        refused = isinstance(error, redis.ResponseError)  # full, a disk that cannot be written, a replica
        self._pause_s = min(2 * self._pause_s or RETRY_S, REFUSED_RETRY_S) if refused else RETRY_S
        return self._pause_s
