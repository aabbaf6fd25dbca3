"""How late the worker's event loop is."""

from __future__ import annotations

import threading
import time

from workers.chores.base import Chore
from workers.metrics import LAG_BUCKETS_S
from workers.services import WorkerServices


class LoopLag(Chore):
    """Measures it where somebody reads it."""

    name = "loop-lag"

    @classmethod
    def is_for(cls, services: WorkerServices) -> bool:
        return bool(services.settings.worker_metrics_port)

    def begin(self) -> None:
        self._services.metrics.serve(self._services.settings)

    def tick(self) -> None:
        lag = self._services.metrics.loop_lag
        ran = threading.Event()
        asked = time.monotonic()
        self._services.loop.call_soon_threadsafe(ran.set)
        # Also while the loop is blocked: a long block must show before it ends.
        while not ran.wait(LAG_BUCKETS_S[-1]) and not self.stopping.is_set():
            lag.observe(time.monotonic() - asked)
        lag.observe(time.monotonic() - asked)
