"""Looks after rollouts that nobody looks after: lost messages, dead workers, passed deadlines."""

from __future__ import annotations

import threading
import time

import redis
import structlog

from services.dispatch import Dispatcher
from services.queues import Ref
from services.settings import Settings
from services.state import keys
from services.state.rollouts import Overdue, RolloutStore

log = structlog.get_logger("reaper")

LOCK_S = 10.0
"""Another worker takes over when the elected one was silent for so long."""
TRIM_EVERY_S = 600.0

_EXTEND = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end"


class Reaper:
    """Runs in every worker; the one that holds a Redis lock does the work."""

    def __init__(
        self,
        client: redis.Redis,
        store: RolloutStore,
        dispatcher: Dispatcher,
        settings: Settings,
        owner: str,
    ) -> None:
        self._redis = client
        self._store = store
        self._dispatcher = dispatcher
        self._interval = settings.reaper_interval_s
        self._owner = owner
        self._extend = client.register_script(_EXTEND)
        self._trimmed = 0.0

    def run(self, stopping: threading.Event) -> None:
        """Tick until the worker stops. Redis being away is waited out."""
        while not stopping.wait(self._interval):
            try:
                if self._elected():
                    self.tick()
            except redis.RedisError as error:
                log.warning("reaper could not reach Redis", error=str(error))
            except Exception:
                # Whatever one tick met must not end the watch over all the others.
                log.exception("reaper tick failed")

    def _elected(self) -> bool:
        millis = int(max(LOCK_S, 3 * self._interval) * 1000)
        if self._redis.set(keys.REAPER_LOCK, self._owner, nx=True, px=millis):
            log.debug("elected", owner=self._owner)
            return True
        return bool(self._extend(keys=[keys.REAPER_LOCK], args=[self._owner, millis]))

    def tick(self) -> None:
        """Deal with everything that is due now."""
        for item in self._store.overdue():
            self._deal_with(item)
        if time.monotonic() - self._trimmed > TRIM_EVERY_S:
            self._trimmed = time.monotonic()
            self._store.trim()

    def _deal_with(self, item: Overdue) -> None:
        bound = log.bind(rollout_id=item.rollout_id, attempt=item.attempt)
        if item.action == "ended":
            bound.warning("ended by the reaper: deadline, cancel or attempts")
            if item.node:
                self._dispatcher.clean_up(item.rollout_id, item.node, item.attempt)
            return
        if item.action == "restart":
            bound.warning("worker lost: rollout restarts from INIT")
            if item.node:
                self._dispatcher.clean_up(item.rollout_id, item.node, item.attempt - 1)
        node = item.node if item.stage != "init" else None
        self._dispatcher.send(item.stage, [Ref(id=item.rollout_id, attempt=item.attempt, node=node)])
