"""The scorer processes of a worker: few, warm, handed out in the order of asking."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

from services.settings import Settings, settings
from workers.scoring import metrics
from workers.scoring.errors import ScorerCrashed, ScorerError, ScorerOutOfMemory, ScorerTimeout
from workers.scoring.process import Scorer, ScorerLost

SECOND_LOOK = 5
"""A second look has this part of the time: on a machine too slow for it the first one says nothing."""
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class ScorerPool:
    """Scorer processes of one event loop; each is started when a call finds none idle."""

    def __init__(self, *, size: int, memory_mb: int, max_calls: int) -> None:
        """
        Args:
            size: Most processes at once.
            memory_mb: Most address space of one; one that keeps more than half of it resident is replaced.
            max_calls: Calls after which one is replaced.
        """
        self._memory_mb = memory_mb
        self._max_calls = max_calls
        self._slots = asyncio.Semaphore(size)  # first come, first served
        self._idle: list[Scorer] = []
        self._busy: set[Scorer] = set()

    @classmethod
    def of(cls, config: Settings) -> ScorerPool:
        """As the deployment's settings have it."""
        return cls(
            size=config.scorers or os.cpu_count() or 1,
            memory_mb=config.scorer_memory_mb,
            max_calls=config.scorer_calls,
        )

    @property
    def pids(self) -> list[int]:
        """Processes that live, idle or busy."""
        return [scorer.pid for scorer in (*self._idle, *self._busy)]

    async def score(self, function: str, payload: Any, *, timeout_s: float) -> Any:
        """Run `function` ("package.module:name") on `payload` in a scorer process.

        Both its argument and its result must be what JSON carries. It runs on the main thread of a process
        that serves many calls: SIGALRM works, and modules stay imported. What it prints goes to the log.

        Args:
            timeout_s: Seconds the function may run. The wait for a free process, its start and the import of
                the function's module do not count.

        Raises:
            ScorerError: The function raised, cannot be imported or answered with what JSON cannot carry.
            ScorerTimeout: It ran longer; the process was killed.
            ScorerCrashed: Its process died, ran out of memory or did not start.
        """
        if not _TARGET.fullmatch(function):
            raise ScorerError(f"scorer {function!r} is not of the form 'package.module:function'")
        outcome = "cancelled"
        try:
            with metrics.WAITING.track_inprogress():
                await self._slots.acquire()
            try:
                result = await self._score(function, payload, timeout_s)
            finally:
                self._slots.release()
            outcome = "ok"
            return result
        except (ScorerError, ScorerTimeout, ScorerCrashed) as error:
            outcome = error.outcome
            raise
        finally:
            metrics.CALLS.labels(function, outcome).inc()

    async def _score(self, function: str, payload: Any, timeout_s: float) -> Any:
        while True:
            scorer = self._take(function) or await Scorer.start(self._memory_mb)
            self._busy.add(scorer)
            try:
                result = await scorer.call(function, payload, timeout_s)
            except ScorerLost:
                # It died in its sleep: another one, for that says nothing of the function.
                self._end(scorer)
                continue
            except ScorerError:
                self._give_back(scorer)
                raise
            except BaseException:
                self._end(scorer)
                raise
            self._give_back(scorer)
            return result

    def _take(self, function: str) -> Scorer | None:
        """An idle process, best one that has the function's module imported."""
        for scorer in [idle for idle in self._idle if idle.gone]:
            self._idle.remove(scorer)
            scorer.kill()
        if not self._idle:
            return None
        module = function.partition(":")[0]
        chosen = next((idle for idle in reversed(self._idle) if module in idle.modules), self._idle[-1])
        self._idle.remove(chosen)
        return chosen

    def _give_back(self, scorer: Scorer) -> None:
        worn = scorer.calls >= self._max_calls or scorer.rss > (self._memory_mb << 20) / 2
        if worn or scorer.left_children:
            self._end(scorer)
        else:
            self._busy.discard(scorer)
            self._idle.append(scorer)

    def _end(self, scorer: Scorer) -> None:
        self._busy.discard(scorer)
        scorer.kill()

    def close(self) -> None:
        """Kill every process, also those at work: their calls fail with `ScorerCrashed`."""
        for scorer in [*self._idle, *self._busy]:
            scorer.kill()
        self._idle.clear()

    def abandon(self) -> None:
        """Kill every process of an event loop that has been closed."""
        for scorer in [*self._idle, *self._busy]:
            scorer.abandon()


_pools: dict[asyncio.AbstractEventLoop, ScorerPool] = {}


async def score(function: str, payload: Any, *, timeout_s: float) -> Any:
    """`ScorerPool.score` on the pool of this event loop, which the first call makes from the settings."""
    loop = asyncio.get_running_loop()
    if loop not in _pools:
        # A worker has one loop; who runs handlers by `asyncio.run` has many.
        for old in [known for known in _pools if known.is_closed()]:
            _pools.pop(old).abandon()
        _pools[loop] = ScorerPool.of(settings())
    return await _pools[loop].score(function, payload, timeout_s=timeout_s)


async def score_or_blame(function: str, payload: Any, *, known: Any, timeout_s: float) -> Any:
    """`score`, and a second look where it takes too long or too much memory, or ends its process.

    Args:
        known: A payload that a healthy scorer is quick to judge, say the accepted answer as the answer.

    Returns:
        What the function returns; None: `known` was judged at once, so the payload's own content is at fault.
            A process that dies is not its fault until a second one did so, too.

    Raises:
        ScorerError, ScorerTimeout, ScorerCrashed: As `score` has it; also if `known` fares no better.
    """
    try:
        return await score(function, payload, timeout_s=timeout_s)
    except (ScorerTimeout, ScorerCrashed) as error:
        await score(function, known, timeout_s=timeout_s / SECOND_LOOK)
        if isinstance(error, ScorerTimeout | ScorerOutOfMemory):
            return None
    try:
        return await score(function, payload, timeout_s=timeout_s)
    except (ScorerTimeout, ScorerCrashed):
        return None


async def close() -> None:
    """Kill the scorers of this event loop; those of a worker end with it anyway."""
    if (pool := _pools.pop(asyncio.get_running_loop(), None)) is not None:
        pool.close()
