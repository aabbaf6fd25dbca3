"""A worker's own metrics: what no other process can know. Everything of rollouts is counted in Redis instead.

Served where `ROLLOUT_WORKER_METRICS_PORT` says; without it nothing is opened.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterator

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from rollout.schema import Stage
from services.settings import Settings
from workers import checkpoints
from workers.handlers.environments import metrics as environments
from workers.held import Held
from workers.image_builds import BUILD_SECONDS
from workers.scoring import metrics as scoring

log = structlog.get_logger("metrics")

CHORE_FAILURES = Counter(
    "rollout_worker_chore_failures",
    "Turns of a chore that an error or an absent Redis broke off; it goes on with the next one.",
    ["chore"],
    registry=None,
)
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)


class WorkerMetrics:
    """The metrics of one worker process."""

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
        for metric in (*scoring.ALL, *environments.ALL, *checkpoints.ALL, CHORE_FAILURES, BUILD_SECONDS):
            self.registry.register(metric)
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """What is in hand at the moment of the scrape."""
        counts = Counts(held.stage for held in list(self._held()))
        gauge = GaugeMetricFamily("rollout_worker_held", "Rollouts this process works on.", labels=["stage"])
        for stage in Stage:
            gauge.add_metric([stage.value], counts[stage])
        yield gauge

    def serve(self, settings: Settings) -> None:
        """Open the port.

        One that is taken is an error in the log and no more: a worker without metrics still works.
        """
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
        else:
            log.info("metrics of this worker are served", address=address)
