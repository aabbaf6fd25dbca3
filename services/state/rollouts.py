"""The only way in which rollout records change their state."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import redis

from rollout.schema import (
    TERMINAL_STATES,
    Blame,
    ErrorInfo,
    RolloutRequest,
    SandboxRecord,
    Stage,
    State,
)
from rollout.trajectory import FinishReason, Trajectory
from services.settings import Settings
from services.state import keys, payloads
from services.state.memory import Room
from services.state.observations import lua_buckets
from services.state.reading import RolloutReader, first_line
from services.state.redis import lua_source
from services.state.tenants import DEFAULT_TENANT, QuotaExceeded, Tenant

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

_LUA = (
    *(
        "full",
        "observations",
        "timeline",
        "backends",
        "fair",
        "ahead",
        "batch_hooks",
        "retention_account",
        "requests",
    ),
    "rollouts",
)
ABSENT = "absent:"
"""How the fields of a record begin that name nodes which could not start its image; of `Finish.fields` of an
`elsewhere` or `again` with the reason, in the record with the time."""
ABSENT_S = 60.0
"""Seconds for which such a node passes the rollout over: the image may come."""
UNREADABLE = "unreadable"
"""Instead of a claim: the record cannot be read, and the rollout has ended as failed."""
CANCEL_AT_ONCE = 200
MOVED_AT_ONCE = 1000
"""Rollouts whose times one script moves: Redis answers nobody else meanwhile."""
MAX_REQUEUE_S = 600.0
"""Longest pause between two messages for a rollout that merely waits in a queue."""


def _lua_table() -> str:
    rows = (
        f"{state} = {{{', '.join(f'{to} = true' for to in sorted(following))}}}"
        for state, following in TRANSITIONS.items()
    )
    return f"local ALLOWED = {{{', '.join(rows)}}}\nlocal ABSENT_MS = {int(ABSENT_S * 1000)}\n"


def _sendable(value: Any) -> Any:
    """A text as UTF-8: a model, a sandbox or a handler may have written half a character into it."""
    return value.encode(errors="replace") if isinstance(value, str) else value


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
    batch_group: str = ""
    """The group of a batch that it belongs to."""


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
    tenant: str
    error: ErrorInfo | None
    """What went wrong in an earlier stage of this attempt."""
    finish_reason: str | None
    metrics: dict[str, float]
    """The numbers that earlier stages wrote."""
    stored_trajectory: bytes | None
    """For EVAL: what RUN left, as it is stored."""

    def trajectory(self) -> Trajectory | None:
        """What RUN left, for EVAL.

        Raises:
            PayloadError: It is damaged.
        """
        stored = self.stored_trajectory
        return payloads.decode_trajectory(stored) if stored is not None else None


@dataclass
class Finish:
    """What a stage writes when it ends."""

    next: str
    """A state, `again` (another attempt from INIT while one is left), `handback`, or `elsewhere` (this worker
    or its node cannot do it, another one may; in the end it fails with `fields`)."""
    fields: dict[str, str] = field(default_factory=dict)
    trajectory: Trajectory | None = None
    delay_s: float | None = None
    """Seconds before the reaper looks at the rollout; None = the requeue time."""

    @cached_property
    def stored_trajectory(self) -> bytes | str:
        """The trajectory as it is stored: encoded once, however often it is sent to a Redis that is full."""
        return payloads.encode_trajectory(self.trajectory) if self.trajectory else ""


@dataclass(frozen=True)
class Overdue:
    """One thing the reaper has to do."""

    action: str
    """`send` a message again, `restart` from INIT, or clean up after one that `ended`."""
    rollout_id: str
    attempt: int
    stage: str
    node: str | None


class RolloutStore(RolloutReader):
    """Records in Redis. Every change goes through `lua/rollouts.lua`."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        super().__init__(client)
        self._settings = settings
        self._script = client.register_script(_lua_table() + lua_buckets() + "".join(map(lua_source, _LUA)))
        self._jump = client.register_script(lua_source("full") + lua_source("jump"))
        self._room = Room(client)
        self._retention = str(int(settings.retention_s * 1000))

    def _call(self, *args: Any) -> Any:
        return self._script(args=[_sendable(value) for value in args])

    def submit(self, rollouts: Sequence[NewRollout], tenant: Tenant | None = None) -> list[str]:
        """Write records, all or none.

        Args:
            tenant: Whose they are, and its quotas; None = the default tenant without any.

        Returns:
            One word each: `new`, the state of the one that is there already, or `conflict`
            (same id, other body or another tenant's). With any `conflict` nothing was written.

        Raises:
            QuotaExceeded: The tenant may not have so many more; nothing was written.
            StoreFull: Redis has no room for new work; nothing was written.
        """
        self._room.require(sum({new.digest: len(new.request_json) for new in rollouts}.values()))
        tenant = tenant or Tenant(name=DEFAULT_TENANT)
        bodies: dict[str, int] = {}
        requests: list[Any] = []
        members: list[Any] = []
        for new in rollouts:
            if new.digest not in bodies:
                bodies[new.digest] = len(bodies) + 1
                limits = new.request.limits
                requests += [
                    new.request_json,
                    new.digest,
                    new.request.handler,
                    ",".join(new.request.tags),
                    int(limits.deadline_s * 1000),
                    int(new.request.priority * self._settings.priority_step_s * 1000),
                    limits.max_attempts,
                ]
            members += [new.id, new.group_id, new.index, bodies[new.digest], new.batch_group]
        quotas = (tenant.quota_live, tenant.per_minute, tenant.quota_bytes)
        words = self._call(
            "submit",
            int(self._settings.requeue_s * 1000),
            tenant.name,
            *("" if most is None else most for most in quotas),
            len(bodies),
            len(rollouts),
            *requests,
            *members,
        )
        if words and words[0] == "over":
            raise QuotaExceeded.of(words, tenant.name)
        return words

    def claim(
        self, rollout_id: str, attempt: int, stage: Stage, owner: str, token: str | None = None
    ) -> Claim | str:
        """Take a stage, or learn why not: `gone`, `ended`, `stale`, `overdue`, `unreadable` or `crowded`
        (it is one that may end its worker, and the owner carries another such).

        Args:
            token: The same one again gives the same answer again; None makes one for this call, which
                the connection's own retries then repeat.
        """
        lease = int(self._settings.lease_s * 1000)
        token = token or secrets.token_hex(8)
        return self._claimed(
            self._call("claim", rollout_id, attempt, stage.value, owner, lease, token), stage
        )

    def claim_next(
        self,
        owner: str,
        *,
        node: str,
        most_on_node: int | None = None,
        most_without_sandbox: int | None = None,
        token: str | None = None,
    ) -> Claim | str:
        """Take INIT of the rollout whose turn it is.

        The order is that of `lua/fair.lua`: weighted between tenants; within one by priority and age.

        Args:
            node: Where INIT takes place; the rollout counts there until RUN takes it.
            most_on_node: So many may be between the start of INIT and RUN on the node; None = no bound.
            most_without_sandbox: So many may be ready, of all that need no sandbox; None = no bound.
            token: As for `claim`.

        Returns:
            The claim, or why there is none: `nobody` waits, `passed over`: only such wait
            whose image the node could not start, `full`: INIT is far enough ahead of RUN, or
            `stale`: what this token had claimed is lost by now.
        """
        lease = int(self._settings.lease_s * 1000)
        bounds = ["" if most is None else most for most in (most_on_node, most_without_sandbox)]
        while True:
            token = token or secrets.token_hex(8)
            reply = self._call("claim_next", owner, lease, token, node, *bounds)
            claim = self._claimed(reply, Stage.INIT)
            if claim != UNREADABLE:
                return claim
            token = None  # that one has ended; somebody else may wait

    def _claimed(self, reply: list[Any], stage: Stage) -> Claim | str:
        if reply[0] != "ok":
            return reply[0]
        (
            _,
            rollout_id,
            attempt,
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
            tenant,
        ) = reply
        try:
            box = json.loads(sandbox) if sandbox else None
            return Claim(
                rollout_id=rollout_id,
                group_id=group,
                index=int(index),
                attempt=int(attempt),
                stage=stage,
                fence=int(fence),
                deadline_in_s=(int(deadline) - int(now)) / 1000,
                request=RolloutRequest.model_validate_json(request),
                sandbox=SandboxRecord.model_validate(box["record"]) if box else None,
                sandbox_socket=box["socket"] if box else None,
                node=node or None,
                tenant=tenant,
                error=ErrorInfo.model_validate_json(error) if error else None,
                finish_reason=finish_reason or None,
                metrics=json.loads(metrics) if metrics else {},
                stored_trajectory=payloads.get(self._redis, keys.trajectory(rollout_id))
                if stage is Stage.EVAL
                else None,
            )
        except (ValueError, KeyError, TypeError) as unreadable:
            self._end_unreadable(rollout_id, fence, stage, unreadable)
            return UNREADABLE

    def _end_unreadable(self, rollout_id: str, fence: str, stage: Stage, cause: Exception) -> None:
        """Fail a rollout that was claimed and that nobody can work on: given back it would come again."""
        self.skipped.tell(rollout_id, cause)
        error = ErrorInfo(
            blame=Blame.INFRASTRUCTURE,
            stage=stage,
            type="UnreadableRecord",
            message=f"the record in Redis cannot be read: {first_line(cause)}",
        )
        fields = {
            "error": error.model_dump_json(),
            "blame": error.blame.value,
            "drop": "1",
            "drop_reason": f"{error.blame.value}: {error.type}",
            "reward": "",
            "finish_reason": FinishReason.ERROR.value,
        }
        flat = [value for pair in fields.items() for value in pair]
        self._call(
            "finish", rollout_id, fence, stage.value, State.FAILED.value, 0, 0, self._retention, 0, "", *flat
        )

    def absent_on(self, rollout_id: str) -> set[str]:
        """The nodes that could not start a rollout's image when they tried."""
        names = self._redis.hkeys(keys.record(rollout_id))
        return {name.removeprefix(ABSENT) for name in names if name.startswith(ABSENT)}

    def heartbeat(self, held: Iterable[tuple[str, int]]) -> list[str]:
        """Extend leases. One word each: `ok`, `lost`, `cancel` or `overdue`."""
        pairs = [str(value) for pair in held for value in pair]
        if not pairs:
            return []
        return self._call(
            "heartbeat",
            int(self._settings.lease_s * 1000),
            int(self._settings.stop_patience_s * 1000),
            *pairs,
        )

    def note(self, rollout_id: str, fence: int, fields: dict[str, str] | None = None, text: str = "") -> bool:
        """Write facts of a running stage, and a line for its timeline. False: it is not ours any more."""
        flat = [value for pair in (fields or {}).items() for value in pair]
        return self._call("note", rollout_id, fence, text, *flat) == "ok"

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
            int(settings.handler_wait_s * 1000),
            outcome.stored_trajectory,
            *flat,
        )

    def cancel(self, rollout_id: str, tenant: str | None = None) -> tuple[str, str, str | None, int]:
        """Cancel a rollout: at once where nobody holds it, else by a flag and a message to its worker.

        Args:
            tenant: Whose it must be; another tenant's is `gone`. None = anybody's.

        Returns:
            `(word, state, node, attempt)`; the word is `gone`, `ended`, `cancelling` or `cancelled`.
        """
        return self.cancel_many([rollout_id], tenant)[0]

    def cancel_many(
        self, rollout_ids: Sequence[str], tenant: str | None = None
    ) -> list[tuple[str, str, str | None, int]]:
        """As `cancel`, for each: a few hundred in one round trip, between which others are served."""
        found: list[tuple[str, str, str | None, int]] = []
        for first in range(0, len(rollout_ids), CANCEL_AT_ONCE):
            ids = rollout_ids[first : first + CANCEL_AT_ONCE]
            with self._redis.pipeline(transaction=False) as pipe:
                for rollout_id in ids:
                    self._script(args=("cancel", self._retention, rollout_id, tenant or ""), client=pipe)
                replies = pipe.execute()
            pairs = zip(ids, replies, strict=True)
            if held := [rollout_id for rollout_id, (word, *_) in pairs if word == "cancelling"]:
                self._redis.publish(keys.CANCEL_CHANNEL, " ".join(held))
            found += [(word, state, node or None, int(attempt)) for word, state, node, attempt in replies]
        return found

    def overdue(self, limit: int = 200, latest: float | None = None) -> list[Overdue] | None:
        """Judge what is due; the state changes are made, the messages are the caller's to send.

        Args:
            latest: By Redis' clock, in seconds: if it is later, nothing is judged and the answer is None.
        """
        settings = self._settings
        rows = self._call(
            "overdue",
            limit,
            int(settings.requeue_s * 1000),
            int(max(MAX_REQUEUE_S, settings.requeue_s) * 1000),
            self._retention,
            "" if latest is None else int(latest * 1000),
        )
        if rows == ["jumped"]:
            return None
        return [
            Overdue(action, rollout_id, int(attempt), stage, node or None)
            for action, rollout_id, attempt, stage, node in rows
        ]

    def moved(self) -> int:
        """By how many ms all jumps of Redis' clock together have moved the times of rollouts."""
        return int(self._redis.hget(keys.JUMP, "total") or 0)

    def jumped(self, seconds: float, within_s: float, known_ms: int = 0) -> None:
        """Redis' clock has jumped: move the times of all rollouts that have not ended, unless that is done.

        Args:
            seconds: By so much.
            within_s: No longer ago; what was submitted since is right already.
            known_ms: What `moved` said before it jumped.
        """
        token, lease = secrets.token_hex(8), int(self._settings.lease_s * 1000)
        args = [int(seconds * 1000), token, lease, MOVED_AT_ONCE, int(within_s * 1000), known_ms]
        while self._jump(args=args):
            pass

    def vacate(self, nodes: Iterable[str], *, lost: bool) -> list[Overdue]:
        """Have the rollouts begin anew that wait for workers of these nodes, where none will come.

        Those that a worker holds are its own until their leases run out.

        Args:
            lost: The nodes did not end in order; each rollout uses up an attempt.

        Returns:
            What is to be done, as `overdue` has it.
        """
        settings = self._settings
        rows = self._call(
            "vacate",
            "lost" if lost else "",
            int(settings.requeue_s * 1000),
            self._retention,
            *nodes,
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
        names.append(keys.BATCHES)
        for tenant in self._redis.hkeys(keys.TENANTS_BYTES):
            self._call("forget", tenant)
        for pattern in (keys.by_tag("*", "*"), keys.by_tenant("*"), keys.batches_of("*")):
            names += list(self._redis.scan_iter(pattern, count=1000))
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.zremrangebyscore(name, "-inf", horizon)
            pipe.execute()
