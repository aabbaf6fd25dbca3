"""The exchange of one backend's weights, step by step.

No new rollouts → pause → load → label → resume → canary → new rollouts again. An engine that is paused queues
every request, the canary too, so it runs a moment before it is checked; what it samples in that moment counts
only if the check passes (`BackendStore.fail` takes its calls away, `give_up` ends them).

An engine that serves several policies is paused for all of them. What fails takes one of them away, and the
others go on: the engine's label says that nothing of that one counts (`services/engines/labels.py`).

Every step may be repeated: a worker may have been killed at any of them. Weights that the trainer sends come
once, so what a dead worker has begun with them fails instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis
import structlog

from rollout.policy import BackendUpdate, BackendUpdateState, Canary, PolicyRequest
from rollout.schema import Backend
from services.engines.control import GIVE_UP_S, Control, ControlError, control_of
from services.engines.labels import is_shared, joined, misfit, split
from services.engines.stats import ProbeError, current_label
from services.state.backends.store import BackendStore
from services.state.policy.store import LeaseLost

log = structlog.get_logger("updates")

BROKEN_OFF = "begun by a worker that is gone, and nobody knows how much has come; send it as a new update"
Report = Callable[[BackendUpdate], None]
"""Told of each step. It raises `LeaseLost` when the work is another worker's by now."""


class Exchange:
    """Brings what a request asks for to one backend, whose lock is held."""

    def __init__(self, backends: BackendStore, backend: Backend, request: PolicyRequest) -> None:
        """
        Args:
            backend: As it serves the policy (`Backend.of`).
        """
        self._backends = backends
        self._backend = backend
        self._request = request
        self._engine = control_of(backend, request.timeout_s)
        self.progress = BackendUpdate()

    def run(self, report: Report, *, fresh: bool = True) -> BackendUpdate:
        """All steps. The end, good or bad, is in the answer; only Redis and `report` raise.

        Args:
            fresh: Nobody has begun with this backend before.
        """
        backend, request, engine, progress = self._backend, self._request, self._engine, self.progress
        # The current weights may be of another kind than those that this backend can take for the policy.
        if wrong := misfit(backend, request):
            progress.error = wrong[1]
            self._enter(BackendUpdateState.FAILED, report)
            return progress
        transfer = request.transfer
        # Without a path the trainer has put new weights there itself, unless it sends them only now.
        trusted = fresh and backend.healthy and (request.path is not None or transfer is not None)
        loading = False
        self._backends.pause(backend.id)
        try:
            with self._timed("total"):
                if transfer is not None and not fresh:
                    raise ControlError(f"backend {backend.id}: {BROKEN_OFF}")
                self._enter(BackendUpdateState.PAUSING, report)
                with self._timed("pause"):
                    engine.pause(request.mode, reset=request.reset_prefix_cache)
                if transfer is not None and transfer.init_info is not None:
                    with self._timed("connect"):
                        engine.connect(transfer)
                    if request.only_connects and not self._has_that_version():
                        return self._leave_connected(report)
                self._enter(BackendUpdateState.LOADING, report)
                loading = True
                with self._timed("reload"):
                    self._load(report)
                if request.canary is not None:
                    self._enter(BackendUpdateState.CHECKING, report)
                engine.resume()
                if request.canary is not None:
                    with self._timed("canary"):
                        progress.canary_max_error = check(engine, request.canary)
        except (LeaseLost, redis.RedisError):
            raise
        except Exception as error:
            if not isinstance(error, ControlError):
                log.exception("exchange broke off", backend=backend.id)
            self._give_up(error, intact=trusted and (not loading or getattr(error, "harmless", False)))
            progress.canary_max_error = getattr(error, "max_error", None)
            progress.error = str(error) or type(error).__name__
            self._enter(BackendUpdateState.FAILED, report)
            return progress
        self._backends.set_version(backend.id, request.version, policy=backend.policy)
        self._backends.recover(backend.id, policy=backend.policy)
        self._backends.resume(backend.id)
        self._enter(BackendUpdateState.RESUMED, report)
        return progress

    def _enter(self, state: BackendUpdateState, report: Report) -> None:
        self.progress.state = state
        report(self.progress)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.progress.seconds[step] = round(time.monotonic() - began, 4)

    def _load(self, report: Report) -> None:
        """New weights and their label, before anything is sampled from them."""
        request, engine = self._request, self._engine
        # Asked before anything changes: an engine that was started anew has lost what others brought to it.
        label = self._label(request.version)
        if request.lora is not None:
            engine.load_adapter(request.lora.name or self._backend.model, request.path)
        elif request.path is not None:
            engine.load(request.path, request.version)
        elif request.transfer and not request.only_connects:
            engine.receive(request.transfer)
        # Another worker may have it in hand by now; then it is neither labelled nor resumed.
        self._enter(BackendUpdateState.LOADING, report)
        engine.label(label)
        if request.reset_prefix_cache:
            engine.reset_cache()

    def _label(self, version: str) -> str:
        """What the engine is to call its weights once the policy has this version; empty = none that counts.

        Raises:
            ControlError: It does not say what the other policies that it serves have.
        """
        if not is_shared(self._backend):
            return version
        try:
            told = split(current_label(self._backend) or "")
        except ProbeError as error:
            raise ControlError(str(error), harmless=True) from error
        known = {policy: label for policy, label in told.items() if policy in self._backend.served}
        return joined(known | {self._backend.policy: version})

    def _has_that_version(self) -> bool:
        """Whether it may be labelled: it is so already, or this is the first label of the fleet."""
        named, policy = self._backend.policy_version == self._request.version, self._backend.policy
        return self._backend.healthy and (named or self._backends.wanted_version(policy=policy) is None)

    def _leave_connected(self, report: Report) -> BackendUpdate:
        """Its weights are others, or half of some: they get no label, and it waits for those to come."""
        if self._backend.healthy:
            self._engine.resume()
        self._backends.resume(self._backend.id)
        self._enter(BackendUpdateState.SKIPPED, report)
        return self.progress

    def _give_up(self, error: Exception, *, intact: bool) -> None:
        """Leave a backend safe after a failed step.

        With its old weights intact it goes on serving them, to the rollouts it has. Else nothing may be
        sampled from it: its rollouts move away, its calls end, and it stays paused until an update succeeds
        or the server is restarted. One that serves other policies, too, goes on with those.
        """
        backend_id, engine = self._backend.id, self._engine
        log.warning("backend not updated", backend=backend_id, error=str(error), old_weights_intact=intact)
        if intact:
            try:
                engine.resume()
                self._backends.resume(backend_id)
                return
            except ControlError as second:
                log.warning("backend cannot be resumed", backend=backend_id, error=str(second))
        self._backends.fail(backend_id, str(error), policy=self._backend.policy)
        try:
            if is_shared(self._backend):
                # The update's own time may be over.
                engine = control_of(self._backend, GIVE_UP_S)
                engine.label(self._label(""))
                engine.resume()
            else:
                engine.give_up()
        except ControlError as second:
            log.warning("backend does not answer", backend=backend_id, error=str(second))
            if is_shared(self._backend):
                self._backends.fail(backend_id, str(second), by="health")
        self._backends.resume(backend_id)


def check(engine: Control, canary: Canary) -> float:
    """Largest difference between the backend's log-probs of the canary and the trainer's, in nats.

    Raises:
        ControlError: It is larger than the tolerance, or the backend did not answer.
    """
    logprobs = engine.score(canary.token_ids)
    errors = [abs(logprob - truth) for logprob, truth in zip(logprobs, canary.logprobs, strict=True)]
    worst = max(range(len(errors)), key=errors.__getitem__)
    if errors[worst] > canary.tolerance:
        raise CanaryFailed(
            errors[worst],
            f"canary failed: id {canary.token_ids[worst + 1]} at position {worst + 1} has log-prob "
            f"{logprobs[worst]:.4f}, the trainer says {canary.logprobs[worst]:.4f}; the tolerance is "
            f"{canary.tolerance:g}. The server does not sample from the trainer's weights",
        )
    return errors[worst]


class CanaryFailed(ControlError):
    """The weights that a backend serves are not the trainer's."""

    def __init__(self, max_error: float, message: str) -> None:
        super().__init__(message)
        self.max_error = max_error
