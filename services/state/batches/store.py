"""Batches in Redis: what is wanted, what is under way, and what somebody has to do. See `batches.lua`."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

import redis

from rollout.batch import Batch, BatchRequest, Verdict
from rollout.schema import RolloutRequest
from services.settings import Settings
from services.state import keys
from services.state.memory import Room
from services.state.requests import stored_form
from services.state.scripts import Operations
from services.state.tenants import DEFAULT_TENANT, QuotaExceeded

LEASE_S = 20.0
"""After which somebody else does what a worker has taken and not done."""
FILL_AT_ONCE = 32
"""Groups, or pieces of them, that one call starts; the next call starts more."""
_REASON = "reason:"


class BatchConflict(ValueError):
    """The id is in use with another body, or by somebody else."""


class NoSuchBatch(LookupError):
    """There is no such batch, or it is another tenant's."""


class BatchEnded(ValueError):
    """It takes no more prompts."""


class BatchRuns(ValueError):
    """Nothing can be taken over from a batch that has not ended."""


@dataclass(frozen=True)
class Todo:
    """Something that a worker has taken to do."""

    kind: str
    """`fill` and `end` a batch, `start` a piece of a group, `decide` a group."""
    subject: str
    token: str
    """Shown when it is done: it may have been asked for again meanwhile."""


def _member_ids(group_id: str, size: int, members: range) -> list[str]:
    return [group_id] if size == 1 else [f"{group_id}.{k}" for k in members]


@dataclass(frozen=True)
class Starting:
    """Members of a group that are to be submitted."""

    group_id: str
    first: int
    """Index of the first member to submit."""
    count: int
    size: int
    """Members that the group is to have."""
    prompt: str
    """The request, as JSON."""

    @property
    def rollout_ids(self) -> list[str]:
        """Those of the members to submit."""
        return _member_ids(self.group_id, self.size, range(self.first, self.first + self.count))


@dataclass(frozen=True)
class GroupRecord:
    """A group as Redis keeps it."""

    group_id: str
    batch: str
    state: str
    size: int
    """Members that it was to have."""
    sent: int
    """Members that were submitted, or are about to be."""
    prompt: str
    reason: str | None
    carried: bool

    @property
    def rollout_ids(self) -> list[str]:
        """Those of the members that were submitted."""
        return _member_ids(self.group_id, self.size, range(self.sent))


@dataclass(frozen=True)
class Decided:
    """An entry of the stream of a batch."""

    cursor: str
    group_id: str
    verdict: Verdict
    reason: str | None


class BatchStore:
    """All state of batches. Every change goes through one script."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._redis = client
        self._room = Room(client)
        self._do = Operations(client, "batches/batches")
        self._retention_ms = int(settings.retention_s * 1000)

    # -- the caller's side -------------------------------------------------------------------

    def create(
        self,
        batch_id: str,
        request: BatchRequest,
        tenant: str = DEFAULT_TENANT,
        quota_bytes: int | None = None,
        prompts: Sequence[RolloutRequest] | None = None,
    ) -> bool:
        """Write a batch. False: it is there already, with the same body.

        Args:
            quota_bytes: Most bytes that the tenant may have; None = any number.
            prompts: Requests that its prompts, forks among them, stand for; None = themselves.

        Raises:
            QuotaExceeded: There is no room for its prompts; nothing was written.
            Unstorable: A prompt could not be read again.
            BatchConflict: The id has another body, or is another tenant's.
            NoSuchBatch: `carry_from` names none of this tenant's.
            BatchRuns: `carry_from` has not ended.
            StoreFull: Redis has no room for new work.
        """
        texts = [*map(stored_form, request.prompts if prompts is None else prompts)]
        self._room.require(sum(map(len, texts)))
        source = request.carry_from
        if source is not None and not self.get(source, tenant).state.ended:
            raise BatchRuns(f"batch {source} has not ended; its groups are its own until then")
        answer = self._do(
            "create",
            *texts,
            batch=batch_id,
            digest=_digest(request),
            tenant=tenant,
            config=request.model_copy(update={"prompts": []}).model_dump_json(),
            wanted=request.groups,
            n=request.n,
            slots=request.slots,
            most_open=request.open_limit,
            # Prompts that another batch left come on top, so it is not closed before they are here.
            closed=request.closed and source is None,
            salt=_salt(batch_id),
            most_bytes=quota_bytes,
        )
        if answer["word"] == "over":
            raise QuotaExceeded(tenant, **answer["over"])
        if answer["word"] == "conflict":
            raise BatchConflict(f"batch {batch_id!r} is there with another body, or is somebody else's")
        if source is not None:
            most = 10**9 if request.max_carried is None else request.max_carried
            # Also when the batch was there: whoever wrote it may have died before this.
            self._do("adopt", **{"batch": batch_id, "from": source, "most": most})
            if request.closed:
                self._do("extend", batch=batch_id, closed=True)
        return answer["word"] == "new"

    def is_there(self, batch_id: str, request: BatchRequest, tenant: str) -> bool:
        """Whether this batch, with the same body, is the tenant's already."""
        return self._redis.hmget(keys.batch(batch_id), "digest", "tenant") == [_digest(request), tenant]

    def extend(
        self,
        batch_id: str,
        prompts: Sequence[str],
        closed: bool | None,
        tenant: str | None,
        part: str | None = None,
        quota_bytes: int | None = None,
    ) -> int:
        """Add prompts (requests as JSON); returns how many wait.

        Args:
            part: The same one again adds nothing.
            quota_bytes: Most bytes that the batch's tenant may have; None = any number.

        Raises:
            QuotaExceeded: There is no room for them; nothing was added.
            NoSuchBatch: See there.
            BatchEnded: It has ended, or was closed.
            StoreFull: Redis has no room for new work.
        """
        if prompts:
            self._room.require(sum(map(len, prompts)))
        owner = self.get(batch_id, tenant).tenant
        answer = self._do(
            "extend", *prompts, batch=batch_id, closed=closed, part=part or None, most_bytes=quota_bytes
        )
        word = answer["word"]
        if word == "over":
            raise QuotaExceeded(owner, **answer["over"])
        if word == "closed":
            raise BatchEnded(f"batch {batch_id} is closed: it was to take no more prompts")
        if word != "ok":
            raise BatchEnded(f"batch {batch_id} has ended ({word})")
        return answer["waiting"]

    def pause(self, batch_id: str, paused: bool, tenant: str | None) -> Batch:
        """Start no more groups, or go on; what runs goes on. Raises NoSuchBatch."""
        self.get(batch_id, tenant)
        self._do("pause", batch=batch_id, paused=paused)
        return self.get(batch_id, tenant)

    def cancel(self, batch_id: str, tenant: str | None) -> Batch:
        """End it, with all that is under way. Harmless when it has ended. Raises NoSuchBatch."""
        self.get(batch_id, tenant)
        self._do("cancel", batch=batch_id)
        return self.get(batch_id, tenant)

    # -- reading -----------------------------------------------------------------------------

    def get(self, batch_id: str, tenant: str | None = None) -> Batch:
        """A batch and its counters.

        Raises:
            NoSuchBatch: There is none, or it is another tenant's.
        """
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(keys.batch(batch_id))
            pipe.scard(keys.batch_open(batch_id))
            pipe.llen(keys.batch_prompts(batch_id))
            fields, opened, waiting = pipe.execute()
        if not fields or tenant not in (None, fields["tenant"]):
            raise NoSuchBatch(f"there is no batch {batch_id!r}; it may be past its retention")
        finished = fields.get("finished")
        return Batch.model_validate(
            fields
            | {
                "id": batch_id,
                "open": opened,
                "in_flight": fields["live"],
                "waiting_prompts": waiting,
                "reasons": {
                    name.removeprefix(_REASON): count
                    for name, count in fields.items()
                    if name.startswith(_REASON)
                },
                "created_at": int(fields["created"]) / 1000,
                "finished_at": int(finished) / 1000 if finished else None,
            }
        )

    def config(self, batch_id: str) -> BatchRequest:
        """The request, without its prompts. Raises NoSuchBatch."""
        raw, carry = self._redis.hmget(keys.batch(batch_id), "config", "carry")
        if raw is None:
            raise NoSuchBatch(f"there is no batch {batch_id!r}")
        # Its prompts are in a list of their own, so it is read as one that may get some.
        config = BatchRequest.model_validate(json.loads(raw) | {"closed": False})
        return config.model_copy(update={"carry": carry}) if carry else config

    def ids(self, tenant: str | None, limit: int = 100) -> list[str]:
        """The newest first."""
        name = keys.BATCHES if tenant is None else keys.batches_of(tenant)
        return self._redis.zrevrange(name, 0, limit - 1)

    def totals(self) -> dict[str, int]:
        """Sums for /metrics over all batches."""
        return {name: int(value) for name, value in self._redis.hgetall(keys.BATCHES_TOTALS).items()}

    def todo(self) -> int:
        """Things that somebody has to do, now or later."""
        return self._redis.zcard(keys.BATCHES_TODO)

    def groups(self, batch_id: str, cursor: str, limit: int) -> list[Decided]:
        """Groups decided after a cursor (`0` = from the first)."""
        entries = self._redis.xrange(keys.batch_events(batch_id), min=f"({cursor}", count=limit)
        return [
            Decided(entry, fields["group"], Verdict(fields["verdict"]), fields.get("reason") or None)
            for entry, fields in entries
            if "group" in fields
        ]

    def group(self, group_id: str) -> GroupRecord | None:
        """One group."""
        return self.group_many([group_id])[0]

    def group_many(self, group_ids: Sequence[str]) -> list[GroupRecord | None]:
        """Groups in the order of the ids; None for those that are not there."""
        with self._redis.pipeline(transaction=False) as pipe:
            for group_id in group_ids:
                pipe.hgetall(keys.batch_group(group_id))
            replies = pipe.execute()
        return [_group(group_id, fields) for group_id, fields in zip(group_ids, replies, strict=True)]

    def open_groups(self, batch_id: str) -> list[str]:
        """Ids of the groups that are not decided."""
        return sorted(self._redis.smembers(keys.batch_open(batch_id)))

    # -- the workers' side -------------------------------------------------------------------

    def take(self, limit: int = 16) -> list[Todo]:
        """What is to be done; it is the caller's for `LEASE_S`."""
        things = self._do("take", limit=limit, lease=int(LEASE_S * 1000))
        return [Todo(*thing["what"].split(" ", 1), thing["token"]) for thing in things]

    def through(self, todo: Todo) -> None:
        """It is done."""
        self._do("through", what=f"{todo.kind} {todo.subject}", token=todo.token)

    def later(self, todo: Todo, delay_s: float) -> None:
        """It cannot be done now."""
        self._do("later", what=f"{todo.kind} {todo.subject}", delay=int(delay_s * 1000))

    def fill(self, batch_id: str) -> list[Starting]:
        """What there is room for, marked, so that somebody submits it even if the caller dies."""
        pieces = self._do("fill", batch=batch_id, limit=FILL_AT_ONCE, lease=int(LEASE_S * 1000))
        return [Starting(**piece) for piece in pieces]

    def started(self, piece: Starting) -> bool:
        """These rollouts of a group are submitted. True: their batch has ended."""
        return self._do("started", group=piece.group_id, first=piece.first, count=piece.count)

    def cut(self, group_id: str) -> None:
        """Submit no more members of a group."""
        self._do("cut", group=group_id)

    def decide(
        self, group_id: str, verdict: Verdict, reason: str | None, scored: int, dropped: int
    ) -> tuple[str, str]:
        """Write the verdict on a group, once; returns its state and that of its batch.

        A group whose batch has ended stays undecided, for the next batch, unless it was cancelled.
        """
        states = self._do(
            "decide",
            group=group_id,
            verdict=verdict.value,
            reason=reason or "",
            scored=scored,
            dropped=dropped,
            retention=self._retention_ms,
        )
        return states["group"], states["batch"]

    def expire(self, batch_id: str, groups: Iterable[str]) -> None:
        """Have a batch that has ended forgotten with its rollouts' retention."""
        self._do("expire", batch=batch_id, groups=list(groups), retention=self._retention_ms)


def _digest(request: BatchRequest) -> str:
    return hashlib.sha256(request.model_dump_json().encode()).hexdigest()


def _salt(batch_id: str) -> str:
    """What ends the ids of a batch's groups where its own can be guessed: ids of rollouts are the whole
    service's, and nobody else's may be chosen or made to be the same."""
    try:
        if str(UUID(batch_id)) == batch_id:
            return ""
    except ValueError:
        pass
    return f"-{secrets.token_hex(4)}"


def _group(group_id: str, fields: dict[str, str]) -> GroupRecord | None:
    if not fields:
        return None
    return GroupRecord(
        group_id,
        fields["batch"],
        fields["state"],
        int(fields["size"]),
        int(fields["sent"]),
        fields["request"],
        fields.get("reason") or None,
        fields.get("carried") == "1",
    )
