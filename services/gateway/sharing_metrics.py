"""Metrics of how tenants share the service, and of what keeps INIT from going on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.state.fleet import STOP_REASONS, NodeAdmission
from services.state.tenants import Usage


def tenants(found: Sequence[Usage]) -> Iterator[Metric]:
    """One series a tenant: operators make them, so there are few."""
    gauges = {
        name: GaugeMetricFamily(f"rollout_tenant_{name}", text, labels=["tenant"])
        for name, text in (
            ("live", "Rollouts of a tenant that have not ended."),
            ("quota_live", "Most of them that it may have; absent without a limit."),
            ("waiting", "Rollouts of a tenant that wait for their turn in INIT."),
            ("weight", "Its share of INIT while others wait as well."),
        )
    }
    claimed = CounterMetricFamily(
        "rollout_tenant_claimed", "Rollouts of a tenant that INIT took, attempts counted.", labels=["tenant"]
    )
    for one in found:
        name, limit = one.tenant.name, one.tenant.quota_live
        gauges["live"].add_metric([name], one.live)
        gauges["waiting"].add_metric([name], one.waiting)
        gauges["weight"].add_metric([name], one.tenant.weight)
        if limit is not None:
            gauges["quota_live"].add_metric([name], limit)
        claimed.add_metric([name], one.claimed)
    yield from gauges.values()
    yield claimed


def admissions(nodes: Mapping[str, NodeAdmission], without_sandbox: int) -> Iterator[Metric]:
    """Of each node with an INIT worker.

    Args:
        without_sandbox: Ready rollouts without a sandbox, which are on no node.
    """
    stopped = GaugeMetricFamily(
        "rollout_node_stopped", "1 while INIT is stopped on a node for want of it.", labels=["node", "reason"]
    )
    waits = GaugeMetricFamily(
        "rollout_node_init_waits", "1 while INIT waits on a node for RUN to catch up.", labels=["node"]
    )
    ahead = GaugeMetricFamily(
        "rollout_ready_ahead",
        "Rollouts between the start of INIT and RUN, by node; ready ones without a sandbox under `-`.",
        labels=["node"],
    )
    most = GaugeMetricFamily("rollout_ready_ahead_limit", "Most of them on a node.", labels=["node"])
    for node, said in nodes.items():
        for reason in STOP_REASONS:
            stopped.add_metric([node, reason], reason in said.stopped)
        waits.add_metric([node], said.full)
        ahead.add_metric([node], said.ahead)
        most.add_metric([node], said.most_ahead)
    ahead.add_metric(["-"], without_sandbox)
    yield from (stopped, waits, ahead, most)
