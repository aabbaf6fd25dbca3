"""Weight updates: carries out what `/v1/policies` asked for, one thread a backend.

Whatever happens to the worker, another one begins again with the backends that had not ended, and every step
may be repeated (`workers/exchange.py`); so no backend stays paused.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis
import structlog
from redis.exceptions import LockError
from redis.lock import Lock

from rollout.policy import BackendUpdate, BackendUpdateState, Policy, UpdateState
from rollout.schema import Backend
from services.engines.control import GIVE_UP_S, ControlError, control_of
from services.engines.labels import is_shared
from services.engines.stats import ProbeError, current_version
from services.state.backends.store import BackendStore
from services.state.policy.store import Current, LeaseLost, PolicyStore, Work, outcome, release
from workers.exchange import Exchange

log = structlog.get_logger("updates")

LEASE_S = 10.0
"""Another worker goes on with an update when its own was silent for so long."""
MAX_THREADS = 256
FIRST_RETRY_S, LAST_RETRY_S = 5.0, 120.0
"""Pauses after a backend did not catch up, doubling from the first to the last."""
LOCK_POLL_S = 0.05
"""A backend that another thread or worker has in hand is asked for so often. Rare: catch-up meets update."""
IN_HAND = "another policy's update had the backend in hand for too long; ask again"


class _Leases:
    """Keeps leases alive from one thread, a third of their length apart."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._held: dict[Lock, threading.Event] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def hold(self, lease: Lock) -> Iterator[threading.Event]:
        """Extend a lease meanwhile; the event is set when it turns out to be lost."""
        lost = threading.Event()
        with self._lock:
            self._held[lease] = lost
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="policy-leases", daemon=True)
                self._thread.start()
        try:
            yield lost
        finally:
            with self._lock:
                del self._held[lease]

    def _run(self) -> None:
        while True:
            time.sleep(self._lease_s / 3)
            with self._lock:
                held = list(self._held.items())
            for lease, lost in held:
                try:
                    lease.reacquire()
                except LockError:
                    lost.set()
                except redis.RedisError as error:
                    log.warning("a lease could not be extended", lease=lease.name, error=str(error))


class WeightUpdates:
    """Brings weights to backends: an update's to all that it names, the current ones to who came late."""

    def __init__(
        self, store: PolicyStore, backends: BackendStore, owner: str, *, lease_s: float = LEASE_S
    ) -> None:
        """
        Args:
            owner: Name of this worker in the lease of an update.
            lease_s: Seconds after which another worker goes on when this one falls silent.
        """
        self._store = store
        self._backends = backends
        self._owner = owner
        self._lease_s = lease_s
        self._leases = _Leases(lease_s)
        self._catching = threading.Lock()
        self._retries: dict[tuple[str, str], tuple[float, float]] = {}
        """Backend and policy that had to catch up → when it may be tried again, and the pause before that."""

    def claim(self) -> Work | None:
        """An update that nobody carries out; None: there is none."""
        return self._store.claim(self._owner, self._lease_s)

    def carry_out(self, work: Work) -> None:
        """Bring a claimed update to its end.

        Raises:
            LeaseLost: It is another worker's by now.
        """
        record = work.record
        request, update = record.request, record.update
        policy = update.policy
        bound = log.bind(update_id=update.id, policy=policy, version=update.version)
        pending = [name for name, progress in update.backends.items() if not progress.state.ended]
        again = update.started_at is not None
        bound.info("update begins", backends=pending, mode=update.mode, again=again)
        update.state = UpdateState.RUNNING
        update.started_at = update.started_at or time.time()
        writing = threading.Lock()
        if transfer := request.transfer:
            # It is told to the engines once, by this worker, and the record is written at every step.
            told = {"init_info": transfer.init_info and {}, "update_info": transfer.update_info and {}}
            record.request = request.model_copy(update={"transfer": transfer.model_copy(update=told)})
        rolling = 0 < request.concurrency < len(update.backends)

        with self._leases.hold(work.lease) as lost:
            self._store.save(work)
            if rolling:
                # One by one, old and new weights must both take rollouts, or half of the fleet would idle.
                self._backends.want_version(None, policy=policy)

            def report(name: str, progress: BackendUpdate) -> None:
                if lost.is_set():
                    raise LeaseLost(f"update {update.id}: the lease ran out, another worker goes on")
                with writing:
                    # A copy: its thread goes on writing while others are saved.
                    update.backends[name] = progress.model_copy(deep=True)
                    self._store.save(work)

            def bring(name: str) -> None:
                backend = self._serving(name, policy)
                if backend is None:
                    self._forgotten(record.targets.get(name), update.backends[name])
                    report(name, BackendUpdate(state=BackendUpdateState.SKIPPED))
                    return
                # What a worker that died has begun, nobody knows.
                fresh = update.backends[name].state is BackendUpdateState.WAITING and not (again and transfer)
                with self._alone(backend, request.timeout_s) as alone:
                    if not alone and is_shared(backend):
                        report(name, BackendUpdate(state=BackendUpdateState.FAILED, error=IN_HAND))
                        return
                    exchange = Exchange(self._backends, backend, request)
                    progress = exchange.run(lambda step: report(name, step), fresh=fresh)
                if progress.state is BackendUpdateState.RESUMED and not rolling:
                    # Not only at the end: new rollouts must not wait for the slowest backend.
                    self._backends.want_version(request.version, policy=policy)

            _each(bring, pending, min(request.concurrency or MAX_THREADS, MAX_THREADS))
            self._end(work)
        bound.info(
            "update ended",
            state=update.state.value,
            seconds=round(update.finished_at - update.started_at, 3),
            errors={name: progress.error for name, progress in update.backends.items() if progress.error},
        )

    def _end(self, work: Work) -> None:
        """What the ends of the backends mean for the fleet."""
        request, update = work.record.request, work.record.update
        name = update.policy
        update.state = outcome(update)
        update.finished_at = time.time()
        before = self._store.current(name)
        if update.state is UpdateState.FAILED:
            self._backends.want_version(before.policy.version if before else None, policy=name)
            self._store.finish(work, None)
            # Nobody serves. Those left without known weights get the ones that were current before.
            for backend_id in update.backends:
                backend = self._serving(backend_id, name)
                if backend is not None and backend.reachable and not backend.healthy:
                    self.catch_up(backend)
            return
        self._backends.want_version(request.version, policy=name)
        if request.only_connects and before and before.policy.version == request.version:
            self._store.finish(work, None)
            return
        policy = Policy(
            **update.model_dump(include={"version", "path", "verified"}),
            lora=update.lora,
            update_id=update.id,
            since=update.finished_at,
        )
        self._store.finish(work, Current(policy=policy, request=request))

    # -- one backend -------------------------------------------------------------------------

    def _serving(self, backend_id: str, policy: str) -> Backend | None:
        """A backend as it serves the policy; None: it is gone, or serves others by now."""
        backend = self._backends.get(backend_id)
        return backend.of(policy) if backend is not None and policy in backend.served else None

    def catch_up(self, backend: Backend) -> None:
        """Start to bring the current weights of its `policy` to a backend that was restarted or came late.

        Returns at once. Until it has arrived, the backend's version keeps new rollouts away. Nothing is
        started while that already happens, or soon after it has failed: it would freeze the backend's calls
        again and again.
        """
        with self._catching:
            earliest, pause = self._retries.get((backend.id, backend.policy), (0.0, 0.0))
            if time.monotonic() < earliest:
                return
            # Until the attempt has ended; its end sets the next one's time.
            self._retries[backend.id, backend.policy] = (float("inf"), pause)
        threading.Thread(target=self._catch_up, args=(backend,), name="catch-up", daemon=True).start()

    def _catch_up(self, backend: Backend) -> None:
        failed = True
        try:
            failed = self.bring_current(backend) is False
        except Exception:
            log.exception("catch-up broke off", backend=backend.id)
        with self._catching:
            pause = self._retries[backend.id, backend.policy][1]
            pause = min(max(2 * pause, FIRST_RETRY_S), LAST_RETRY_S) if failed else 0.0
            self._retries[backend.id, backend.policy] = (time.monotonic() + pause, pause)

    def bring_current(self, backend: Backend) -> bool | None:
        """Give a backend the current weights of its `policy`.

        Returns:
            True: it serves it now. False: a step failed; the backend's `error` says which. None: there was
            nothing to do or no way to do it: no policy was ever set, it has no path to load from, or an
            update or another worker has the backend in hand.
        """
        lock = self._store.lock(backend.id, self._lease_s)
        if not lock.acquire(blocking=False):
            return None
        try:
            # Asked only under the lock: an update that begins now waits for it, and has the last word.
            policy = backend.policy
            current = None if self._store.under_way(policy) else self._store.current(policy)
            if current is None or current.request.path is None:
                return None
            progress = BackendUpdate()
            with self._leases.hold(lock):
                # Whoever noted its version may have asked before the last update ended.
                if not self._serves(backend, current.policy.version):
                    exchange = Exchange(self._backends, backend, current.request)
                    progress = exchange.run(lambda _: None)
        finally:
            release(lock)
        log.info(
            "backend caught up" if progress.error is None else "backend did not catch up",
            backend=backend.id,
            policy=policy,
            version=current.policy.version,
            update_id=current.policy.update_id,
            error=progress.error,
        )
        return progress.error is None

    def _serves(self, backend: Backend, version: str) -> bool:
        """Whether the engine itself says that it has these weights, and nothing speaks against it."""
        known = self._serving(backend.id, backend.policy)
        if known is None or not known.healthy or known.paused:
            return False
        try:
            if current_version(backend) != version:
                return False
        except ProbeError:
            return False
        self._backends.set_version(backend.id, version, policy=backend.policy)
        return True

    @contextmanager
    def _alone(self, backend: Backend, patience_s: float) -> Iterator[bool]:
        """Have a backend to oneself, if that comes in time; a dead worker's lock runs out with its lease."""
        lock = self._store.lock(backend.id, self._lease_s)
        if not lock.acquire(blocking_timeout=patience_s + self._lease_s, sleep=LOCK_POLL_S):
            log.warning("backend is locked", backend=backend.id)
            yield False
            return
        try:
            with self._leases.hold(lock):
                yield True
        finally:
            release(lock)

    def _forgotten(self, known: Backend | None, progress: BackendUpdate) -> None:
        """A backend that was removed while a worker that died had it paused must not stay so."""
        if known is None or progress.state is BackendUpdateState.WAITING:
            return
        try:
            control_of(known, GIVE_UP_S).resume()
        except ControlError as error:
            log.warning("removed backend may be paused", backend=known.id, error=str(error))


def _each(function: Callable[[str], None], names: list[str], threads: int) -> None:
    """Call `function` with each name, in so many threads at most. The first error stops the rest.

    The threads do not outlive the process, as those of an executor do: a worker that is told to stop would
    wait for calls of another one, and the update is safe without it.
    """
    todo, errors, taking = deque(names), [], threading.Lock()

    def work() -> None:
        while not errors:
            with taking:
                if not todo:
                    return
                name = todo.popleft()
            try:
                function(name)
            except Exception as error:
                errors.append(error)

    started = [threading.Thread(target=work, name="update", daemon=True) for _ in names[:threads]]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
