"""A worker's own metrics: what no other process can know. Everything of rollouts is counted in Redis instead.

Served where `ROLLOUT_WORKER_METRICS_PORT` says; without it nothing is opened.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from services.queues import STAGES
from services.settings import Settings
from workers.scoring import metrics as scoring

if TYPE_CHECKING:
    from workers.process import Held

log = structlog.get_logger("metrics")

LAG_EVERY_S = 1.0
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)


class WorkerMetrics:
    """Of one worker process."""

    def __init__(self, held: Callable[[], Collection[Held]]) -> None:
        """
        Args:
            held: The rollouts that the process works on now.
        """
        self._held = held
        self.registry = CollectorRegistry()
        self.heartbeats_failed = Counter(
            "rollout_worker_heartbeats_failed",
            "Heartbeats that did not reach Redis; leases run out after a few in a row.",
            registry=self.registry,
        )
        self.loop_lag = Histogram(
            "rollout_worker_loop_lag_seconds",
            "How late the event loop is: a handler that blocks it stalls every rollout of the process.",
            buckets=LAG_BUCKETS_S,
            registry=self.registry,
        )
        for one in scoring.ALL:
            self.registry.register(one)
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """What is in hand at the moment of the scrape."""
        held = Counts(one.stage.value for one in list(self._held()))
        gauge = GaugeMetricFamily("rollout_worker_held", "Rollouts this process works on.", labels=["stage"])
        for stage in STAGES:
            gauge.add_metric([stage], held[stage])
        yield gauge

    def serve(self, settings: Settings, loop: asyncio.AbstractEventLoop, stopping: threading.Event) -> None:
        """Open the port, if one is set, and measure until the worker stops.

        A port that is taken is an error in the log and no more: a worker without metrics still works.
        """
        if not settings.worker_metrics_port:
            return
        address = f"{settings.worker_metrics_host}:{settings.worker_metrics_port}"
        try:
            start_http_server(
                settings.worker_metrics_port, settings.worker_metrics_host, registry=self.registry
            )
        except OSError as error:
            log.error(
                f"no metrics of this worker: {address} cannot be opened; give each worker of a node a port "
                "of its own in ROLLOUT_WORKER_METRICS_PORT",
                error=str(error),
            )
            return
        log.info("metrics of this worker are served", address=address)
        threading.Thread(
            target=self._measure_lag, args=(loop, stopping), name="loop-lag", daemon=True
        ).start()

    def _measure_lag(self, loop: asyncio.AbstractEventLoop, stopping: threading.Event) -> None:
        while not stopping.wait(LAG_EVERY_S):
            ran = threading.Event()
            asked = time.monotonic()
            loop.call_soon_threadsafe(ran.set)
            # Also while the loop is blocked: a long block must show before it ends.
            while not ran.wait(LAG_BUCKETS_S[-1]) and not stopping.is_set():
                self.loop_lag.observe(time.monotonic() - asked)
            self.loop_lag.observe(time.monotonic() - asked)
