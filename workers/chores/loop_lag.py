"""How late the worker's event loop is."""

from __future__ import annotations

import asyncio
import threading
import time

from workers.chores.base import Chore
from workers.metrics import LAG_BUCKETS_S, WorkerMetrics
from workers.services import WorkerServices


class LoopLag(Chore):
    """Measures it where somebody reads it."""

    name = "loop-lag"

    def __init__(self, metrics: WorkerMetrics, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._metrics = metrics
        self._loop = loop

    @classmethod
    def of(cls, services: WorkerServices) -> LoopLag | None:
        if not services.settings.worker_metrics_port:
            return None
        return cls(services.metrics, services.loop)

    def begin(self, services: WorkerServices) -> None:
        self._metrics.serve(services.settings)

    def tick(self) -> None:
        ran = threading.Event()
        asked = time.monotonic()
        self._loop.call_soon_threadsafe(ran.set)
        # Also while the loop is blocked: a long block must show before it ends.
        while not ran.wait(LAG_BUCKETS_S[-1]) and not self.stopping.is_set():
            self._metrics.loop_lag.observe(time.monotonic() - asked)
        self._metrics.loop_lag.observe(time.monotonic() - asked)
