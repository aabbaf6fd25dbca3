"""Policies in Redis: which weights are current, and the one update of each that may be under way.

The gateway writes an update and rings; a worker claims it under a lease and writes how far it has come. Every
write of the worker is refused once the lease is not its own any more.
"""

from __future__ import annotations

import json
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import redis
from pydantic import BaseModel
from pydantic_core import from_json
from redis.exceptions import LockError
from redis.lock import Lock

from rollout.policy import BackendUpdate, Policy, PolicyRequest, PolicyStatus, PolicyUpdate, UpdateState
from rollout.schema import DEFAULT_POLICY, Backend, new_id
from services.state import keys
from services.state.scripts import Operations

HISTORY = 20
"""Updates that are remembered."""
NOT_VERIFIED = (
    "not verified: without a canary nothing checks that the backends sample from the trainer's weights"
)
_BLOCK_MS = 5000
"""Longest single wait for Redis; well below the socket's time limit."""


def path_of(policy: str) -> str:
    """Where the API has a policy."""
    return "/v1/policy" if policy == DEFAULT_POLICY else f"/v1/policies/{policy}"


class UpdateConflict(Exception):
    """Another update of the policy is under way; it is named by `update`."""

    def __init__(self, update: PolicyUpdate) -> None:
        super().__init__(
            f"update {update.id} to version {update.version!r} is {update.state.value}; wait for its end at "
            f"GET {path_of(update.policy)}/updates/{update.id}?wait=60"
        )
        self.update = update


class LeaseLost(Exception):
    """The lease ran out and the work may be another worker's by now."""


class Record(BaseModel):
    """What Redis keeps of an update: what was asked for, and what became of it."""

    identity: str
    """Two requests with the same one ask for the same thing."""
    request: PolicyRequest
    targets: dict[str, Backend]
    """The backends as they were when the update was asked for."""
    update: PolicyUpdate


class Current(BaseModel):
    """The weights that new rollouts run on, and how a backend that comes later gets them."""

    policy: Policy
    request: PolicyRequest


@dataclass(frozen=True)
class Work:
    """A claimed update."""

    lease: Lock
    token: str
    """Of the lease: whoever writes shows it."""
    record: Record


def identity_of(request: PolicyRequest) -> str:
    """What makes two requests the same: weights, adapter and backends, not how they are exchanged."""
    lora = request.lora.name if request.lora else None
    backends = sorted(set(request.backends)) if request.backends else None
    sending = [request.transfer.id] if request.transfer else []
    return json.dumps([request.version, request.path, lora, backends, *sending])


class PolicyStore:
    """Updates, the current policy, and the locks under which backends are worked on."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._do = Operations(client, "policy/policy")

    # -- the gateway's side ------------------------------------------------------------------

    def create(
        self, request: PolicyRequest, targets: list[Backend], policy: str = DEFAULT_POLICY
    ) -> tuple[PolicyUpdate, bool]:
        """Write an update and ring for a worker.

        Returns:
            The update, and whether it is new: the same request again, while the first is under way or when it
            was the latest and is done, gives the first one's.

        Raises:
            UpdateConflict: Another one is under way.
        """
        update = PolicyUpdate(
            id=new_id(),
            policy=policy,
            **request.model_dump(include={"version", "path", "mode", "lora"}),
            transfer=request.transfer.backend if request.transfer else None,
            verified=request.canary is not None,
            warnings=[] if request.canary else [NOT_VERIFIED],
            backends={backend.id: BackendUpdate() for backend in targets},
            created_at=time.time(),
        )
        record = Record(
            identity=identity_of(request),
            request=request,
            targets={backend.id: backend for backend in targets},
            update=update,
        )
        answer = self._do(
            "create",
            policy=policy,
            of=keys.of(policy),
            id=update.id,
            identity=record.identity,
            record=record.model_dump_json(),
            kept=HISTORY,
        )
        known = Record.model_validate_json(answer["record"]).update
        if answer["word"] == "busy":
            raise UpdateConflict(known)
        return known, answer["word"] == "created"

    def get(self, update_id: str, policy: str = DEFAULT_POLICY) -> PolicyUpdate | None:
        """One update; None when there is none, or it is older than the last `HISTORY` ones."""
        raw = self._redis.hget(keys.policy_updates(keys.of(policy)), update_id)
        return Record.model_validate_json(raw).update if raw else None

    def wait(self, update_id: str, timeout_s: float, policy: str = DEFAULT_POLICY) -> PolicyUpdate | None:
        """`get`, once it has ended or after so many seconds."""
        deadline = time.monotonic() + timeout_s
        last = self._redis.xrevrange(keys.POLICY_ENDED, count=1)
        cursor = last[0][0] if last else "0"
        while True:
            update = self.get(update_id, policy)
            left_ms = int((deadline - time.monotonic()) * 1000)
            if update is None or update.state.ended or left_ms <= 0:
                return update
            news = self._redis.xread({keys.POLICY_ENDED: cursor}, block=min(left_ms, _BLOCK_MS))
            if news:
                cursor = news[0][1][-1][0]

    def names(self) -> set[str]:
        """All policies: `default`, those that a backend serves, and those that weights were brought to."""
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.smembers(keys.POLICIES)
            pipe.hvals(keys.BACKENDS)
            updated, backends = pipe.execute()
        served = (from_json(described).get("policies") or () for described in backends)
        return {DEFAULT_POLICY, *updated, *chain.from_iterable(served)}

    def status(self, policy: str = DEFAULT_POLICY) -> PolicyStatus:
        """Current weights, update under way, history."""
        of = keys.of(policy)
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.get(keys.policy_current(of))
            pipe.get(keys.policy_active(of))
            pipe.lrange(keys.policy_order(of), 0, -1)
            pipe.hgetall(keys.policy_updates(of))
            current, active, order, records = pipe.execute()
        updates = [Record.model_validate_json(records[name]).update for name in order if name in records]
        return PolicyStatus(
            name=policy,
            current=Current.model_validate_json(current).policy if current else None,
            update=next((update for update in updates if update.id == active), None),
            history=updates,
        )

    def current(self, policy: str = DEFAULT_POLICY) -> Current | None:
        """The current weights; None until an update has succeeded."""
        raw = self._redis.get(keys.policy_current(keys.of(policy)))
        return Current.model_validate_json(raw) if raw else None

    def forget(self, policy: str = DEFAULT_POLICY, *, gone: bool = False) -> list[str]:
        """Have backends of any weights take rollouts, because nobody can bring the current ones any more.

        Args:
            gone: No backend serves the policy: its name and history go, too.

        Returns:
            The backends that have those; if there are any, nothing was forgotten.

        Raises:
            UpdateConflict: An update is under way.
        """
        answer = self._do("forget", policy=policy, of=keys.of(policy), gone=gone)
        if "record" in answer:
            raise UpdateConflict(Record.model_validate_json(answer["record"]).update)
        return sorted(answer["backends"])

    def age(self, version: str, policy: str = DEFAULT_POLICY) -> int:
        """How many times the weights changed after that version came; one never seen is older than all."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(keys.policy_totals(keys.of(policy)), "changes")
            pipe.zscore(keys.policy_sequence(keys.of(policy)), version)
            changes, came = pipe.execute()
        return int(changes or 0) - int(came or 0)

    def under_way(self, policy: str = DEFAULT_POLICY) -> bool:
        """Whether an update has not ended yet."""
        return bool(self._redis.exists(keys.policy_active(keys.of(policy))))

    def totals(self, policy: str = DEFAULT_POLICY) -> dict[str, float]:
        """Sums for /metrics: `n_<outcome>`, and `seconds` from the first step of an update to its end."""
        sums = self._redis.hgetall(keys.policy_totals(keys.of(policy)))
        return {name: float(value) for name, value in sums.items()}

    # -- the worker's side -------------------------------------------------------------------

    def await_bell(self, timeout_s: float) -> None:
        """Sleep until an update is rung for, or so many seconds. One ring wakes one worker."""
        self._redis.blpop([keys.POLICY_BELL], timeout=timeout_s)

    def claim(self, owner: str, lease_s: float) -> Work | None:
        """An update under way that nobody works on."""
        names = sorted({DEFAULT_POLICY, *self._redis.smembers(keys.POLICIES)})
        active = self._redis.mget(keys.policy_active(keys.of(name)) for name in names)
        found = (name for name, update in zip(names, active, strict=True) if update)
        return next(filter(None, (self._claim(name, owner, lease_s) for name in found)), None)

    def _claim(self, policy: str, owner: str, lease_s: float) -> Work | None:
        of = keys.of(policy)
        lease, token = self._lock(keys.policy_lease(of), lease_s), f"{owner}/{uuid.uuid4().hex}"
        if not lease.acquire(blocking=False, token=token):
            return None
        record = None
        try:
            # Asked once more: it may have ended meanwhile.
            if active := self._redis.get(keys.policy_active(of)):
                record = self._redis.hget(keys.policy_updates(of), active)
                if record is None:  # somebody deleted it; nobody could ever end this update
                    self._redis.delete(keys.policy_active(of))
        finally:
            if record is None:
                release(lease)
        return Work(lease, token, Record.model_validate_json(record)) if record else None

    def save(self, work: Work) -> None:
        """Write how far an update has come.

        Raises:
            LeaseLost: It is not the caller's any more.
        """
        self._write("save", work)

    def finish(self, work: Work, current: Current | None) -> None:
        """Write an update's end, and with it the policy that is current from now on (None: as before).

        Raises:
            LeaseLost: It is not the caller's any more.
        """
        update = work.record.update
        self._write(
            "finish",
            work,
            current=current.model_dump_json() if current else None,
            version=current.policy.version if current else None,
            outcome=update.state.value,
            seconds=(update.finished_at or 0.0) - (update.started_at or 0.0),
        )

    def _write(self, operation: str, work: Work, **more: Any) -> None:
        update, record = work.record.update, work.record.model_dump_json()
        of = keys.of(update.policy)
        if not self._do(operation, of=of, token=work.token, id=update.id, record=record, **more):
            raise LeaseLost(f"update {update.id}: the lease ran out, another worker goes on")

    def lock(self, backend_id: str, lease_s: float) -> Lock:
        """The lock under which a backend is worked on, not taken yet; it expires with its worker."""
        return self._lock(keys.policy_lock(backend_id), lease_s)

    def _lock(self, key: str, lease_s: float) -> Lock:
        # One thread extends what others have taken.
        return self._redis.lock(key, timeout=lease_s, thread_local=False)


def release(lease: Lock) -> None:
    """Give a lease back, if it is still one's own."""
    with suppress(LockError):
        lease.release()


def outcome(update: PolicyUpdate) -> UpdateState:
    """What the ends of its backends make of an update. Backends that were removed do not count."""
    words = [backend.state.value for backend in update.backends.values() if backend.state.value != "skipped"]
    if "resumed" not in words:
        return UpdateState.FAILED
    return UpdateState.DONE if set(words) == {"resumed"} else UpdateState.PARTLY
