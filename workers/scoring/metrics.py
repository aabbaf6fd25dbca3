"""Numbers of the scorers, among the worker's own metrics (`workers/metrics.py`)."""

from prometheus_client import Counter, Gauge, Histogram

BUCKETS_S = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60)

CALLS = Counter(
    "rollout_worker_scorer_calls",
    "Calls of scorers by outcome: ok, error, timeout, crashed or cancelled.",
    ["function", "outcome"],
    registry=None,
)
SECONDS = Histogram(
    "rollout_worker_scorer_seconds",
    "Seconds that a scorer ran, without its wait for a free process and its imports.",
    ["function"],
    buckets=BUCKETS_S,
    registry=None,
)
PROCESSES = Gauge("rollout_worker_scorer_processes", "Scorer processes that live.", registry=None)
WAITING = Gauge("rollout_worker_scorer_waiting", "Calls that wait for a free scorer.", registry=None)

ALL = (CALLS, SECONDS, PROCESSES, WAITING)
