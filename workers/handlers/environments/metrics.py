"""Numbers of the environments, among the worker's own metrics (`workers/metrics.py`)."""

from prometheus_client import Gauge, Histogram

SECONDS = Histogram(
    "rollout_worker_environment_seconds",
    "Seconds that an environment took to begin an episode, answer a turn, or score it.",
    ["kind", "call"],
    buckets=(0.005, 0.05, 0.5, 1, 5, 30, 120),
    registry=None,
)
PROCESSES = Gauge("rollout_worker_environment_processes", "Environment processes that live.", registry=None)

ALL = (SECONDS, PROCESSES)
