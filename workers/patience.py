"""The time limits of a stage, and Redis as it uses it: waited for while it is away or full, on none of them.

Every use of Redis within a stage goes through `ask` (on the event loop) or `wait_for` (in its thread).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import redis
import structlog

from services.state.redis import is_away
from workers.errors import DeadlinePassed, InfrastructureError, StageTimeout

log = structlog.get_logger("patience")

PATIENCE_S = 600.0
"""How long a Redis may be away. The fence decides whether what was done meanwhile still counts."""
RETRY_S = 0.5
REFUSED_RETRY_S = 5.0
"""The longest pause between two tries where it answers and refuses: each may send it a whole result."""
_threads = ThreadPoolExecutor(32, thread_name_prefix="redis")
"""Not the event loop's own: a frozen Redis must not keep handlers from their threads."""

T = TypeVar("T")


class _Clock:
    """An `asyncio.timeout` that can be stopped; several may ask for it at once."""

    def __init__(self, scope: asyncio.Timeout) -> None:
        self._scope = scope
        self._stops = 0
        self._rest_s = 0.0

    def stop(self) -> None:
        self._stops += 1
        when = self._scope.when()
        if self._stops == 1 and when is not None and not self._scope.expired():
            self._rest_s = when - asyncio.get_running_loop().time()
            self._reschedule(None)

    def go_on(self) -> None:
        self._stops -= 1
        if not self._stops and self._scope.when() is None:
            self._reschedule(asyncio.get_running_loop().time() + self._rest_s)

    def _reschedule(self, when: float | None) -> None:
        with suppress(RuntimeError):  # its block has ended, or is being cancelled
            self._scope.reschedule(when)


_running: ContextVar[tuple[_Clock, ...]] = ContextVar("running", default=())


@asynccontextmanager
async def time_limit(seconds: float, error: type[StageTimeout], message: str) -> AsyncIterator[None]:
    """Bound a block; a `TimeoutError` that the block itself raises stays what it is.

    What a stage waits for Redis does not count, but for the deadline of the rollout, which is the caller's.

    Raises:
        StageTimeout: The block took longer; of the given type and with the given message.
    """
    try:
        async with asyncio.timeout(seconds) as scope:
            clocks = () if issubclass(error, DeadlinePassed) else (_Clock(scope),)
            token = _running.set((*_running.get(), *clocks))
            try:
                yield
            finally:
                _running.reset(token)
    except TimeoutError as cause:
        if scope.expired():
            raise error(message) from cause
        raise


@contextmanager
def stopped() -> Iterator[None]:
    """Around an await that must not count towards the limits of the stage."""
    clocks = _running.get()
    for clock in clocks:
        clock.stop()
    try:
        yield
    finally:
        for clock in clocks:
            clock.go_on()


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
    """How long one call goes on waiting."""

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
