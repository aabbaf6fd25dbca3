"""Prometheus metrics of the whole service, read from Redis when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import redis
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

import rollout
from rollout.policy import UpdateState
from rollout.schema import Backend, Blame
from services.gateway import (
    autoscale_metrics,
    batch_metrics,
    fleet_metrics,
    redis_metrics,
    refusals,
    sharing_metrics,
)
from services.gateway.result_metrics import results
from services.queues import STAGES
from services.state.autoscale import AutoscaleStore
from services.state.observations import Observations, stage_totals
from services.state.reading import UNREADABLE_COUNT

if TYPE_CHECKING:
    from services.gateway.context import Gateway

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Fields of `HostClient.stats`.
SANDBOX_STATES = ("claimed", "warm", "waiting")
SANDBOX_EVENTS = (
    *("started", "claimed_warm", "failed"),
    *("expired", "died", "limited", "node", "adopted", "swept"),
)

BACKEND_GAUGES: tuple[tuple[str, str, Callable[[Backend], float | None]], ...] = (
    ("up", "1 while it takes calls, 0 when it failed its probes or a weight update.", lambda b: b.healthy),
    ("load", "Score in the heap of backends.", lambda b: b.load),
    ("live_rollouts", "Rollouts pinned to it.", lambda b: b.live_rollouts),
    ("capacity_tokens", "Tokens its key-value cache holds.", lambda b: b.capacity_tokens),
    ("requests_running", "Calls it works on.", lambda b: b.stats and b.stats.running),
    ("requests_waiting", "Calls in its own queue.", lambda b: b.stats and b.stats.waiting),
    ("kv_usage", "Share of its key-value cache in use.", lambda b: b.stats and b.stats.kv_usage),
    ("draining", "1 while it takes no new rollouts.", lambda b: b.draining),
    ("paused", "1 while its weights are exchanged.", lambda b: b.paused),
    ("probe_age_seconds", "Since it was probed.", lambda b: b.stats and max(0.0, time.time() - b.stats.at)),
)
TIMES = (
    ("stage", "rollout_stage_duration_seconds", "Seconds at work in a stage, however it ended.", "stage"),
    ("queue", "rollout_queue_wait_seconds", "Seconds between two stages, by the stage waited for.", "stage"),
    ("total", "rollout_duration_seconds", "Seconds from submission to the end.", "state"),
)
"""Prefix of the series in Redis, name, text and label of each histogram."""
LEASES_LOST_TEXT = "Rollouts whose worker died, hung or was cut off while it held them."
LOST_TEXT = "Attempts that failed and were followed by another one."
BACKEND_COUNTERS = (
    ("prompt_tokens", "Prompt tokens looked up in its prefix cache, since it started."),
    ("cached_tokens", "Those of them that were found there."),
    ("generation_tokens", "Tokens sampled since it started."),
    ("requests", "Calls that ended since it started."),
    ("request_seconds", "Seconds they took in the engine, from arrival to end."),
)

_own = CollectorRegistry()
REQUESTS = Counter(
    "rollout_gateway_requests_total", "Requests answered.", ["method", "route", "status"], registry=_own
)
LATENCY = Histogram(
    "rollout_gateway_request_seconds", "Seconds to answer, long-polls included.", ["route"], registry=_own
)
ProcessCollector(namespace="rollout_gateway", registry=_own)


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

        yield from fleet_metrics.workers(gate.fleet.workers())
        yield from fleet_metrics.room(gate.fleet.admissions())
        yield from autoscale_metrics.autoscale(AutoscaleStore(gate.redis))
        yield from _sandboxes(gate.fleet.nodes())
        yield from sharing_metrics.tenants(gate.tenants.usage())
        yield from batch_metrics.batches(gate.batches.totals(), gate.batches.todo())
        _, without_sandbox = gate.rollouts.ahead("")
        yield from sharing_metrics.admissions(gate.fleet.admissions(), without_sandbox)

        yield from _backends(gate)

        totals = gate.rollouts.totals()
        yield _by(totals, "blame", "rollout_failures", "Failed rollouts by blame.", "blame", Blame)
        yield CounterMetricFamily(
            "rollout_retries", "Attempts after the first one.", value=totals.get("retries", 0)
        )

        yield _by(totals, "retry", "rollout_attempts_lost", LOST_TEXT, "blame", Blame)
        yield _by(totals, "attempts", "rollout_ended", "Rollouts that ended, by attempts used.", "attempts")
        yield _by(totals, "drop", "rollout_dropped", "Rollouts not to be trained on, by reason.", "reason")
        yield CounterMetricFamily(
            "rollout_records_unreadable",
            "Records passed over because they cannot be read, once a process that met them.",
            value=totals.get(UNREADABLE_COUNT, 0),
        )
        yield _by(totals, "lost", "rollout_leases_lost", LEASES_LOST_TEXT, "stage", STAGES)
        yield from _times(gate.observations)
        yield from _policy(gate)
        yield from results(gate)
        yield from redis_metrics.server(gate.redis)
        info = GaugeMetricFamily("rollout_info", "1; the gateway's release.", labels=["version"])
        info.add_metric([rollout.__version__], 1)
        yield info


def _by(
    totals: dict[str, int], kind: str, name: str, text: str, label: str, known: Iterable[str] = ()
) -> CounterMetricFamily:
    """The totals `<kind>_<label's value>` as one counter.

    Args:
        known: Values told of before they happen: of a counter that begins at 1 nobody sees the increase.
    """
    values = dict.fromkeys(known, 0)
    for field, value in totals.items():
        found, _, labelled = field.partition("_")
        if found == kind and labelled:
            values[labelled] = value
    counter = CounterMetricFamily(name, text, labels=[label])
    for labelled, value in values.items():
        counter.add_metric([labelled], value)
    return counter


def _times(observations: Observations) -> Iterator[Metric]:
    """Histograms that the scripts in Redis keep, and how old things are now."""
    found = observations.histograms()
    for prefix, name, text, label in TIMES:
        family = HistogramMetricFamily(name, text, labels=[label])
        for series, histogram in sorted(found.items()):
            kind, _, labelled = series.partition("_")
            if kind == prefix:
                family.add_metric([labelled], histogram.cumulative(), histogram.sum_s)
        yield family
    seconds = CounterMetricFamily(
        "rollout_stage_seconds", "Seconds at work in a stage, or waiting in a queue.", labels=["stage"]
    )
    runs = CounterMetricFamily("rollout_stage_runs", "Stages that ended.", labels=["stage"])
    for label, (spent, count) in stage_totals(found).items():
        seconds.add_metric([label], spent)
        runs.add_metric([label], count)
    yield seconds
    yield runs
    ages = observations.ages()
    for name, text, label, values in (
        ("rollout_leases", "Rollouts that workers hold.", "stage", ages.leases),
        ("rollout_lease_age_seconds", "Since the heartbeat that is longest ago.", "stage", ages.lease_age),
        ("rollout_oldest_seconds", "Since the oldest live one was submitted.", "state", ages.oldest),
    ):
        gauge = GaugeMetricFamily(name, text, labels=[label])
        for labelled, value in values.items():
            gauge.add_metric([labelled], value)
        yield gauge
    yield GaugeMetricFamily(
        "rollout_reaper_lag_seconds",
        "How late the look at what is due is; grows when no worker reaps.",
        value=ages.reaper_lag,
    )


def _backends(gate: Gateway) -> Iterator[Metric]:
    """LLM servers: what rollouts reserve on them, and what they said of themselves at the last probe."""
    backends = gate.backends.list()
    for name, text, value in BACKEND_GAUGES:
        gauge = GaugeMetricFamily(f"rollout_backend_{name}", text, labels=["backend"])
        for backend in backends:
            number = value(backend)
            if number is not None:
                gauge.add_metric([backend.id], number)
        yield gauge
    for name, text in BACKEND_COUNTERS:
        counter = CounterMetricFamily(f"rollout_backend_{name}", text, labels=["backend"])
        for backend in backends:
            number = getattr(backend.stats, name, None)
            if number is not None:
                counter.add_metric([backend.id], number)
        yield counter
    placements = CounterMetricFamily(
        "rollout_placements", "Decisions where a rollout runs (placed, moved, refused …).", labels=["event"]
    )
    for event, count in gate.backends.totals().items():
        placements.add_metric([event], count)
    yield placements


def _policy(gate: Gateway) -> Iterator[Metric]:
    """Weight updates, and the weights that new rollouts run on."""
    totals = gate.policy.totals()
    ended = [state for state in UpdateState if state.ended]
    yield _by(totals, "n", "rollout_policy_updates", "Weight updates that ended.", "outcome", ended)
    yield CounterMetricFamily(
        "rollout_policy_update_seconds", "Seconds that weight updates took.", value=totals.get("seconds", 0)
    )
    info = GaugeMetricFamily("rollout_policy_info", "1 for the current policy.", labels=["version"])
    if current := gate.policy.current():
        info.add_metric([current.policy.version], 1)
    yield info


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
    return generate_latest(registry) + generate_latest(_own) + generate_latest(refusals.registry)
