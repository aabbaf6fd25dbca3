"""Looks after the LLM backends: probes their health, reads their metrics, keeps the heap's counters true."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rollout.schema import Backend, Stage
from services.engines.stats import ProbeError, current_versions, probe
from services.state import keys
from workers.chores.base import Chore
from workers.services import WorkerServices

PROBE_TIMEOUT_S = 5.0
"""An engine that does not answer /health for so long serves nobody in time."""
FAILURES = 2
"""Probes in a row that must fail; a call that failed counts as one."""
LONGEST_PAUSE_S = 60.0
"""The longest pause between two probes of a backend that stays away."""
BREAK_AFTER = 8
"""Failed calls between two probes after which a backend is left alone, though /health answers."""
BREAK_S = 5.0
"""Least pause before such a backend is tried again."""
STEADY_S = 60.0
"""A backend that was good for so long starts again with short pauses."""
RECONCILE_EVERY_S = 30.0


@dataclass
class _Watch:
    """What the keeper remembers of a backend. Times are of the monotonic clock."""

    next_at: float = 0.0
    failures: int = 0
    """Bad probes in a row."""
    pauses: int = 0
    """How often the pause was doubled."""
    good_since: float | None = None


class Keeper(Chore):
    """The health of the fleet of backends; in every RUN worker, for those are the ones that reach them."""

    name = "keeper"
    stage = Stage.RUN
    interval_s = 0.5
    """How soon a suspicion is looked into."""
    lock = keys.KEEPER_LOCK

    def __init__(self, services: WorkerServices) -> None:
        super().__init__(services)
        self._backends = services.backends
        self._probe_s = services.settings.backend_probe_s
        self._watched: dict[str, _Watch] = {}
        self._reconciled = time.monotonic()
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="probe")

    def close(self) -> None:
        self._pool.shutdown()

    def tick(self) -> None:
        """Probe what is due, all at once."""
        suspects = self._backends.take_suspects()
        fleet = {backend.id: backend for backend in self._backends.list()}
        self._watched = {name: self._watched.get(name, _Watch()) for name in fleet}
        now = time.monotonic()
        due = [b for name, b in fleet.items() if name in suspects or now >= self._watched[name].next_at]
        for _ in self._pool.map(lambda b: self._look_at(b, suspects.get(b.id, 0)), due):
            pass
        if now - self._reconciled >= RECONCILE_EVERY_S:
            self._reconciled = now
            corrections = self._backends.reconcile()
            if corrections.reclaimed or corrections.restored or corrections.corrected:
                self.log.warning("counters of the backends corrected", **vars(corrections))

    def _look_at(self, backend: Backend, failed_calls: int) -> None:
        watch, bound = self._watched[backend.id], self.log.bind(backend=backend.id)
        away = not backend.reachable
        try:
            stats = probe(backend, PROBE_TIMEOUT_S)
            versions = current_versions(backend, PROBE_TIMEOUT_S)
        except ProbeError as error:
            watch.failures += 1
            watch.good_since = None
            if away or watch.failures + bool(failed_calls) >= FAILURES:
                if not away:
                    bound.warning("backend is away; its rollouts move", error=str(error))
                self._put_away(backend, watch, str(error))
            else:
                watch.next_at = time.monotonic() + min(1.0, self._probe_s)
            return
        self._backends.put_stats(backend.id, stats)
        watch.failures = 0
        now = time.monotonic()
        if failed_calls >= BREAK_AFTER and not away:
            bound.warning("backend is left alone: calls fail, though /health answers", failed=failed_calls)
            watch.good_since = None
            self._put_away(backend, watch, f"{failed_calls} calls failed, though /health answers", BREAK_S)
            return
        watch.next_at = now + self._probe_s
        if not backend.paused:
            # Before it is taken again: a restarted server must not get rollouts as what it was before.
            self._check_versions(backend, versions)
        if away:
            bound.info("backend is back")
            self._backends.recover(backend.id, by="health")
            watch.good_since = now
        elif watch.good_since is None:
            watch.good_since = now
        elif now - watch.good_since >= STEADY_S:
            watch.pauses = 0

    def _put_away(self, backend: Backend, watch: _Watch, error: str, least_s: float = 0.0) -> None:
        pause = max(least_s, min(self._probe_s * 2**watch.pauses, LONGEST_PAUSE_S))
        watch.pauses = min(watch.pauses + 1, 10)
        watch.next_at = time.monotonic() + pause
        self._backends.fail(backend.id, error, by="health")

    def _check_versions(self, backend: Backend, told: dict[str, str | None]) -> None:
        """A server that was started again has the weights it started with."""
        for policy in backend.served:
            known = backend.versions.get(policy)
            version = told.get(policy, known)
            if version != known:
                self.log.warning(
                    "backend has other weights", backend=backend.id, policy=policy, version=version
                )
                self._backends.set_version(backend.id, version, policy=policy)
            current = self._backends.wanted_version(policy)
            if current is not None and current != version:
                self._services.weights.catch_up(backend.of(policy))
