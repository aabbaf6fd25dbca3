"""The autoscaler's round: look, decide, act; by whichever of several holds a lock in Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import redis
import structlog
from kombu.exceptions import OperationalError

from services.autoscale.actuators import Kind, LiveSlots, NodePool
from services.autoscale.observe import Observer
from services.autoscale.policy import STAGES, Bounds, Follower, Goal, Load, NodePolicy, need, shift_blame
from services.launch import SlurmError
from services.state import keys
from services.state.autoscale import AutoscaleStore
from services.state.election import Election
from services.state.fleet import Worker

log = structlog.get_logger("autoscale")

SETTLE_S = 30.0
"""After an order of nodes, before the next one: what was submitted may not be listed yet."""
BACK_OFF_S, MOST_BACK_OFF_S = 30.0, 600.0
"""After Slurm refused something: first pause, doubled each time up to the longest."""
PATIENCE_ROUNDS = 6
Say = Callable[[str], None]


@dataclass
class Options:
    """What may be changed, and how far."""

    goal: Goal = field(default_factory=Goal)
    live: Bounds | None = None
    """Slots of each stage within what its workers were started with; None = they are left alone."""
    nodes: Mapping[Kind, Bounds] = field(default_factory=dict)
    interval_s: float = 10.0
    dry_run: bool = False
    """Say what would be done, and do nothing."""


class Autoscaler:
    """Keeps the wait in each stage's queue under the goal's."""

    def __init__(
        self,
        client: redis.Redis,
        options: Options,
        live: LiveSlots | None = None,
        pool: NodePool | None = None,
        *,
        owner: str,
        say: Say = lambda text: None,
    ) -> None:
        """
        Args:
            live: For `options.live`.
            pool: For `options.nodes`.
            owner: Name of this process among all that could scale.
            say: Gets each decision as a line.
        """
        self._options = options
        self._observer = Observer(client)
        self._store = AutoscaleStore(client)
        self._live, self._pool, self._say = live, pool, say
        self._election = Election(client, keys.AUTOSCALE_LOCK, owner, options.interval_s)
        # The sum of what the workers may have is the upper bound, and it changes with them.
        bounds = Bounds(options.live.least, 1 << 30) if options.live else None
        self._followers = {stage: Follower(options.goal, bounds) for stage in STAGES} if bounds else {}
        self._policies = {kind: NodePolicy(options.goal, bounds) for kind, bounds in options.nodes.items()}
        self._ordered_at: dict[Kind, float] = {}
        self._refused = 0
        self._resume_at = float("-inf")
        self._was_elected: bool | None = None

    def run(self, stopping: threading.Event, once: bool = False) -> None:
        """Go on until told to stop. Slurm being away is waited out, and so is Redis for a few rounds.

        Raises:
            redis.RedisError: Redis has been away for `PATIENCE_ROUNDS` rounds, or in the only one.
        """
        try:
            self._run(stopping, once)
        finally:
            if self._was_elected:
                with suppress(redis.RedisError):
                    self._election.resign()

    def _run(self, stopping: threading.Event, once: bool) -> None:
        missed = 0
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

    def _elected(self) -> bool:
        won = self._election.won()
        if won != self._was_elected:
            self._tell(
                "elected: this autoscaler acts" if won else "another autoscaler acts; this one stands by"
            )
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
        loads = shift_blame(loads)
        needs = {stage: need(load, self._options.goal) for stage, load in loads.items()}
        seen: dict[str, Any] = {
            "stages": {stage: asdict(load) | {"need": needs[stage]} for stage, load in loads.items()},
            "nodes": {},
        }
        if self._policies and now >= self._resume_at:
            seen["nodes"] = self._scale_nodes(now, loads, needs, workers)
        if self._followers:
            self._scale_slots(now, loads, needs, workers)
        if not self._options.dry_run:
            self._store.put(seen)

    # -- slots -------------------------------------------------------------------------------

    def _scale_slots(
        self, now: float, loads: Mapping[str, Load], needs: Mapping[str, int], workers: Sequence[Worker]
    ) -> None:
        bounds = self._options.live
        assert bounds is not None
        for stage, follower in self._followers.items():
            own = [one for one in workers if stage in one.stages]
            # A worker that serves several stages has its slots for whoever comes first.
            if not own or any(len(one.stages) > 1 for one in own):
                continue
            have, limit = sum(one.slots for one in own), sum(one.most_slots for one in own)
            wanted = follower.target(now, min(needs[stage], bounds.most), have, loads[stage].busy)
            # Each worker keeps one: a stage without a slot would never be asked for anything.
            wanted = max(len(own), min(wanted, limit))
            if wanted == have:
                continue
            self._tell(f"{stage}: {have} → {wanted} slots of {limit}{_why(loads[stage])}")
            if self._live is not None and not self._options.dry_run:
                taken = self._live.apply(stage, wanted, own)
                before = {one.name: one.slots for one in own}
                changes = [slots - before[name] for name, slots in taken.items()]
                self._store.count("slots_raised", sum(one for one in changes if one > 0))
                self._store.count("slots_lowered", -sum(one for one in changes if one < 0))

    # -- nodes -------------------------------------------------------------------------------

    def _scale_nodes(
        self, now: float, loads: Mapping[str, Load], needs: Mapping[str, int], workers: Sequence[Worker]
    ) -> dict[str, dict[str, Any]]:
        assert self._pool is not None
        seen = {}
        # Stages with nodes of their own are not a reason for more of the nodes that serve all.
        special = {stage for kind in self._policies if kind.stages != STAGES for stage in kind.stages}
        try:
            for kind, policy in self._policies.items():
                nodes = self._pool.look(kind, workers)
                if kind.stages == STAGES:
                    asked = {stage: slots for stage, slots in needs.items() if stage not in special}
                    busy = {stage: loads[stage].busy for stage in asked}
                else:
                    (stage,) = kind.stages
                    others = loads[stage].slots - nodes.up * nodes.slots[stage]
                    asked = {stage: max(0, needs[stage] - max(0, others))}
                    busy = {stage: max(0, loads[stage].busy - max(0, others))}
                target, stage = policy.target(now, asked, busy, nodes)
                seen[kind.name] = {"up": nodes.up, "coming": nodes.coming, "target": target}
                change = target - nodes.total
                settled = now >= self._ordered_at.get(kind, float("-inf")) + SETTLE_S
                if change == 0 or (change > 0 and not settled):
                    continue
                why = _why(loads[stage]) if stage else ""
                self._tell(
                    f"{kind.name}: {nodes.total} ({nodes.coming} coming) → {target}, {stage or 'none'}{why}"
                )
                if self._options.dry_run:
                    continue
                self._tell(self._pool.set(kind, target, workers))
                self._ordered_at[kind] = now
                self._store.count("nodes_added" if change > 0 else "nodes_drained", abs(change))
        except SlurmError as error:
            pause = min(MOST_BACK_OFF_S, BACK_OFF_S * 2**self._refused)
            self._refused += 1
            self._resume_at = now + pause
            log.error("Slurm refuses; the next try comes later", error=str(error), pause_s=pause)
            if not self._options.dry_run:
                self._store.count("failures")
        else:
            self._refused = 0
        return seen

    def _tell(self, text: str) -> None:
        log.info(text)
        self._say(text)


def _why(load: Load) -> str:
    return (
        f": {load.waiting} wait, the longest for {load.oldest_s:.0f} s, "
        f"{load.busy} of {load.slots} slots in use"
    )
