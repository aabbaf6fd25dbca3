"""The autoscaler's round: look at the load in Redis, decide, act on workers' slots and on Slurm's nodes.

Of several autoscalers the one acts that holds a lock in Redis.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import redis
import structlog
from celery import Celery
from kombu.exceptions import OperationalError

from rollout.schema import State
from rollout.schema.fleet import WorkerLoad
from services.autoscale.engines import NAME, LlmLoad, SlurmEngines, llm_load, name_of
from services.autoscale.policy import (
    INIT,
    STAGES,
    Bounds,
    Follower,
    Goal,
    Load,
    NodePolicy,
    NodeState,
    hold_back,
    need,
    share_out,
    shift_blame,
)
from services.launch import SlurmError
from services.launch.slurm.plan import NODE
from services.launch.slurm.stack import DRAIN_GRACE_S, SlurmStack
from services.state import keys
from services.state.autoscale import AutoscaleStore
from services.state.backends.store import PlacementPolicy
from services.state.election import Election
from services.state.fleet import FleetStore
from services.state.observations import Observations, stage_totals

log = structlog.get_logger("autoscale")

SETTLE_S = 30.0
"""After an order of nodes, before the next one: what was submitted may not be listed yet."""
BACK_OFF_S, MOST_BACK_OFF_S = 30.0, 600.0
"""After Slurm refused something: first pause, doubled each time up to the longest."""
PATIENCE_ROUNDS = 6
REPLY_S = 5.0
"""For workers to answer a control command; one that does not is told again at the next decision."""
WAITS_IN = {"init": State.QUEUED, "run": State.READY, "eval": State.EVALUATING}
"""In the last one rollouts also are while they are worked on; those have an owner."""
WORKED_ON_IN = {"init": State.INITIALIZING, "run": State.RUNNING}
LOOKED_AT = 100
"""Rollouts of a stage, the oldest by submission, among which the one that has waited longest is sought."""
SMOOTHING = 0.3
"""Weight of what ended since the last look, in the mean time of a stage."""
Kind = tuple[str, ...]
"""Stages that a node serves; only one of all stages can hold sandboxes."""
Workers = Sequence[WorkerLoad]
Wanted = tuple[str, NodeState, int, str, Callable[[], None]]
"""Of a kind: its name, what there is, how many there are to be, why, and what has it so."""


class Observer:
    """Looks at the service again and again; times of stages are those of what ended in between."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._fleet = FleetStore(client)
        self._observations = Observations(client)
        self._ended: dict[str, tuple[float, int]] = {}
        self._service_s: dict[str, float] = {}

    def look(self) -> tuple[dict[str, Load], list[WorkerLoad]]:
        """The load of each stage, and the live workers.

        Raises:
            redis.RedisError: Redis is away.
        """
        workers = self._fleet.workers()
        admissions = self._fleet.admissions()
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.COUNTS)
            pipe.time()
            counts, (seconds, micros) = pipe.execute()
        scoring = self._observations.ages().leases["eval"]
        self._measure(stage_totals(self._observations.histograms()))
        now_ms = seconds * 1000 + micros / 1000
        waiting = {stage: int(counts.get(state, 0)) for stage, state in WAITS_IN.items()}
        waiting["eval"] = max(0, waiting["eval"] - scoring)
        busy = {stage: int(counts.get(state, 0)) for stage, state in WORKED_ON_IN.items()} | {"eval": scoring}
        # INIT's slots count only where the node is not short of disk or memory, and INIT is blocked where it
        # is far enough ahead of RUN on every node that has room.
        stopped = {node for node, admission in admissions.items() if admission.stopped}
        full = [admission.full for admission in admissions.values() if not admission.stopped]
        loads = {}
        for stage in STAGES:
            shut = stopped if stage == INIT else ()
            loads[stage] = Load(
                waiting=waiting[stage],
                oldest_s=self._oldest_s(stage, now_ms) if waiting[stage] else 0.0,
                busy=busy[stage],
                slots=sum(w.slots for w in workers if stage in w.stages and w.node not in shut),
                service_s=self._service_s.get(stage),
                blocked=stage == INIT and bool(full) and all(full),
            )
        return loads, workers

    def _measure(self, ended: Mapping[str, tuple[float, int]]) -> None:
        """Mean seconds at work of the stages that ended since the last look, smoothed."""
        for stage in STAGES:
            seconds, count = ended.get(stage, (0.0, 0))
            seconds_before, before = self._ended.get(stage, (0.0, 0))
            if count > before:
                mean = (seconds - seconds_before) / (count - before)
                known = self._service_s.get(stage, mean)
                self._service_s[stage] = known + SMOOTHING * (mean - known)
        self._ended = dict(ended)

    def _oldest_s(self, stage: str, now_ms: float) -> float:
        ids = self._redis.zrange(keys.by_state(WAITS_IN[stage]), 0, LOOKED_AT - 1)
        with self._redis.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hmget(keys.record(rollout_id), "since", "owner")
            waits = [now_ms - int(since) for since, owner in pipe.execute() if since and not owner]
        return max(waits, default=0.0) / 1000


# ------------------------------------------------------------------------------ what it can do


def apply_slots(app: Celery, slots: int, workers: Workers) -> dict[str, int]:
    """Spread a stage's slots over its workers, by the control command `set_slots`.

    Returns:
        New slots of each worker that took them.
    """
    taken: dict[str, int] = {}
    changes = share_out(slots, {w.name: (w.slots, w.slots_limit, w.busy) for w in workers})
    for number in sorted(set(changes.values())):
        names = [name for name, target in changes.items() if target == number]
        replies = app.control.broadcast(
            "set_slots", {"slots": number}, names, reply=True, timeout=REPLY_S, limit=len(names)
        )
        for name, answer in (pair for reply in replies or () for pair in reply.items()):
            if "ok" in answer:
                taken[name] = number
            else:
                log.warning("a worker refused its slots", worker=name, slots=number, answer=answer)
    return taken


class SlurmNodes:
    """Jobs of the service in a run directory, as `rollout slurm scale` and `drain` treat them.

    Its methods raise SlurmError when Slurm refuses or does not answer, or no service runs.
    """

    def __init__(self, stack: SlurmStack, grace_s: float = DRAIN_GRACE_S) -> None:
        """`grace_s`: for the rollouts of a drained node, before they are handed back."""
        self._stack, self._grace_s = stack, grace_s

    def look(self, kind: Kind, workers: Workers) -> NodeState:
        """What there is, nodes on their way included, those on their way out not."""
        jobs = self._stack.active(NODE, list(kind))
        announced: dict[str, set[str]] = {}
        for worker in workers:
            announced.setdefault(worker.node, set()).update(worker.stages)
        serving = {node for node, stages in announced.items() if stages.issuperset(kind)}
        up = sum(job.member is not None and job.member.name in serving for job in jobs)
        options = self._stack.saved()[0]
        return NodeState(up, len(jobs) - up, {stage: options.slots_of(stage) for stage in kind})

    def set(self, kind: Kind, target: int, workers: Workers) -> None:
        """Have so many nodes; those with the least in hand are drained first."""
        held: Counter[str] = Counter()
        for worker in workers:
            held[worker.node] += worker.busy
        self._stack.scale(target, list(kind), NODE, self._grace_s, held)


# ------------------------------------------------------------------------------ the round


@dataclass
class Options:
    """What may be changed, and how far."""

    goal: Goal = field(default_factory=Goal)
    live: Bounds | None = None
    """Slots of each stage within what its workers were started with; None = they are left alone."""
    nodes: Mapping[Kind, Bounds] = field(default_factory=dict)
    engines: Mapping[str, Bounds] = field(default_factory=dict)
    """Of the engine jobs of each policy."""
    admit: float = PlacementPolicy.admit
    """Share of an LLM server's cache that new rollouts may fill; 0 = placements do not count tokens."""
    interval_s: float = 10.0
    dry_run: bool = False
    """Say what would be done, and do nothing."""


class Autoscaler:
    """Keeps the wait in each stage's queue under the goal's."""

    def __init__(
        self,
        client: redis.Redis,
        options: Options,
        app: Celery | None = None,
        pool: SlurmNodes | None = None,
        engines: SlurmEngines | None = None,
        *,
        owner: str,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """
        Args:
            app: Reaches the workers, for `options.live`.
            pool, engines: Where nodes and engines come from, for those of the options.
            owner: Name of this process among all that could scale.
            say: Gets each decision as a line.
        """
        self._redis, self._options = client, options
        self._observer = Observer(client)
        self._store = AutoscaleStore(client)
        self._app, self._pool, self._engines, self._say = app, pool, engines, say
        self._election = Election(client, keys.AUTOSCALE_LOCK, owner, options.interval_s)
        # The sum of what the workers may have is the upper bound, and it changes with them.
        bounds = Bounds(options.live.least, 1 << 30) if options.live else None
        self._followers = {stage: Follower(options.goal, bounds) for stage in STAGES} if bounds else {}
        self._policies = {kind: NodePolicy(options.goal, bounds) for kind, bounds in options.nodes.items()}
        self._engine_policies = {name: NodePolicy(options.goal, its) for name, its in options.engines.items()}
        self._ordered_at: dict[str, float] = {}
        self._held_back = False
        self._refused = 0
        self._resume_at = float("-inf")
        self._was_elected: bool | None = None

    def run(self, stopping: threading.Event, once: bool = False) -> None:
        """Go on until told to stop. Slurm being away is waited out, and so is Redis for a few rounds.

        Raises:
            redis.RedisError: Redis has been away for `PATIENCE_ROUNDS` rounds, or in the only one.
        """
        missed = 0
        try:
            while not stopping.is_set():
                try:
                    if self._options.dry_run or self._elected():
                        self.tick(time.monotonic())
                    missed = 0
                except (redis.RedisError, OperationalError) as error:
                    missed += 1
                    log.warning("Redis does not answer; nothing is scaled", error=str(error))
                    if once or missed >= PATIENCE_ROUNDS:
                        raise redis.ConnectionError(str(error)) from error
                if once:
                    return
                stopping.wait(self._options.interval_s)
        finally:
            if self._was_elected:
                with suppress(redis.RedisError):
                    self._election.resign()

    def _elected(self) -> bool:
        won = self._election.won()
        if won != self._was_elected:
            others = "another autoscaler acts; this one stands by"
            self._say("elected: this autoscaler acts" if won else others)
            self._was_elected = won
        return won

    def tick(self, now: float) -> None:
        """One round.

        Args:
            now: Monotonic seconds.

        Raises:
            redis.RedisError, OperationalError: Redis is away.
        """
        loads, workers = self._observer.look()
        llm = llm_load(self._redis)
        loads = hold_back(shift_blame(loads), llm.share)
        needs = {stage: need(load, self._options.goal) for stage, load in loads.items()}
        if (llm.share > 0) != self._held_back:
            self._held_back = llm.share > 0
            self._say(f"{llm.share:.0%} of RUN waits for room on LLM servers, no reason for nodes: {NAME}")
        nodes: dict[str, dict[str, Any]] = {}
        if now >= self._resume_at:
            nodes = self._scale(now, loads, needs, workers, llm)
        for stage, follower in self._followers.items():
            self._scale_slots(now, stage, follower, loads[stage], needs[stage], workers)
        if not self._options.dry_run:
            stages = {stage: asdict(load) | {"need": needs[stage]} for stage, load in loads.items()}
            self._store.put({"stages": stages, "nodes": nodes})

    def _scale_slots(
        self, now: float, stage: str, follower: Follower, load: Load, needed: int, workers: Workers
    ) -> None:
        own = [worker for worker in workers if stage in worker.stages]
        # A worker that serves several stages has its slots for whoever comes first.
        if not own or any(len(worker.stages) > 1 for worker in own):
            return
        assert self._options.live is not None
        have, limit = sum(worker.slots for worker in own), sum(worker.slots_limit for worker in own)
        target = follower.target(now, min(needed, self._options.live.most), have, load.busy)
        # Each worker keeps one: a stage without a slot would never be asked for anything.
        target = max(len(own), min(target, limit))
        if target == have:
            return
        self._say(f"{stage}: {have} → {target} slots of {limit}{_why(load)}")
        if self._app is not None and not self._options.dry_run:
            taken = apply_slots(self._app, target, own)
            changes = [taken[worker.name] - worker.slots for worker in own if worker.name in taken]
            self._store.count("slots_raised", sum(change for change in changes if change > 0))
            self._store.count("slots_lowered", -sum(change for change in changes if change < 0))

    def _scale(
        self, now: float, loads: Mapping[str, Load], needs: Mapping[str, int], workers: Workers, llm: LlmLoad
    ) -> dict[str, dict[str, Any]]:
        """Nodes and engines; what there is of each kind, and is to be."""
        seen: dict[str, dict[str, Any]] = {}
        wanted = chain(self._nodes_wanted(now, loads, needs, workers), self._engines_wanted(now, llm))
        try:
            for name, nodes, target, why, order in wanted:
                seen[name] = {"up": nodes.up, "coming": nodes.coming, "target": target}
                change = target - nodes.total
                settled = now >= self._ordered_at.get(name, float("-inf")) + SETTLE_S
                if change == 0 or (change > 0 and not settled):
                    continue
                self._say(f"{name}: {nodes.total} ({nodes.coming} coming) → {target}, {why}")
                if self._options.dry_run:
                    continue
                order()
                self._ordered_at[name] = now
                what = NAME if name.startswith(NAME) else "nodes"
                self._store.count(f"{what}_added" if change > 0 else f"{what}_drained", abs(change))
            self._refused = 0
        except SlurmError as error:
            pause = min(MOST_BACK_OFF_S, BACK_OFF_S * 2**self._refused)
            self._refused += 1
            self._resume_at = now + pause
            log.error("Slurm refuses; the next try comes later", error=str(error), pause_s=pause)
            if not self._options.dry_run:
                self._store.count("failures")
        return seen

    def _nodes_wanted(
        self, now: float, loads: Mapping[str, Load], needs: Mapping[str, int], workers: Workers
    ) -> Iterator[Wanted]:
        # Stages with nodes of their own are not a reason for more of the nodes that serve all.
        special = {stage for kind in self._policies if kind != STAGES for stage in kind}
        for kind, policy in self._policies.items():
            assert self._pool is not None
            nodes = self._pool.look(kind, workers)
            if kind == STAGES:
                asked = {stage: slots for stage, slots in needs.items() if stage not in special}
                busy = {stage: loads[stage].busy for stage in asked}
            else:
                (stage,) = kind
                others = max(0, loads[stage].slots - nodes.up * nodes.slots[stage])
                asked = {stage: max(0, needs[stage] - others)}
                busy = {stage: max(0, loads[stage].busy - others)}
            target, stage = policy.target(now, asked, busy, nodes)
            why = stage + _why(loads[stage]) if stage else "none"
            name = "nodes" if kind == STAGES else "+".join(kind)
            yield name, nodes, target, why, partial(self._pool.set, kind, target, workers)

    def _engines_wanted(self, now: float, llm: LlmLoad) -> Iterator[Wanted]:
        for name, policy in self._engine_policies.items():
            assert self._engines is not None
            state = self._engines.look(name, llm)
            target, why = state.nodes.total, ""
            if wanted := state.needed(name, llm, self._options.admit):
                needed, in_use, why = wanted
                target, _ = policy.target(now, {NAME: needed}, {NAME: in_use}, state.nodes)
            order = partial(self._engines.set, name, target, state.held)
            yield name_of(name), state.nodes, target, why, order


def _why(load: Load) -> str:
    return (
        f": {load.waiting} wait, the longest for {load.oldest_s:.0f} s, "
        f"{load.busy} of {load.slots} slots in use"
        + (f", {load.engines:.0%} would wait for {NAME}" if load.engines else "")
    )
