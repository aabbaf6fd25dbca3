"""Rollout records and the only way their state changes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from rollout.schema import (
    TERMINAL_STATES,
    ErrorInfo,
    Rollout,
    RolloutRequest,
    SandboxRecord,
    Stage,
    State,
    TimelineEvent,
)
from rollout.trajectory import Trajectory
from services.settings import Settings
from services.state import keys
from services.state.redis import lua_source

_ENDS = {State.FAILED, State.CANCELLED, State.TIMED_OUT}
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.INITIALIZING} | _ENDS),
    State.INITIALIZING: frozenset({State.READY, State.QUEUED} | _ENDS),
    State.READY: frozenset({State.RUNNING, State.QUEUED} | _ENDS),
    State.RUNNING: frozenset({State.EVALUATING, State.QUEUED} | _ENDS),
    # EVALUATING to itself: claimed by a worker, or taken from a dead one.
    State.EVALUATING: frozenset({State.EVALUATING, State.COMPLETED, State.QUEUED} | _ENDS),
    State.COMPLETED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
    State.TIMED_OUT: frozenset(),
}
"""From each state, the states that may follow. Back to QUEUED is a new attempt from INIT."""

MAX_REQUEUE_S = 600.0
"""Longest pause between two messages for a rollout that merely waits in a queue."""


def _lua_table() -> str:
    rows = (
        f"{state} = {{{', '.join(f'{to} = true' for to in sorted(following))}}}"
        for state, following in TRANSITIONS.items()
    )
    return f"local ALLOWED = {{{', '.join(rows)}}}\n"


@dataclass(frozen=True)
class NewRollout:
    """A rollout about to be written."""

    id: str
    group_id: str
    index: int
    request: RolloutRequest
    request_json: str
    digest: str
    """Digest of the body, to tell a repeated submission from another one with the same id."""


@dataclass(frozen=True)
class Claim:
    """A stage of a rollout, held under a fence until `finish` or until the lease runs out."""

    rollout_id: str
    group_id: str
    index: int
    attempt: int
    stage: Stage
    fence: int
    deadline_in_s: float
    """Seconds left until the rollout's deadline, at the time of the claim."""
    request: RolloutRequest
    sandbox: SandboxRecord | None
    sandbox_socket: str | None
    node: str | None
    error: ErrorInfo | None
    """What went wrong in an earlier stage of this attempt."""
    finish_reason: str | None
    metrics: dict[str, float]
    """The numbers that earlier stages wrote."""
    trajectory_json: str | None
    """For EVAL: what RUN left."""


@dataclass
class Finish:
    """What a stage writes when it ends."""

    next: str
    """A state, `again` (another attempt from INIT while one is left) or `handback`."""
    fields: dict[str, str] = field(default_factory=dict)
    trajectory: Trajectory | None = None
    delay_s: float | None = None
    """Seconds before the reaper looks at the rollout; None = the requeue time."""


@dataclass(frozen=True)
class Overdue:
    """One thing the reaper has to do."""

    action: str
    """`send` a message again, `restart` from INIT, or clean up after one that `ended`."""
    rollout_id: str
    attempt: int
    stage: str
    node: str | None


class RolloutStore:
    """Records in Redis. Every change goes through `lua/rollouts.lua`."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._redis = client
        self._settings = settings
        self._script = client.register_script(_lua_table() + lua_source("backends") + lua_source("rollouts"))
        self._retention = str(int(settings.retention_s * 1000))
        self._kept = str(settings.completions_kept)

    def _call(self, *args: Any) -> Any:
        return self._script(args=args)

    # -- writing -----------------------------------------------------------------------------

    def submit(self, rollouts: Sequence[NewRollout]) -> list[str]:
        """Write records, all or none.

        Returns:
            One word each: `new`, the state of the one that is there already, or `conflict`
            (same id, other body). With any `conflict` nothing was written.
        """
        args: list[Any] = []
        for new in rollouts:
            args += [
                new.id,
                new.group_id,
                new.index,
                new.request.handler,
                new.request_json,
                new.digest,
                ",".join(new.request.tags),
                int(new.request.limits.deadline_s * 1000),
            ]
        return self._call(
            "submit", int(self._settings.requeue_s * 1000), self._retention, len(rollouts), *args
        )

    def claim(
        self, rollout_id: str, attempt: int, stage: Stage, owner: str, token: str | None = None
    ) -> Claim | str:
        """Take a stage, or learn why not: `gone`, `ended`, `stale` or `overdue`.

        Args:
            token: The same one again gives the same answer again; None makes one for this call, which
                the connection's own retries then repeat.
        """
        lease = int(self._settings.lease_s * 1000)
        token = token or secrets.token_hex(8)
        reply = self._call("claim", rollout_id, attempt, stage.value, owner, lease, token)
        if reply[0] != "ok":
            return reply[0]
        (
            _,
            fence,
            now,
            deadline,
            request,
            sandbox,
            node,
            error,
            finish_reason,
            index,
            group,
            metrics,
            trajectory,
        ) = reply
        box = json.loads(sandbox) if sandbox else None
        return Claim(
            rollout_id=rollout_id,
            group_id=group,
            index=int(index),
            attempt=attempt,
            stage=stage,
            fence=int(fence),
            deadline_in_s=(int(deadline) - int(now)) / 1000,
            request=RolloutRequest.model_validate_json(request),
            sandbox=SandboxRecord.model_validate(box["record"]) if box else None,
            sandbox_socket=box["socket"] if box else None,
            node=node or None,
            error=ErrorInfo.model_validate_json(error) if error else None,
            finish_reason=finish_reason or None,
            metrics=json.loads(metrics) if metrics else {},
            trajectory_json=trajectory or None,
        )

    def heartbeat(self, held: Iterable[tuple[str, int]]) -> list[str]:
        """Extend leases. One word each: `ok`, `lost`, `cancel` or `overdue`."""
        pairs = [str(value) for pair in held for value in pair]
        return self._call("heartbeat", int(self._settings.lease_s * 1000), *pairs) if pairs else []

    def note(self, rollout_id: str, fence: int, fields: dict[str, str]) -> bool:
        """Write facts of a running stage. False: the stage is not ours any more."""
        flat = [value for pair in fields.items() for value in pair]
        return self._call("note", rollout_id, fence, *flat) == "ok"

    def finish(self, claim: Claim, outcome: Finish) -> str:
        """End a stage. Idempotent under one fence.

        Returns:
            The state that the rollout entered, or `lost` when the fence is not ours any more.
        """
        settings = self._settings
        delay = settings.requeue_s if outcome.delay_s is None else outcome.delay_s
        flat = [value for pair in outcome.fields.items() for value in pair]
        return self._call(
            "finish",
            claim.rollout_id,
            claim.fence,
            claim.stage.value,
            outcome.next,
            int(delay * 1000),
            claim.request.limits.max_attempts,
            self._retention,
            self._kept,
            outcome.trajectory.model_dump_json() if outcome.trajectory else "",
            *flat,
        )

    def cancel(self, rollout_id: str) -> tuple[str, str, str | None, int]:
        """Cancel a rollout: at once where nobody holds it, else by a flag and a message to its worker.

        Returns:
            `(word, state, node, attempt)`; the word is `gone`, `ended`, `cancelling` or `cancelled`.
        """
        word, state, node, attempt = self._call("cancel", self._retention, self._kept, rollout_id)
        if word == "cancelling":
            self._redis.publish(keys.CANCEL_CHANNEL, rollout_id)
        return word, state, node or None, int(attempt)

    def overdue(self, limit: int = 200) -> list[Overdue]:
        """Judge what is due; the state changes are made, the messages are the caller's to send."""
        settings = self._settings
        rows = self._call(
            "overdue",
            limit,
            int(settings.requeue_s * 1000),
            int(max(MAX_REQUEUE_S, settings.requeue_s) * 1000),
            self._retention,
            self._kept,
        )
        return [
            Overdue(action, rollout_id, int(attempt), stage, node or None)
            for action, rollout_id, attempt, stage, node in rows
        ]

    def trim(self) -> None:
        """Drop index entries of records that have expired."""
        seconds, micros = self._redis.time()
        # A record may have lived for its whole deadline (a week at most) before retention began.
        horizon = seconds * 1000 + micros // 1000 - int(self._retention) - 8 * 86400 * 1000
        names = [keys.CREATED, *(keys.by_state(state) for state in TERMINAL_STATES)]
        names += list(self._redis.scan_iter(keys.by_tag("*"), count=1000))
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.zremrangebyscore(name, "-inf", horizon)
            pipe.execute()

    # -- reading -----------------------------------------------------------------------------

    def get(self, rollout_id: str, *, trajectory: bool = True) -> Rollout | None:
        """One rollout, or None."""
        return next(self.get_many([rollout_id], trajectory=trajectory), None)

    def state(self, rollout_id: str) -> State | None:
        """Only the state: the cheap question."""
        value = self._redis.hget(keys.record(rollout_id), "state")
        return State(value) if value else None

    def get_many(self, rollout_ids: Iterable[str], *, trajectory: bool = True) -> Iterator[Rollout]:
        """Rollouts in the order of the ids; those that are not there are left out."""
        ids = list(rollout_ids)
        with self._redis.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hgetall(keys.record(rollout_id))
                pipe.lrange(keys.timeline(rollout_id), 0, -1)
                if trajectory:
                    pipe.get(keys.trajectory(rollout_id))
            replies = iter(pipe.execute())
        for rollout_id in ids:
            record, events = next(replies), next(replies)
            raw = next(replies) if trajectory else None
            if record:
                yield _rollout(rollout_id, record, events, raw)

    def ids(
        self,
        *,
        state: State | None = None,
        group_id: str | None = None,
        tag: str | None = None,
        newest_first: bool = True,
        offset: int = 0,
        limit: int = 100,
    ) -> list[str]:
        """Ids by time of creation, by one index: the group's, else the tag's, else the state's."""
        if group_id is not None:
            members = sorted(self._redis.smembers(keys.group(group_id)))
            return members[offset : offset + limit]
        name = keys.by_tag(tag) if tag else keys.by_state(state) if state else keys.CREATED
        return self._redis.zrange(name, offset, offset + limit - 1, desc=newest_first)

    def counts(self) -> dict[str, int]:
        """Number of rollouts in each state."""
        found = self._redis.hgetall(keys.COUNTS)
        return {state.value: int(found.get(state.value, 0)) for state in State}

    def totals(self) -> dict[str, int]:
        """Sums for /metrics."""
        return {name: int(value) for name, value in self._redis.hgetall(keys.TOTALS).items()}


def _seconds(millis: str | None) -> float | None:
    return int(millis) / 1000 if millis else None


def _event(line: str) -> TimelineEvent:
    state, at, attempt, fence, owner = line.split(" ", 4)
    return TimelineEvent(
        state=State(state),
        at=int(at) / 1000,
        attempt=int(attempt),
        fence=int(fence),
        owner=None if owner == "-" else owner,
    )


def _rollout(rollout_id: str, record: dict[str, str], events: list[str], trajectory: str | None) -> Rollout:
    box = json.loads(record["sandbox"])["record"] if record.get("sandbox") else None
    return Rollout(
        id=rollout_id,
        group_id=record["group"],
        index=int(record["index"]),
        handler=record["handler"],
        state=State(record["state"]),
        attempt=int(record["attempt"]),
        request=RolloutRequest.model_validate_json(record["request"]),
        reward=float(record["reward"]) if record.get("reward") else None,
        reward_components=json.loads(record.get("reward_components") or "{}"),
        drop=record.get("drop") == "1",
        drop_reason=record.get("drop_reason"),
        finish_reason=record.get("finish_reason") or None,
        error=ErrorInfo.model_validate_json(record["error"]) if record.get("error") else None,
        trajectory=Trajectory.model_validate_json(trajectory) if trajectory else None,
        backend=record.get("backend"),
        sandbox=SandboxRecord.model_validate(box) if box else None,
        metrics=json.loads(record.get("metrics") or "{}"),
        stage_seconds={
            name: int(record[f"ms_{name}"]) / 1000
            for name in ("queued", "init", "run", "eval")
            if f"ms_{name}" in record
        },
        created_at=_seconds(record["created"]),
        updated_at=_seconds(record["updated"]),
        finished_at=_seconds(record.get("finished")),
        deadline_at=_seconds(record["deadline"]),
        timeline=[_event(line) for line in events],
    )
