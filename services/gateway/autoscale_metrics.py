"""Metrics of the autoscaler, where one runs."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.state.autoscale import COUNTERS, AutoscaleStore


def autoscale(store: AutoscaleStore) -> Iterator[Metric]:
    """What it wants, and what it has done."""
    state = store.get() or {}
    need = GaugeMetricFamily(
        "rollout_autoscale_need_slots",
        "Slots a stage should have, as the autoscaler has it.",
        labels=["stage"],
    )
    for stage, seen in state.get("stages", {}).items():
        need.add_metric([stage], seen["need"])
    yield need
    nodes = GaugeMetricFamily(
        "rollout_autoscale_nodes",
        "Nodes of a kind: serving (up), ordered (coming), and how many there are to be (target).",
        labels=["kind", "state"],
    )
    for kind, seen in state.get("nodes", {}).items():
        for name in ("up", "coming", "target"):
            nodes.add_metric([kind, name], seen[name])
    yield nodes
    done = CounterMetricFamily(
        "rollout_autoscale_actions", "Slots and nodes given and taken; failures.", labels=["action"]
    )
    totals = store.totals()
    for name in COUNTERS:
        done.add_metric([name], totals[name])
    yield done
