"""Whether this worker takes rollouts into INIT now.

Not while its node is short of disk or memory, and not while INIT is far enough ahead of RUN.

Closed, the worker stops consuming the queue `init`, so that messages stay for nodes with room and no slot is
blocked. What was on its way meanwhile is put back by `workers/task.py`.
"""

from __future__ import annotations

import math
import threading
import time

from rollout.schema import Stage
from sandbox.room import DISK, MEMORY, Floors, free_disk, free_memory, shortages
from services.queues import INIT
from services.state.fleet import ANNOUNCE_EVERY_S, NodeAdmission
from workers.chores.base import Chore
from workers.services import WorkerServices

LOOK_WHEN_CLOSED_S = 0.25
"""RUN lives on what is ready meanwhile."""
SLOTS_EVERY_S = 2.0
LEAST_AHEAD = 64
"""The least of a bound that follows RUN's slots: INIT must not stand still where RUN has no worker yet."""
RECOVERED = 1.25
"""Times the floor that must be free before a stopped node goes on."""
REFILL = 0.75
"""Share of the bound at which INIT goes on: not for every single rollout that RUN takes."""


class Admission(Chore):
    """The admission of one worker that serves INIT."""

    name = "admission"
    stage = Stage.INIT
    interval_s = 1.0
    """While open: how soon a shortage is noticed. Bounds are kept by the claim itself."""
    first_s = 0.0

    def __init__(self, services: WorkerServices) -> None:
        super().__init__(services)
        self._app = services.app
        self._fleet = services.fleet
        self._settings = settings = services.settings
        self._scratch = services.host.state
        """Where the node's sandboxes write."""
        self.floors = Floors(settings.node_min_free_disk_mb, settings.node_min_free_memory_mb)
        """What must be left of the node."""
        self._looked = threading.Condition()
        self._looks = 0
        self._slots = (0, 0)
        self._slots_at = self._told_at = self._announced_at = float("-inf")
        self._announced: NodeAdmission | None = None
        self.stopped: dict[str, str] = {}
        """`disk` or `memory` → a sentence; empty while there is room."""
        self.full = False
        """Whether INIT is far enough ahead of RUN."""

    @property
    def is_open(self) -> bool:
        return not (self.stopped or self.full)

    def bounds(self) -> tuple[int, int]:
        """Most rollouts ahead of RUN on this node, and most ready ones without a sandbox anywhere."""
        if self._settings.ready_ahead:
            return self._settings.ready_ahead, self._settings.ready_ahead
        here, everywhere = self._slots
        return max(LEAST_AHEAD, here), max(LEAST_AHEAD, everywhere)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until a look from now on finds room; False: none did in time."""
        with self._looked:
            seen = self._looks
            return self._looked.wait_for(lambda: self._looks > seen and self.is_open, timeout_s)

    def tick(self) -> float:
        """Measure, decide, tell Celery and the service."""
        self._stop(shortages(self._scratch, self.floors, RECOVERED if self.stopped else 1.0))
        now = time.monotonic()
        if now - self._slots_at > SLOTS_EVERY_S:
            self._slots, self._slots_at = self._fleet.run_slots(self._settings.node), now
        counts, bounds = self._services.store.ahead(self._settings.node), self.bounds()
        share = REFILL if self.full else 1.0
        pairs = zip(counts, bounds, strict=True)
        self._fill(any(count >= math.ceil(most * share) for count, most in pairs))
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
        self._consume(self.is_open)
        room = free_disk(self._scratch), free_memory()
        self._announce(NodeAdmission(dict(self.stopped), self.full, counts[0], bounds[0], *room))
        return self.interval_s if self.is_open else LOOK_WHEN_CLOSED_S

    def _stop(self, shortage: dict[str, str]) -> None:
        for reason in (DISK, MEMORY):
            if reason in shortage and reason not in self.stopped:
                self.log.warning("INIT STOPS ON THIS NODE: " + shortage[reason], reason=reason)
            elif reason in self.stopped and reason not in shortage:
                self.log.info("INIT goes on: the node has room again", reason=reason)
        self.stopped = shortage

    def _fill(self, full: bool) -> None:
        if full != self.full:
            text = "INIT waits: it is far enough ahead of RUN" if full else "INIT goes on: RUN took rollouts"
            self.log.info(text, most_on_node=self.bounds()[0], most_without_sandbox=self.bounds()[1])
        self.full = full

    def _consume(self, open_now: bool) -> None:
        now = time.monotonic()
        if (
            open_now == (INIT in self._app.amqp.queues.consume_from)
            or now - self._told_at < LOOK_WHEN_CLOSED_S
        ):
            return
        # By a message to itself: only the worker's own loop may touch its consumers.
        tell = self._app.control.add_consumer if open_now else self._app.control.cancel_consumer
        tell(INIT, destination=[self._services.name])
        self._told_at = now

    def _announce(self, state: NodeAdmission) -> None:
        now = time.monotonic()
        before = self._announced
        changed = before is None or (state.stopped.keys(), state.full) != (before.stopped.keys(), before.full)
        if changed or now - self._announced_at > ANNOUNCE_EVERY_S:
            self._fleet.put_admission(self._settings.node, state)
            self._announced, self._announced_at = state, now
