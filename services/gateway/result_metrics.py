"""Prometheus metrics of results: what they take, what was dropped, webhooks, the archive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from services.gateway.context import Gateway

DROPPED = ("acknowledged", "size")
WEBHOOKS = ("delivered", "failed", "given_up")
COUNTERS = (
    ("rollout_results_acknowledged", "Rollouts acknowledged by their readers.", "acknowledged"),
    ("rollout_archived", "Rollouts written to the archive.", "archived"),
    ("rollout_archived_bytes", "Bytes written to the archive, compressed.", "archived_bytes"),
    ("rollout_archive_missed", "Rollouts past their retention before they were archived.", "archive_missed"),
    ("rollout_archive_errors", "Times that the archive could not be written.", "archive_errors"),
)


def results(gate: Gateway) -> Iterator[Metric]:
    """Read from Redis at each scrape."""
    totals = gate.results.totals()
    yield GaugeMetricFamily(
        "rollout_results_bytes",
        "Bytes of ended rollouts' trajectories in Redis, compressed.",
        value=gate.results.stored_bytes(),
    )
    yield GaugeMetricFamily(
        "rollout_completions", "Completions that a cursor can still read.", value=gate.completions.length()
    )
    yield GaugeMetricFamily(
        "rollout_completion_streams", "Streams of completions open at this gateway.", value=gate.streams.open
    )
    yield GaugeMetricFamily(
        "rollout_gateway_waiters",
        "Requests that wait for completions at this gateway, streams included.",
        value=gate.waiting.open,
    )
    dropped = CounterMetricFamily(
        "rollout_results_dropped", "Trajectories dropped before their retention was over.", labels=["reason"]
    )
    size = CounterMetricFamily("rollout_results_dropped_bytes", "Their bytes.", labels=["reason"])
    for reason in DROPPED:
        dropped.add_metric([reason], totals.get(f"dropped_{reason}", 0))
        size.add_metric([reason], totals.get(f"bytes_{reason}", 0))
    yield dropped
    yield size
    yield GaugeMetricFamily(
        "rollout_webhooks_pending", "Webhooks neither delivered nor given up.", value=gate.webhooks.pending()
    )
    tries = CounterMetricFamily(
        "rollout_webhooks", "Tries of webhooks, and those given up.", labels=["event"]
    )
    for event in WEBHOOKS:
        tries.add_metric([event], totals.get(f"webhooks_{event}", 0))
    yield tries
    for name, text, field in COUNTERS:
        yield CounterMetricFamily(name, text, value=totals.get(field, 0))
    waiting = gate.completions.archive_lag()
    if waiting is not None:
        yield GaugeMetricFamily(
            "rollout_archive_waiting", "Completions that the archive has not read yet.", value=waiting
        )
