"""The scorer processes of a worker: few, warm, handed out in the order of asking."""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from services.settings import Settings, settings
from workers.scoring import metrics
from workers.scoring.process import (
    Scorer,
    ScorerCrashed,
    ScorerError,
    ScorerLost,
    ScorerOutOfMemory,
    ScorerTimeout,
)

SECOND_LOOK = 5
"""A second look has this part of the time: on a machine too slow for it the first one says nothing."""
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class ScorerPool:
    """Scorer processes, each started when a call finds none idle, and a thread for each call under way."""

    def __init__(self, *, size: int, memory_mb: int, max_calls: int) -> None:
        """
        Args:
            size: Most processes at once.
            memory_mb: Most address space of one; one that keeps more than half of it resident is replaced.
            max_calls: Calls after which one is replaced.
        """
        self.size, self.memory_mb, self.max_calls = size, memory_mb, max_calls
        self._threads = ThreadPoolExecutor(size, "scorers")  # first come, first served
        self._lock = threading.Lock()
        self._idle: list[Scorer] = []
        self._busy: dict[_Call, Scorer] = {}
        self._closed = False

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
        with self._lock:
            return [scorer.pid for scorer in (*self._idle, *self._busy.values())]

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
        outcome, call = "cancelled", _Call(function, payload, timeout_s)
        run = self._threads.submit(self._run, call)
        metrics.WAITING.inc()
        try:
            result = await asyncio.wrap_future(run)
            outcome = "ok"
            return result
        except (ScorerError, ScorerTimeout, ScorerCrashed) as error:
            outcome = error.outcome
            raise
        except asyncio.CancelledError:
            self._cancel(call)
            raise
        finally:
            if run.cancelled():  # before it had a thread
                metrics.WAITING.dec()
            metrics.CALLS.labels(function, outcome).inc()

    def _run(self, call: _Call) -> Any:
        metrics.WAITING.dec()
        while True:
            scorer, keep = self._take(call), False
            try:
                result = scorer.call(call.function, call.payload, call.timeout_s, call.context)
                keep = True
                return result
            except ScorerLost:
                continue  # it died in its sleep: another one, for that says nothing of the function
            except ScorerError:
                keep = True
                raise
            finally:
                self._give_back(call, scorer, keep)

    def _take(self, call: _Call) -> Scorer:
        """An idle process, best one that has the function's module imported; else a new one."""
        with self._lock:
            for scorer in [idle for idle in self._idle if idle.gone]:
                self._idle.remove(scorer)
                scorer.end()
            module = call.function.partition(":")[0]
            fitting = [idle for idle in self._idle if module in idle.modules] or self._idle
            scorer = fitting[-1] if fitting else None
            if scorer is not None:
                self._idle.remove(scorer)
        scorer = scorer or Scorer(self.memory_mb)
        with self._lock:
            self._busy[call] = scorer
        if self._closed or call.cancelled:
            scorer.kill()
        return scorer

    def _give_back(self, call: _Call, scorer: Scorer, keep: bool) -> None:
        worn = scorer.calls >= self.max_calls or scorer.rss > (self.memory_mb << 20) / 2
        with self._lock:
            del self._busy[call]
            if keep and not (worn or scorer.left_children or self._closed):
                self._idle.append(scorer)
                return
        scorer.end()

    def _cancel(self, call: _Call) -> None:
        call.cancelled = True
        with self._lock:
            scorer = self._busy.get(call)
        if scorer is not None:
            scorer.kill()

    def close(self) -> None:
        """Kill every process, also those at work: their calls, and those that wait, fail with
        `ScorerCrashed`."""
        self._closed = True
        with self._lock:
            idle, busy = self._idle, list(self._busy.values())
            self._idle = []
        for scorer in idle:
            scorer.end()
        for scorer in busy:
            scorer.kill()
        self._threads.shutdown(wait=False)


@dataclass(eq=False)
class _Call:
    """A call, from its asking to its end."""

    function: str
    payload: Any
    timeout_s: float
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """The caller's, for the log lines of what the function prints."""
    cancelled: bool = False


_pool: ScorerPool | None = None


async def score(function: str, payload: Any, *, timeout_s: float) -> Any:
    """`ScorerPool.score` on the pool of this process, which the first call makes from the settings."""
    global _pool
    _pool = _pool or ScorerPool.of(settings())
    return await _pool.score(function, payload, timeout_s=timeout_s)


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


def close() -> None:
    """Kill the scorers of this process; those of a worker end with it anyway."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None
