"""Prometheus metrics of batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rollout.batch import BatchState, Verdict

_REASON, _ENDED = "reason_", "ended_"


def batches(totals: Mapping[str, int], todo: int) -> Iterator[Metric]:
    """Sums over all batches.

    Args:
        totals: As `BatchStore.totals` has them.
        todo: Things that somebody has to do for them, those of later included.
    """
    yield CounterMetricFamily("rollout_batches_started", "Batches started.", value=totals.get("created", 0))
    ended = CounterMetricFamily("rollout_batches_ended", "Batches that ended.", labels=["state"])
    for state in BatchState:
        if state.ended:
            ended.add_metric([state.value], totals.get(_ENDED + state.value, 0))
    yield ended
    groups = CounterMetricFamily("rollout_batch_groups", "Groups of batches decided.", labels=["verdict"])
    for verdict in Verdict:
        groups.add_metric([verdict.value], totals.get(verdict.value, 0))
    yield groups
    reasons = CounterMetricFamily(
        "rollout_batch_groups_refused", "Groups that were not kept.", labels=["reason"]
    )
    for name, count in totals.items():
        if name.startswith(_REASON):
            reasons.add_metric([name.removeprefix(_REASON)], count)
    yield reasons
    yield CounterMetricFamily(
        "rollout_batch_groups_carried",
        "Groups that another batch took over.",
        value=totals.get("carried", 0),
    )
    yield GaugeMetricFamily(
        "rollout_batches_todo",
        "Things to do for batches; many that stay mean that no worker does them.",
        value=todo,
    )
