"""Rollout records as they are read: nothing here changes one."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import redis
import structlog
from pydantic_core import from_json

from rollout import arrays
from rollout.schema import Rollout, RolloutRequest, State
from rollout.trajectory import Trajectory
from services.state import keys
from services.state.checkpoints import given
from services.state.requests import first_line
from services.state.rollouts import payloads
from services.state.tenants import DEFAULT_TENANT
from services.state.turns import store as turns
from services.state.turns.entries import decode, trajectory_of

log = structlog.get_logger("state")

UNREADABLE_COUNT = "unreadable"
"""Field of the totals."""
T = TypeVar("T")
BAD = (ValueError, KeyError, TypeError, AttributeError)
"""What the reading of a damaged record raises; pydantic's and `PayloadError` are ValueErrors."""
MAX_TOLD = 10_000
"""Unreadable records that a process remembers to have told of."""
_HELD = (State.INITIALIZING, State.READY, State.RUNNING, State.EVALUATING)
"""Of these there are never more than workers have room for, while those of a tag add up."""
PART_BYTES = 16 << 20
"""Of records that are asked of Redis at once: so many wait there for a reader that is slow."""


class Skipped:
    """Tells of records that cannot be read: of each once a process, in the log and in a count."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._told: set[str] = set()

    def tell(self, rollout_id: str, cause: Exception) -> None:
        """One was passed over. Never raises."""
        if rollout_id in self._told:
            return
        if len(self._told) >= MAX_TOLD:
            self._told.clear()
        self._told.add(rollout_id)
        log.error(
            "a record cannot be read and is passed over", rollout_id=rollout_id, error=first_line(cause)
        )
        with suppress(redis.RedisError):
            self._redis.hincrby(keys.TOTALS, UNREADABLE_COUNT, 1)


def request_texts(client: redis.Redis, records: Sequence[Mapping[str, str | None]]) -> list[str | None]:
    """The request (JSON) of each record, of which `tenant` and `digest` are looked at.

    Members of a group share theirs, which is read once. None = it is not there.
    """
    owners = [(record.get("tenant"), record.get("digest")) for record in records]
    shared = dict.fromkeys((tenant, digest) for tenant, digest in owners if tenant and digest)
    with client.pipeline(transaction=False) as pipe:
        for tenant, digest in shared:
            pipe.hget(keys.request(tenant, digest), "body")
        shared = dict(zip(shared, pipe.execute(), strict=True))
    return [shared.get(owner) for owner in owners]


class RolloutReader:
    """Rollouts, and their numbers, from Redis. One that cannot be read is passed over, and told of."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self.skipped = Skipped(client)

    def get(self, rollout_id: str, *, trajectory: bool = True, tenant: str | None = None) -> Rollout | None:
        """One rollout, or None; with a tenant, None also for another one's."""
        return next(self.get_many([rollout_id], trajectory=trajectory, tenant=tenant), None)

    def so_far(self, rollout: Rollout) -> Trajectory | None:
        """The turns of a rollout that is in RUN, from its log; None before there are any."""
        try:
            entries = decode(turns.read(self._redis, rollout.id, rollout.attempt))
        except ValueError as error:
            self.skipped.tell(rollout.id, error)
            return None
        trajectory = trajectory_of(entries) if entries else None
        if trajectory and rollout.request.origin:
            given(trajectory, rollout.request.origin)
        return trajectory

    def state(self, rollout_id: str, tenant: str | None = None) -> State | None:
        """Only the state: the cheap question. With a tenant, None for another one's rollout."""
        value, owner = self._redis.hmget(keys.record(rollout_id), "state", "tenant")
        return State(value) if value and tenant in (None, owner) else None

    def ended(self, rollout_id: str, tenant: str | None = None) -> bool:
        """Whether nothing more becomes of it; also where there is none, or it is another tenant's."""
        state = self.state(rollout_id, tenant)
        return state is None or state.terminal

    def get_many(
        self, rollout_ids: Iterable[str], *, trajectory: bool = True, tenant: str | None = None
    ) -> Iterator[Rollout]:
        """Rollouts in the order of the ids; those that are not there, or not the tenant's, are left out."""
        ids = list(rollout_ids)
        with self._redis.pipeline(transaction=False) as pipe:
            self._ask(pipe, ids)
            if trajectory and ids:
                payloads.get_many(pipe, [keys.trajectory(rollout_id) for rollout_id in ids])
            replies = pipe.execute()
        trajectories = replies.pop() if trajectory and ids else [None] * len(ids)
        for rollout, stored in self._rollouts(ids, replies, trajectories, tenant):
            if not stored or self._has_read(rollout, stored):
                yield rollout

    def get_records(
        self, rollout_ids: Iterable[str], *, tenant: str | None = None
    ) -> Iterator[tuple[Rollout, int | bytes | None]]:
        """As `get_many`, each without its trajectory, and what stands for that.

        That is the number of bytes that `records` will give for it; its record, of one that has not ended; or
        None, where there is none. A trajectory that no record can hold stays where it is.
        """
        ids = list(rollout_ids)
        with self._redis.pipeline(transaction=False) as pipe:
            self._ask(pipe, ids)
            replies = pipe.execute()
        sizes = [record.get("record_bytes") for record in replies[::2]]
        others = [rollout_id for rollout_id, size in zip(ids, sizes, strict=True) if size is None]
        names = [keys.trajectory(rollout_id) for rollout_id in others]
        stored = dict(zip(others, payloads.get_many(self._redis, names) if names else [], strict=True))
        for rollout, size in self._rollouts(ids, replies, sizes, tenant):
            if size is not None:
                yield rollout, int(size)
            elif (there := stored[rollout.id]) is None or arrays.is_record(there):
                yield rollout, there
            elif self._has_read(rollout, there):
                yield rollout, None

    def _has_read(self, rollout: Rollout, stored: bytes) -> bool:
        """Whether the trajectory could be read; then the rollout has it."""
        try:
            rollout.trajectory = payloads.decode_trajectory(stored)
        except payloads.PayloadError as error:
            self.skipped.tell(rollout.id, error)
            return False
        return True

    def records(self, sizes: Mapping[str, int]) -> Generator[bytes]:
        """Records of these rollouts that `get_records` gave these sizes, each read when it is asked for.

        Raises:
            PayloadError: One is not there any more, or another one by now.
        """
        for part in _parts(sizes):
            names = [keys.trajectory(rollout_id) for rollout_id in part]
            values = payloads.get_many(self._redis, names)
            for name, rollout_id, value in zip(names, part, values, strict=True):
                if value is None or len(value) != sizes[rollout_id]:
                    raise payloads.PayloadError(
                        f"{name} is not what it was a moment ago: it was dropped, or the rollout goes on"
                    )
                yield value

    def _ask(self, pipe: Any, ids: list[str]) -> None:
        for rollout_id in ids:
            pipe.hgetall(keys.record(rollout_id))
            pipe.lrange(keys.timeline(rollout_id), 0, -1)

    def _rollouts(
        self, ids: list[str], replies: list[Any], with_each: Iterable[T], tenant: str | None
    ) -> Iterator[tuple[Rollout, T]]:
        # The members of a group have one and the same request.
        requests: dict[str, RolloutRequest] = {}
        texts = request_texts(self._redis, replies[::2])
        for rollout_id, record, events, text, more in zip(
            ids, replies[::2], replies[1::2], texts, with_each, strict=True
        ):
            if not record or tenant not in (None, record.get("tenant")):
                continue
            try:
                if text is None:
                    raise ValueError("its request is not there")
                request = requests.get(text) or RolloutRequest.model_validate_json(text)
                requests[text] = request
                rollout = rollout_of(rollout_id, record, events, request)
            except BAD as error:
                self.skipped.tell(rollout_id, error)
                continue
            yield rollout, more

    def ids(
        self,
        *,
        state: State | None = None,
        group_id: str | None = None,
        tag: str | None = None,
        tenant: str | None = DEFAULT_TENANT,
        offset: int = 0,
        limit: int = 100,
    ) -> list[str]:
        """Ids, the newest first, by one index: the group's, else a held state's, else the tag's, else the
        state's, else the tenant's.

        The index of a state holds every tenant's. With `tenant=None`, all tenants', there is none by group
        or tag: the caller looks at each.
        """
        if group_id is not None and tenant is not None:
            members = sorted(self._redis.smembers(keys.group(tenant, group_id)))
            return members[offset : offset + limit]
        if tag and tenant is not None and state not in _HELD:
            name = keys.by_tag(tenant, tag)
        elif state:
            name = keys.by_state(state)
        else:
            name = keys.CREATED if tenant is None else keys.by_tenant(tenant)
        return self._redis.zrange(name, offset, offset + limit - 1, desc=True)

    def on_node(self, node: str) -> list[str]:
        """Ids of the rollouts that a node's workers hold, or whose sandboxes are there. Looks at all that are
        live."""
        ids = [item for state in _HELD for item in self._redis.zrange(keys.by_state(state), 0, -1)]
        with self._redis.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hmget(keys.record(rollout_id), "node", "owner")
            places = pipe.execute()
        pairs = zip(ids, places, strict=True)
        return [item for item, (box, owner) in pairs if box == node or f"@{node}/" in (owner or "")]

    def ahead(self, node: str) -> tuple[int, int]:
        """Rollouts of a node between the start of INIT and RUN, and ready ones without a sandbox anywhere."""
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.scard(keys.ahead(node))
            pipe.scard(keys.ahead(keys.NO_SANDBOX))
            return tuple(pipe.execute())

    def counts(self) -> dict[str, int]:
        """Number of rollouts in each state."""
        stored = self._redis.hgetall(keys.COUNTS)
        return {state.value: int(stored.get(state.value, 0)) for state in State}

    def totals(self) -> dict[str, int]:
        """Sums for /metrics."""
        return {name: int(value) for name, value in self._redis.hgetall(keys.TOTALS).items()}


def _parts(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Ids of at most `PART_BYTES` together, or one."""
    part: list[str] = []
    length = 0
    for name, size in sizes.items():
        if part and length + size > PART_BYTES:
            yield part
            part, length = [], 0
        part.append(name)
        length += size
    if part:
        yield part


def _seconds(millis: str | None) -> float | None:
    return int(millis) / 1000 if millis else None


_NOTE = "note"
"""How lines of the timeline begin that are no change of state."""
_STAGES = {name: f"ms_{name}" for name in ("queued", "init", "run", "eval")}


def _history(lines: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`TimelineEvent`s and `TimelineNote`s, as dicts: made one by one they take most of a rollout's time."""
    timeline, notes = [], []
    for line in lines:
        word, at, attempt, fence, rest = line.split(" ", 4)
        entry = {"at": int(at) / 1000, "attempt": int(attempt), "fence": int(fence)}
        if word == _NOTE:
            entry["text"] = rest
            notes.append(entry)
        else:
            entry["state"], entry["owner"] = word, None if rest == "-" else rest
            timeline.append(entry)
    return timeline, notes


def _numbers(text: str | None) -> dict[str, float]:
    """What has no place in JSON is left out: one such number would make a whole page unreadable."""
    numbers = from_json(text or "{}")
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def rollout_of(
    rollout_id: str, record: dict[str, str], events: list[str], request: RolloutRequest
) -> Rollout:
    """All but the trajectory."""
    timeline, notes = _history(events)
    return Rollout.model_validate(
        record  # of which much has the same name and form
        | {
            "id": rollout_id,
            "group_id": record["group"],
            "resumed": record.get("resumed") or 0,
            "moved": record.get("moved") or 0,
            "request": request,
            "reward": record.get("reward") or None,
            "reward_components": _numbers(record.get("reward_components")),
            "role_rewards": _numbers(record.get("role_rewards")),
            "drop": record.get("drop") == "1",
            "finish_reason": record.get("finish_reason") or None,
            "error": from_json(record["error"]) if record.get("error") else None,
            "acknowledged_at": _seconds(record.get("acked")),
            "policy_versions": from_json(record.get("policy_versions") or "[]"),
            "sandbox": from_json(record["sandbox"])["record"] if record.get("sandbox") else None,
            "metrics": _numbers(record.get("metrics")),
            "stage_seconds": {
                name: int(record[field]) / 1000 for name, field in _STAGES.items() if field in record
            },
            "created_at": _seconds(record["created"]),
            "updated_at": _seconds(record["updated"]),
            "finished_at": _seconds(record.get("finished")),
            "deadline_at": _seconds(record["deadline"]),
            "lease_until": _seconds(record.get("lease")) if record.get("owner", "-") != "-" else None,
            "timeline": timeline,
            "notes": notes,
        }
    )
