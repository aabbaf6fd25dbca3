"""Prometheus metrics of the whole service, read from Redis when they are asked for.

`TABLE` has all of them but those of the gateway process itself; `Scrape` reads their values.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

import rollout
from rollout.schema import Blame, Stage
from rollout.schema.batches import BatchState, Verdict
from rollout.schema.policy import UpdateState
from services.gateway import refusals
from services.queues import STAGES, queue_for
from services.state import observations
from services.state.autoscale import AutoscaleStore
from services.state.backends.waits import waits
from services.state.fleet import STOP_REASONS

if TYPE_CHECKING:
    from services.gateway.context import Gateway

KINDS = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
KNOWN = {
    "blame": list(Blame),
    "retry": list(Blame),
    "lost": list(Stage),
    "ended": [state for state in BatchState if state.ended],
    "n": [state for state in UpdateState if state.ended],
    "dropped": ["acknowledged", "size"],
    "bytes": ["acknowledged", "size"],
    "webhooks": ["delivered", "failed", "given_up"],
}
"""Labels of sums, by the sums' prefix, that are told of before they happen: of a counter that begins at 1
nobody sees the increase."""
# Fields of `HostClient.stats`.
SANDBOX_STATES = ("claimed", "warm", "waiting")
SANDBOX_EVENTS = (
    *("started", "claimed_warm", "failed"),
    *("expired", "died", "limited", "node", "adopted", "swept"),
    *("snapshots_taken", "snapshots_failed", "snapshots_begun"),
)
TABLE = """
gauge rollout_rollouts{state} states
    Rollouts by state; those of terminal states only grow.
gauge rollout_queue_depth{queue} queues
    Messages waiting in a queue.
gauge rollout_info{version} release
    1; the gateway's release.

gauge rollout_workers{stage} alive
    Live worker processes.
gauge rollout_fleet_slots{worker,node,stages} worker.slots
    Rollouts a worker carries at once now.
gauge rollout_fleet_slots_limit{worker,node,stages} worker.slots_limit
    What `set_slots` may give it.
gauge rollout_fleet_busy{worker,node,stages} worker.busy
    Rollouts a worker works on.
gauge rollout_node_free_bytes{node,resource} free
    What a node has left for sandboxes.
gauge rollout_node_stopped{node,reason} stopped
    1 while INIT is stopped on a node for want of it.
gauge rollout_node_init_waits{node} node.full
    1 while INIT waits on a node for RUN to catch up.
gauge rollout_ready_ahead{node} ahead
    Rollouts between the start of INIT and RUN, by node; ready ones without a sandbox under `-`.
gauge rollout_ready_ahead_limit{node} node.most_ahead
    Most of them on a node.
gauge rollout_sandboxes{node,state} sandboxes
    Sandboxes of a node.
counter rollout_sandbox_events{node,event} sandbox_events
    What happened to sandboxes since the node's host started.

gauge rollout_autoscale_need_slots{stage} autoscale_need
    Slots a stage should have, as the autoscaler has it.
gauge rollout_autoscale_held_back{stage,reason} autoscale_held_back
    Share of what waits for a stage that is no reason for more of it: in the next step it waits as well.
gauge rollout_autoscale_nodes{kind,state} autoscale_nodes
    Nodes or engines of a kind: serving (up), ordered (coming), and how many there are to be (target).
counter rollout_autoscale_actions{action} autoscale_actions
    Slots, nodes and engines given and taken; failures.

gauge rollout_tenant_live{tenant} tenant.live
    Rollouts of a tenant that have not ended.
gauge rollout_tenant_quota_live{tenant} tenant.quota_live
    Most of them that it may have; absent without a limit.
gauge rollout_tenant_waiting{tenant} tenant.waiting
    Rollouts of a tenant that wait for their turn in INIT.
gauge rollout_tenant_weight{tenant} tenant.weight
    Its share of INIT while others wait as well.
counter rollout_tenant_claimed{tenant} tenant.claimed
    Rollouts of a tenant that INIT took, attempts counted.

counter rollout_batches_started batch.created
    Batches started.
counter rollout_batches_ended{state} batch.ended_*
    Batches that ended.
counter rollout_batch_groups{verdict} verdicts
    Groups of batches decided.
counter rollout_batch_groups_refused{reason} batch.reason_*
    Groups that were not kept.
counter rollout_batch_groups_carried batch.carried
    Groups that another batch took over.
gauge rollout_batches_todo batches_todo
    Things to do for batches; many that stay mean that no worker does them.

gauge rollout_backend_up{backend} backend.healthy
    1 while it takes calls, 0 when it failed its probes or a weight update.
gauge rollout_backend_load{backend} backend.load
    Score in the heap of backends.
gauge rollout_backend_live_rollouts{backend} backend.live_rollouts
    Rollouts pinned to it.
gauge rollout_backend_capacity_tokens{backend} backend.capacity_tokens
    Tokens its key-value cache holds.
gauge rollout_backend_requests_running{backend} probe.running
    Calls it works on.
gauge rollout_backend_requests_waiting{backend} probe.waiting
    Calls in its own queue.
gauge rollout_backend_kv_usage{backend} probe.kv_usage
    Share of its key-value cache in use.
gauge rollout_backend_draining{backend} backend.draining
    1 while it takes no new rollouts.
gauge rollout_backend_paused{backend} backend.paused
    1 while its weights are exchanged.
gauge rollout_backend_probe_age_seconds{backend} probe_age
    Since it was probed.
counter rollout_backend_prompt_tokens{backend} probe.prompt_tokens
    Prompt tokens looked up in its prefix cache, since it started.
counter rollout_backend_cached_tokens{backend} probe.cached_tokens
    Those of them that were found there.
counter rollout_backend_generation_tokens{backend} probe.generation_tokens
    Tokens sampled since it started.
counter rollout_backend_requests{backend} probe.requests
    Calls that ended since it started.
counter rollout_backend_request_seconds{backend} probe.request_seconds
    Seconds they took in the engine, from arrival to end.
counter rollout_placements{event} placements
    Decisions where a rollout runs (placed, moved, refused …).
counter rollout_backend_wait_seconds{policy,tenant} wait.seconds
    Seconds that rollouts waited for room on the backends of a policy.
counter rollout_backend_waits{policy,tenant} wait.ended
    Their waits that ended, however they did.
gauge rollout_backend_waiting{policy,tenant} wait.waiting
    Rollouts that wait for room now.
gauge rollout_backend_waiting_longest_seconds{policy,tenant} wait.longest_s
    Since when the one has waited that waits longest.
counter rollout_policy_updates{policy,outcome} updates
    Weight updates that ended.
counter rollout_policy_update_seconds{policy} update_seconds
    Seconds that weight updates took.
gauge rollout_policy_info{policy,version} policy
    1 for a policy's current weights.

counter rollout_failures{blame} total.blame_*
    Failed rollouts by blame.
counter rollout_retries total.retries
    Attempts after the first one.
counter rollout_attempts_lost{blame} total.retry_*
    Attempts that failed and were followed by another one.
counter rollout_ended{attempts} total.attempts_*
    Rollouts that ended, by attempts used.
counter rollout_dropped{reason} total.drop_*
    Rollouts not to be trained on, by reason.
counter rollout_records_unreadable total.unreadable
    Records passed over because they cannot be read, once a process that met them.
counter rollout_leases_lost{stage} total.lost_*
    Rollouts whose worker died, hung or was cut off while it held them.
counter rollout_resumed{stage} total.resumed_*
    Stages that another worker took up, in the same attempt, when one was lost or stopped in them.
counter rollout_moved total.moved
    Rollouts whose sandbox's files left their node, to go on on another one.
counter rollout_moved_bytes total.moved_bytes
    Bytes of these files.
counter rollout_moves_failed total.moves_failed
    Rollouts whose files could not leave: they began anew.
histogram rollout_stage_duration_seconds{stage} times.stage
    Seconds at work in a stage, however it ended.
histogram rollout_queue_wait_seconds{stage} times.queue
    Seconds between two stages, by the stage waited for.
histogram rollout_duration_seconds{state} times.total
    Seconds from submission to the end.
histogram rollout_reward{handler} times.reward
    Rewards, of the rollouts that are not dropped.
histogram rollout_turns{handler} times.turns
    Their turns.
counter rollout_stage_seconds{stage} stage_seconds
    Seconds at work in a stage, or waiting in a queue.
counter rollout_stage_runs{stage} stage_runs
    Stages that ended.
gauge rollout_leases{stage} age.leases
    Rollouts that workers hold.
gauge rollout_lease_age_seconds{stage} age.lease_age
    Since the heartbeat that is longest ago.
gauge rollout_oldest_seconds{state} age.oldest
    Since the oldest live one was submitted.
gauge rollout_reaper_lag_seconds age.reaper_lag
    How late the look at what is due is; grows when no worker reaps.

gauge rollout_results_bytes stored_bytes
    Bytes of ended rollouts' trajectories in Redis, compressed.
gauge rollout_completions results_length
    Completions that a cursor can still read.
gauge rollout_completion_streams streams
    Streams of results, and of `/v1/live`, open at this gateway.
gauge rollout_page_viewers viewers
    Streams of `/v1/live` open at this gateway: pages that somebody looks at.
gauge rollout_gateway_waiters waiters
    Requests that wait for completions at this gateway, streams included.
counter rollout_results_acknowledged result.acknowledged
    Rollouts acknowledged by their readers.
counter rollout_results_dropped{reason} result.dropped_*
    Trajectories dropped before their retention was over.
counter rollout_results_dropped_bytes{reason} result.bytes_*
    Their bytes.
gauge rollout_bundles_bytes{tenant} bundles_stored
    Bytes of task bundles in Redis, compressed.
counter rollout_bundles{event} bundles
    Bundles that came new, were there already, were refused, or that workers fetched or missed.
gauge rollout_webhooks_pending webhooks_pending
    Webhooks neither delivered nor given up.
counter rollout_webhooks{event} result.webhooks_*
    Tries of webhooks, and those given up.
counter rollout_archived result.archived
    Rollouts written to the archive.
counter rollout_archived_bytes result.archived_bytes
    Bytes written to the archive, compressed.
counter rollout_archive_missed result.archive_missed
    Rollouts past their retention before they were archived.
counter rollout_archive_errors result.archive_errors
    Times that the archive could not be written.
gauge rollout_archive_waiting archive_lag
    Completions that the archive has not read yet.

gauge rollout_redis_ping_seconds ping
    How long it took to answer a PING.
gauge rollout_redis_memory_bytes server.used_memory
    Memory in use.
gauge rollout_redis_memory_limit_bytes memory_limit
    maxmemory; where none is set, the machine's memory.
gauge rollout_redis_clients server.connected_clients
    Connections.
gauge rollout_redis_replicas server.connected_slaves
    Replicas connected.
gauge rollout_redis_aof_enabled server.aof_enabled
    1 while there is an append-only file.
gauge rollout_redis_aof_bytes server.aof_current_size
    Size of the append-only file.
gauge rollout_redis_aof_write_ok server_ok.aof_last_write_status
    0 when the last write to the append-only file failed: Redis refuses writes.
gauge rollout_redis_aof_rewrite_ok server_ok.aof_last_bgrewrite_status
    0 when the last rewrite of the append-only file failed: it only grows.
gauge rollout_redis_uptime_seconds server.uptime_in_seconds
    Since it was started.
counter rollout_redis_commands server.total_commands_processed
    Commands worked off since it was started.
counter rollout_redis_aof_delayed_syncs server.aof_delayed_fsync
    Times that a write waited for the disk.
counter rollout_redis_evicted_keys server.evicted_keys
    Keys it deleted for want of memory: state that is lost.
counter rollout_redis_rejected_connections server.rejected_connections
    Connections beyond maxclients.
"""
"""Kind, name and labels of each metric, where its values are from (see `Scrape.read`), and its text."""
_ROW = re.compile(r"^(\w+) (\w+)(?:\{(\S+)\})? (\w+)(?:\.([\w*]+))?\n {4}(.+)$", re.MULTILINE)

_own = CollectorRegistry()
REQUESTS = Counter(
    "rollout_gateway_requests_total", "Requests answered.", ["method", "route", "status"], registry=_own
)
LATENCY = Histogram(
    "rollout_gateway_request_seconds", "Seconds to answer, long-polls included.", ["route"], registry=_own
)
FORKS = Counter("rollout_gateway_forks_total", "Requests of forks.", ["outcome"], registry=_own)
for _outcome in ("accepted", "refused"):
    FORKS.labels(_outcome)
ProcessCollector(namespace="rollout_gateway", registry=_own)

Value = float | None
"""None = there is none just now."""
Values = Mapping[Any, Value]
"""Values by label, or by tuple of labels."""


class Row(NamedTuple):
    """A metric."""

    kind: str
    name: str
    labels: str
    source: str
    argument: str
    text: str

    def read(self, scrape: Scrape) -> Iterator[Metric]:
        """Itself with its values; nothing where it has neither labels nor a value."""
        values = scrape.read(self.source, self.argument)
        if not self.labels:
            values = {} if values is None else {(): values}
        family = KINDS[self.kind](self.name, self.text, labels=self.labels.split(",") if self.labels else [])
        for names, value in values.items():
            named = [names] if isinstance(names, str) else [*names]
            if isinstance(value, observations.Histogram):
                family.add_metric(named, value.cumulative(), value.sum_s)
            elif value is not None:
                family.add_metric(named, value)
        if self.labels or family.samples:
            yield family


ROWS = [Row(*groups) for groups in _ROW.findall(TABLE)]


def queue_depths(gate: Gateway) -> dict[str, int]:
    """Messages waiting in each queue of a stage, and of a node that has workers. What waits for another node
    begins anew elsewhere (`Reaper`), and its messages mean nothing any more."""
    nodes = {queue_for(stage, worker.node) for worker in gate.fleet.workers() for stage in STAGES}
    ordered = sorted({*STAGES, *nodes})
    with gate.redis.pipeline(transaction=False) as pipe:
        for name in ordered:
            pipe.llen(name)
        return dict(zip(ordered, pipe.execute(), strict=True))


def _by(sums: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The sums `<prefix>_<label>` by label."""
    values: dict[str, Any] = dict.fromkeys(KNOWN.get(prefix, ()), 0)
    for field, value in sums.items():
        head, _, label = field.partition("_")
        if head == prefix and label:
            values[label] = value
    return values


def _each(things: Mapping[str, Any], names: Sequence[str], value: Callable[[Any, str], Any]) -> Values:
    """A value by the label of a thing and by a name."""
    return {(label, name): value(thing, name) for label, thing in things.items() for name in names}


class Scrape:
    """One look at the service: what each metric of the table reads."""

    def __init__(self, gate: Gateway) -> None:
        self._gate = gate
        self._sums = {
            "total": gate.rollouts.totals(),
            "result": gate.results.totals(),
            "batch": gate.batches.totals(),
            # Of the server that the gateway is connected to: with Sentinel, the master.
            "server": gate.redis.info(),
        }
        self._updates = {name: gate.policy.totals(name) for name in sorted(gate.policy.names())}
        self._histograms = gate.observations.histograms()
        self._ages = gate.observations.ages()
        self._admissions, self._hosts = gate.fleet.admissions(), gate.fleet.nodes()
        workers, backends = gate.fleet.workers(), gate.backends.list()
        self._fields: dict[str, Mapping[Any, Any]] = {
            # One series a process; `stages` has several, joined by `+`, where one serves several.
            "worker": {(each.name, each.node, "+".join(each.stages)): each for each in workers},
            "node": self._admissions,
            # What rollouts reserve on an LLM server, and what it said of itself at the last probe.
            "backend": {backend.id: backend for backend in backends},
            "probe": {backend.id: backend.stats for backend in backends},
            "wait": waits(gate.redis),
        }
        """What has values as fields, by source and by labels."""
        self._tenants = gate.tenants.usage()
        self._autoscaler = AutoscaleStore(gate.redis)
        self._decision = self._autoscaler.get() or {}
        self.states, self.queues = gate.rollouts.counts, lambda: queue_depths(gate)
        self.placements, self.autoscale_actions = gate.backends.totals, self._autoscaler.totals
        self.batches_todo, self.webhooks_pending = gate.batches.todo, gate.webhooks.pending
        self.bundles_stored, self.bundles = gate.bundles.stored, gate.bundles.totals
        self.stored_bytes, self.results_length = gate.results.stored_bytes, gate.result_stream.length
        self.archive_lag = gate.result_stream.archive_lag
        self.streams, self.waiters = lambda: gate.streams.open, lambda: gate.waiting.open
        self.viewers = lambda: gate.live.open
        self.alive = lambda: {stage: len(names) for stage, names in gate.fleet.alive().items()}
        self.release = lambda: {rollout.__version__: 1}

    def collect(self) -> Iterator[Metric]:
        """Every metric of the table, as `prometheus_client` has it."""
        for row in ROWS:
            yield from row.read(self)

    def read(self, source: str, argument: str) -> Value | Values:
        """A sum by its name, several by `prefix_*`, a field of each of several things, or what the method of
        that name makes of the argument."""
        if source in self._fields:
            return {labels: its and getattr(its, argument) for labels, its in self._fields[source].items()}
        if source not in self._sums:
            return getattr(self, source)(*filter(None, [argument]))
        sums = self._sums[source]
        return _by(sums, argument[:-2]) if argument.endswith("_*") else sums.get(argument, 0)

    def verdicts(self) -> Values:
        return {verdict: self._sums["batch"].get(verdict, 0) for verdict in Verdict}

    # -- times -------------------------------------------------------------------------------

    def times(self, prefix: str) -> Values:
        return dict(sorted(_by(self._histograms, prefix).items()))

    def stage_seconds(self) -> Values:
        return {name: seconds for name, (seconds, _) in observations.stage_totals(self._histograms).items()}

    def stage_runs(self) -> Values:
        return {name: runs for name, (_, runs) in observations.stage_totals(self._histograms).items()}

    def age(self, field: str) -> Value | Values:
        return getattr(self._ages, field)

    # -- workers and nodes -------------------------------------------------------------------

    def free(self) -> Values:
        return _each(self._admissions, STOP_REASONS, lambda its, reason: getattr(its, f"free_{reason}"))

    def stopped(self) -> Values:
        return _each(self._admissions, STOP_REASONS, lambda its, reason: reason in its.stopped)

    def ahead(self) -> Values:
        _, without_sandbox = self._gate.rollouts.ahead("")
        return {node: its.ahead for node, its in self._admissions.items()} | {"-": without_sandbox}

    def sandboxes(self) -> Values:
        return _each(self._hosts, SANDBOX_STATES, lambda host, state: host.get(state, 0))

    def sandbox_events(self) -> Values:
        values: dict[tuple[str, str], float] = {}
        for node, host in self._hosts.items():
            values |= {(node, event): host.get(event, 0) for event in SANDBOX_EVENTS}
            breaches = host.get("breaches", {})
            values |= {(node, f"over_{limit}_limit"): count for limit, count in breaches.items()}
        return values

    def autoscale_need(self) -> Values:
        return {stage: load["need"] for stage, load in self._decision.get("stages", {}).items()}

    def autoscale_held_back(self) -> Values:
        """`run`: INIT waits for RUN; `engines`: for room on an LLM backend."""
        loads = self._decision.get("stages", {}).items()
        reasons = ("run", "blocked"), ("engines", "engines")
        return {(stage, why): float(load.get(name, 0)) for stage, load in loads for why, name in reasons}

    def autoscale_nodes(self) -> Values:
        kinds = self._decision.get("nodes", {})
        return _each(kinds, ("up", "coming", "target"), lambda nodes, state: nodes[state])

    # -- tenants, backends, this gateway, Redis ----------------------------------------------

    def tenant(self, field: str) -> Values:
        """One series a tenant: operators make them, so there are few."""
        return {
            usage.tenant.name: getattr(usage if hasattr(usage, field) else usage.tenant, field)
            for usage in self._tenants
        }

    def probe_age(self) -> Values:
        probes = self._fields["probe"].items()
        return {name: stats and max(0.0, time.time() - stats.at) for name, stats in probes}

    def updates(self) -> Values:
        ended = {policy: _by(sums, "n").items() for policy, sums in self._updates.items()}
        return {(policy, outcome): count for policy, counts in ended.items() for outcome, count in counts}

    def update_seconds(self) -> Values:
        return {policy: sums.get("seconds", 0) for policy, sums in self._updates.items()}

    def policy(self) -> Values:
        known = {name: self._gate.policy.current(name) for name in self._updates}
        return {(name, current.policy.version): 1 for name, current in known.items() if current}

    def ping(self) -> Value:
        began = time.perf_counter()
        self._gate.redis.ping()
        return time.perf_counter() - began

    def server_ok(self, field: str) -> Value:
        return self._sums["server"].get(field, "ok") == "ok"

    def memory_limit(self) -> Value:
        """`maxmemory`; without one the machine's memory is the limit, and the kernel enforces it."""
        return self._sums["server"].get("maxmemory") or self._sums["server"].get("total_system_memory") or 0


def render(gate: Gateway) -> bytes:
    """The exposition text."""
    return b"".join(map(generate_latest, (Scrape(gate), _own, refusals.registry)))
