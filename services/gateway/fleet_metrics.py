"""Metrics of the fleets: what each worker carries, and what its node has left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from services.state.fleet import NodeAdmission, Worker


def workers(found: Sequence[Worker]) -> Iterator[Metric]:
    """One series a worker process; `stages` has several, joined by `+`, where one serves several."""
    labels = ["worker", "node", "stages"]
    slots = GaugeMetricFamily("rollout_fleet_slots", "Rollouts a worker carries at once now.", labels=labels)
    most = GaugeMetricFamily("rollout_fleet_slots_limit", "What `set_slots` may give it.", labels=labels)
    held = GaugeMetricFamily("rollout_fleet_busy", "Rollouts a worker works on.", labels=labels)
    for one in found:
        values = [one.name, one.node, "+".join(one.stages)]
        slots.add_metric(values, one.slots)
        most.add_metric(values, one.most_slots)
        held.add_metric(values, one.held)
    yield from (slots, most, held)


def room(nodes: Mapping[str, NodeAdmission]) -> Iterator[Metric]:
    """Of each node with an INIT worker."""
    free = GaugeMetricFamily(
        "rollout_node_free_bytes", "What a node has left for sandboxes.", labels=["node", "resource"]
    )
    for node, said in nodes.items():
        for resource, left in (("disk", said.free_disk), ("memory", said.free_memory)):
            free.add_metric([node, resource], left)
    yield free
