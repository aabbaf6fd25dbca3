"""Looks after rollouts that nobody looks after: lost messages, dead workers, passed deadlines."""

from __future__ import annotations

import time

from services.queues import Ref
from services.state import keys
from services.state.election import LOCK_S
from services.state.fleet import ALIVE_S
from services.state.results.store import ResultStore
from services.state.rollouts.store import Overdue
from services.version import STAMP
from workers.chores.base import Chore
from workers.chores.steadiness import Steadiness
from workers.services import WorkerServices

TRIM_EVERY_S = 600.0
LOOK_FOR_NODES_EVERY_S = 5.0
STEADY_GAP_S = 3 * LOOK_FOR_NODES_EVERY_S
"""The longest pause between two looks for lost nodes; after a longer one all nodes seem silent, and must be
given time to speak."""
AT_ONCE = 200
"""Rollouts that one script judges: Redis answers nobody else meanwhile."""


class Reaper(Chore):
    """Runs in every worker; the one that holds a Redis lock does the work."""

    name = "reaper"

    def __init__(self, services: WorkerServices) -> None:
        settings = services.settings
        self.interval_s = settings.reaper_interval_s
        super().__init__(services)
        self._store = services.store
        self._dispatcher = services.dispatcher
        self._results = ResultStore(services.redis, settings)
        # The elected reaper may be one of the dead whose leases run out: another must be there by then.
        self.election = self.elect(keys.REAPER_LOCK, min(LOCK_S, settings.lease_s / 2))
        self._trimmed = 0.0
        # By way of the module, whose clock tests move.
        self._steadiness = Steadiness(
            services.redis, settings.lease_s, self.interval_s, lambda: time.monotonic()
        )
        self._lost_after_s = max(2 * ALIVE_S, settings.lease_s)
        self._looked_for_nodes = float("-inf")
        self._steady_since = float("inf")
        """Since when every look for nodes came in time and Redis answered it."""
        self._jump_s = 0.0
        """Seconds by which Redis' clock has jumped, and nobody has dealt with it."""
        self._before = time.monotonic()
        self._moved_before = 0
        """Monotonic time, and what deadlines had been moved by, at the last look without a jump."""

    def look(self) -> None:
        """Deal with a jump of the clock: all do who see it, for the elected one may have died with it."""
        began = time.monotonic()
        # Before the look: a jump that is in it has been seen here as well.
        moved = self._store.moved()
        self._jump_s += self._steadiness.look()
        if self._jump_s:
            self.clock_jumped(self._jump_s, time.monotonic() - self._before, self._moved_before)
            moved = self._moved_before + int(self._jump_s * 1000)
        self._jump_s, self._before, self._moved_before = 0.0, began, moved

    def redis_was_away(self) -> None:
        """Note that nobody could speak or extend a lease."""
        self._looked_for_nodes = float("-inf")
        self._steadiness.disturbed()

    def clock_jumped(self, seconds: float, within_s: float, known_ms: int = 0) -> None:
        """Redis' clock did, no longer ago: everybody looks silent, and every deadline is another one."""
        self.log.warning("the clock of Redis jumped; deadlines are moved along", seconds=round(seconds, 1))
        self._looked_for_nodes = float("-inf")
        self._store.jumped(seconds, within_s, known_ms)

    def tick(self) -> None:
        """Deal with everything that is due now."""
        self._free_results()
        if self._steadiness.patient or not self._judge():
            return
        if time.monotonic() - self._looked_for_nodes > LOOK_FOR_NODES_EVERY_S:
            self._take_from_lost_nodes()
        if time.monotonic() - self._trimmed > TRIM_EVERY_S:
            self._trimmed = time.monotonic()
            self._store.trim()
        self._results.trim()

    def _judge(self) -> bool:
        """Deal with what is due; False: Redis' clock is not where it should be, and nothing was judged."""
        while True:
            items = self._store.overdue(AT_ONCE, self._steadiness.latest())
            if items is None:
                self._steadiness.disturbed()
                return False
            for item in items:
                self._deal_with(item)
            if len(items) < AT_ONCE:
                return True

    def _take_from_lost_nodes(self) -> None:
        """What waits for a node whose workers are all gone would wait until its deadline.

        Where this worker, or Redis, stood still, the others look gone too: nothing is taken until they have
        had the time to speak.
        """
        begun = time.monotonic()
        if begun - self._looked_for_nodes > STEADY_GAP_S:
            self._steady_since = begun
        nodes = self._services.fleet.lost_nodes(self._lost_after_s)
        self._looked_for_nodes = time.monotonic()
        if self._looked_for_nodes - begun > LOOK_FOR_NODES_EVERY_S:
            self._steady_since = self._looked_for_nodes
        if not nodes or self._looked_for_nodes - self._steady_since < self._lost_after_s:
            return
        for item in self._store.vacate(nodes, lost=True):
            bound = self.log.bind(rollout_id=item.rollout_id, attempt=item.attempt, node=item.node)
            if item.action == "ended":
                bound.warning("node lost: the rollout has no attempt left")
            else:
                bound.warning("node lost: rollout restarts from INIT")
                self._dispatcher.ring()

    def _free_results(self) -> None:
        dropped = self._results.sweep()
        for trajectory in dropped:
            if trajectory.reason == "size":
                self.log.warning(
                    "trajectory dropped: results are over ROLLOUT_RESULTS_MAX_BYTES",
                    rollout_id=trajectory.rollout_id,
                    bytes=trajectory.bytes,
                    acknowledged=trajectory.acknowledged,
                )
        if acked := [trajectory for trajectory in dropped if trajectory.reason == "acknowledged"]:
            size = sum(trajectory.bytes for trajectory in acked)
            self.log.info("acknowledged trajectories freed", count=len(acked), bytes=size)

    def _deal_with(self, item: Overdue) -> None:
        bound = self.log.bind(rollout_id=item.rollout_id, attempt=item.attempt)
        if item.action == "ended":
            bound.warning("ended by the reaper: deadline, cancel, attempts, or as a lost worker had decided")
            if item.node:
                self._dispatcher.clean_up(item.rollout_id, item.node, item.attempt)
            return
        if item.action == "resume":
            bound.warning("worker lost: another one goes on with the rollout", stage=item.stage)
        if item.action == "restart":
            bound.warning("worker lost: rollout restarts from INIT")
            if item.node:
                self._dispatcher.clean_up(item.rollout_id, item.node, item.attempt - 1)
        ref = Ref(id=item.rollout_id, attempt=item.attempt, node=item.node, stamp=STAMP)
        self._dispatcher.send(item.stage, ref)
