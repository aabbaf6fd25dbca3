"""Prometheus metrics of the whole service, read from Redis when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import redis
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.queues import STAGES

if TYPE_CHECKING:
    from services.gateway.context import Gateway

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Fields of `HostClient.stats`.
SANDBOX_STATES = ("claimed", "warm", "waiting")
SANDBOX_EVENTS = ("started", "claimed_warm", "failed", "expired", "died", "limited", "adopted", "swept")

_own = CollectorRegistry()
REQUESTS = Counter(
    "rollout_gateway_requests_total", "Requests answered.", ["method", "route", "status"], registry=_own
)
LATENCY = Histogram(
    "rollout_gateway_request_seconds", "Seconds to answer, long-polls included.", ["route"], registry=_own
)


def queue_depths(client: redis.Redis) -> dict[str, int]:
    """Messages waiting in each queue that exists, those of the nodes included."""
    names = set(STAGES)
    for key in client.scan_iter("_kombu.binding.*", count=1000):
        name = key.removeprefix("_kombu.binding.")
        if name.split(".")[0] in STAGES:
            names.add(name)
    ordered = sorted(names)
    with client.pipeline(transaction=False) as pipe:
        for name in ordered:
            pipe.llen(name)
        return dict(zip(ordered, pipe.execute(), strict=True))


class _FromRedis:
    """A collector that reads the state of the service at each scrape."""

    def __init__(self, gate: Gateway) -> None:
        self._gate = gate

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        gate = self._gate
        states = GaugeMetricFamily(
            "rollout_rollouts", "Rollouts by state; those of terminal states only grow.", labels=["state"]
        )
        for state, count in gate.rollouts.counts().items():
            states.add_metric([state], count)
        yield states

        depth = GaugeMetricFamily("rollout_queue_depth", "Messages waiting in a queue.", labels=["queue"])
        for queue, length in queue_depths(gate.redis).items():
            depth.add_metric([queue], length)
        yield depth

        workers = GaugeMetricFamily("rollout_workers", "Live worker processes.", labels=["stage"])
        for stage, names in gate.fleet.alive().items():
            workers.add_metric([stage], len(names))
        yield workers

        yield from _sandboxes(gate.fleet.nodes())

        load = GaugeMetricFamily("rollout_backend_load", "Score in the heap of backends.", labels=["backend"])
        live = GaugeMetricFamily(
            "rollout_backend_live_rollouts", "Rollouts pinned to a backend.", labels=["backend"]
        )
        for backend in gate.backends.list():
            load.add_metric([backend.id], backend.load)
            live.add_metric([backend.id], backend.live_rollouts)
        yield load
        yield live

        totals = gate.rollouts.totals()
        seconds = CounterMetricFamily(
            "rollout_stage_seconds", "Seconds at work in a stage, or waiting in a queue.", labels=["stage"]
        )
        runs = CounterMetricFamily("rollout_stage_runs", "Stages that ended.", labels=["stage"])
        blame = CounterMetricFamily("rollout_failures", "Failed rollouts by blame.", labels=["blame"])
        for name, value in totals.items():
            kind, _, label = name.partition("_")
            if kind == "ms":
                seconds.add_metric([label], value / 1000)
            elif kind == "n":
                runs.add_metric([label], value)
            elif kind == "blame":
                blame.add_metric([label], value)
        yield seconds
        yield runs
        yield blame
        yield CounterMetricFamily(
            "rollout_retries", "Attempts after the first one.", value=totals.get("retries", 0)
        )


def _sandboxes(nodes: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    """What the sandbox host of each node said last."""
    now = GaugeMetricFamily("rollout_sandboxes", "Sandboxes of a node.", labels=["node", "state"])
    events = CounterMetricFamily(
        "rollout_sandbox_events",
        "What happened to sandboxes since the node's host started.",
        labels=["node", "event"],
    )
    for node, said in nodes.items():
        for state in SANDBOX_STATES:
            now.add_metric([node, state], said.get(state, 0))
        for event in SANDBOX_EVENTS:
            events.add_metric([node, event], said.get(event, 0))
        for limit, count in said.get("breaches", {}).items():
            events.add_metric([node, f"over_{limit}_limit"], count)
    yield now
    yield events


def render(gate: Gateway) -> bytes:
    """The exposition text."""
    registry = CollectorRegistry()
    registry.register(_FromRedis(gate))
    return generate_latest(registry) + generate_latest(_own)
