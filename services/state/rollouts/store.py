"""The only way in which rollout records change their state."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import redis

from rollout.schema import TERMINAL_STATES, Blame, ErrorInfo, RolloutRequest, SandboxRecord, Stage, State
from rollout.trajectory import FinishReason, Trajectory
from services.settings import Settings
from services.state import keys
from services.state.memory import Room
from services.state.observations import BUCKETS_MS
from services.state.redis import now
from services.state.requests import first_line
from services.state.rollouts import payloads
from services.state.rollouts.reading import RolloutReader
from services.state.scripts import Call, Operations, request, send_many
from services.state.tenants import DEFAULT_TENANT, QuotaExceeded, Tenant
from services.state.together import Together
from services.state.turns import store as turns
from services.version import STAMP

_ENDS = {State.FAILED, State.CANCELLED, State.TIMED_OUT}
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.INITIALIZING} | _ENDS),
    State.INITIALIZING: frozenset({State.READY, State.QUEUED} | _ENDS),
    State.READY: frozenset({State.RUNNING, State.QUEUED} | _ENDS),
    # RUNNING and EVALUATING to themselves: claimed by a worker, or taken from a dead one.
    State.RUNNING: frozenset({State.RUNNING, State.EVALUATING, State.QUEUED} | _ENDS),
    State.EVALUATING: frozenset({State.EVALUATING, State.COMPLETED, State.QUEUED} | _ENDS),
    **dict.fromkeys(TERMINAL_STATES, frozenset()),
}
"""From each state, the states that may follow. Back to QUEUED is a new attempt from INIT."""

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
    resumed: int = 0
    """How often a worker has gone on with what another one had begun."""
    turns: Sequence[bytes] = ()
    """For RUN that is gone on with: its turn log."""
    handed: bool = False
    """Whether the former worker of RUN handed it over, and was not lost."""
    left_on: str | None = None
    """Node on which a lost INIT of this attempt may have left a sandbox."""
    files: dict[str, Any] | None = None
    """Of its sandbox, which has left its node: path, node, bytes, image. What comes next begins with them."""
    moves: Sequence[str] = ()
    """What its trajectory says of such moves in this attempt."""

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
    """A state, `again` (another attempt from INIT while one is left), `handback`, `passed on` (another worker
    goes on with RUN), or `elsewhere` (this worker or its node cannot do it, another one may; in the end it
    fails with `fields`)."""
    fields: dict[str, str] = field(default_factory=dict)
    trajectory: Trajectory | None = None
    delay_s: float | None = None
    """Seconds before the reaper looks at the rollout; None = the requeue time."""

    @cached_property
    def stored_trajectory(self) -> bytes | None:
        """The trajectory as it is stored: encoded once, however often it is sent to a Redis that is full."""
        return payloads.encode_trajectory(self.trajectory) if self.trajectory else None


@dataclass(frozen=True)
class Overdue:
    """One thing the reaper has to do."""

    action: str
    """`send` a message again, `restart` from INIT, `resume` the stage, or clean up after one that `ended`."""
    rollout_id: str
    attempt: int
    stage: str
    node: str | None = None


def error_fields(error: ErrorInfo, reason: FinishReason = FinishReason.ERROR) -> dict[str, str]:
    """Fields of the record that say what went wrong, and that the sample is not to be trained on."""
    return {
        "error": error.model_dump_json(),
        "blame": error.blame.value,
        "drop": "1",
        "drop_reason": f"{error.blame.value}: {error.type}",
        "reward": "",
        "finish_reason": reason.value,
    }


class RolloutStore(RolloutReader):
    """Records in Redis. Every change goes through `rollouts.lua`."""

    def __init__(self, client: redis.Redis, settings: Settings, together: Together | None = None) -> None:
        """`together`: for what many threads do at the same time; None = each for itself."""
        super().__init__(client)
        self._settings = settings
        self.command = together.send if together else client.execute_command
        self._lease_ms = int(settings.lease_s * 1000)
        self._do = Operations(
            client,
            "rollouts/rollouts",
            together,
            ALLOWED={state.value: {to.value: True for to in TRANSITIONS[state]} for state in TRANSITIONS},
            BUCKETS_MS=BUCKETS_MS,
            ABSENT_MS=int(ABSENT_S * 1000),
            LEASE_MS=self._lease_ms,
            PATIENCE_MS=int(settings.stop_patience_s * 1000),
            REQUEUE_MS=int(settings.requeue_s * 1000),
            LONGEST_REQUEUE_MS=int(max(MAX_REQUEUE_S, settings.requeue_s) * 1000),
            ELSEWHERE_MS=int(settings.handler_wait_s * 1000),
            RETENTION_MS=int(settings.retention_s * 1000),
            STAMP=STAMP,
        )
        self._jump = Operations(client, "rollouts/jump")
        self._room = Room(client)

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
        tenant = tenant or Tenant(name=DEFAULT_TENANT)
        first_of = {new.digest: new for new in reversed(rollouts)}
        self._room.require(sum(len(new.request_json) for new in first_of.values()))
        numbers = {digest: number for number, digest in enumerate(first_of, 1)}
        answer = self._do(
            "submit",
            *(new.request_json.encode(errors="replace") for new in first_of.values()),
            tenant=tenant.name,
            most_live=tenant.quota_live,
            per_minute=tenant.per_minute,
            most_bytes=tenant.quota_bytes,
            requests=[
                {
                    "digest": digest,
                    "handler": new.request.handler,
                    "tags": new.request.tags,
                    "deadline": int(new.request.limits.deadline_s * 1000),
                    "lift": int(new.request.priority * self._settings.priority_step_s * 1000),
                    "most_attempts": new.request.limits.max_attempts,
                }
                for digest, new in first_of.items()
            ],
            rollouts=[
                {
                    "id": new.id,
                    "group": new.group_id,
                    "index": new.index,
                    "request": numbers[new.digest],
                    **({"batch_group": new.batch_group} if new.batch_group else {}),
                }
                for new in rollouts
            ],
        )
        if "over" in answer:
            raise QuotaExceeded(tenant.name, **answer["over"])
        return list(answer["words"])

    def claim(
        self, rollout_id: str, attempt: int, stage: Stage, owner: str, token: str | None = None
    ) -> Claim | str:
        """Take a stage, or learn why not: `gone`, `ended`, `stale`, `overdue`, `unreadable` or `crowded`
        (it is one that may end its worker, and the owner carries another such).

        Args:
            token: The same one again gives the same answer again; None makes one for this call, which
                the connection's own retries then repeat.
        """
        token = token or secrets.token_hex(8)
        answer = self._do(
            "claim", id=rollout_id, attempt=attempt, stage=stage.value, owner=owner, token=token
        )
        return self._claimed(answer, stage)

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

        The order is that of `fair.lua`: weighted between tenants; within one by priority and age.

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
        while True:
            answer = self._do(
                "claim_next",
                owner=owner,
                token=token or secrets.token_hex(8),
                node=node,
                most_on_node=most_on_node,
                most_without_sandbox=most_without_sandbox,
            )
            claim = self._claimed(answer, Stage.INIT)
            if claim != UNREADABLE:
                return claim
            token = None  # that one has ended; somebody else may wait

    def _claimed(self, answer: dict[str, Any], stage: Stage) -> Claim | str:
        if answer["word"] != "ok":
            return answer["word"]
        rollout_id = answer["id"]
        try:
            box = json.loads(answer.get("sandbox") or "null")
            error = answer.get("error")
            attempt, resumed = int(answer["attempt"]), int(answer.get("resumed") or 0)
            stored = payloads.get(self._redis, keys.trajectory(rollout_id)) if stage is Stage.EVAL else None
            request = RolloutRequest.model_validate_json(answer["request"])
            goes_on = stage is Stage.RUN and (resumed or request.origin)
            return Claim(
                rollout_id=rollout_id,
                group_id=answer["group"],
                index=int(answer["index"]),
                attempt=attempt,
                stage=stage,
                fence=int(answer["fence"]),
                deadline_in_s=(int(answer["deadline"]) - answer["now"]) / 1000,
                request=request,
                sandbox=SandboxRecord.model_validate(box["record"]) if box else None,
                sandbox_socket=box["socket"] if box else None,
                node=answer.get("node") or None,
                tenant=answer["tenant"],
                error=ErrorInfo.model_validate_json(error) if error else None,
                finish_reason=answer.get("finish_reason") or None,
                metrics=json.loads(answer.get("metrics") or "{}"),
                stored_trajectory=stored,
                resumed=resumed,
                turns=turns.read(self._redis, rollout_id, attempt) if goes_on else (),
                handed=answer.get("handed") == "1",
                left_on=answer.get("left_on"),
                files=json.loads(answer.get("files") or "null"),
                moves=json.loads(answer.get("moves") or "[]"),
            )
        except (ValueError, KeyError, TypeError) as unreadable:
            self._end_unreadable(rollout_id, int(answer["fence"]), stage, unreadable)
            return UNREADABLE

    def _end_unreadable(self, rollout_id: str, fence: int, stage: Stage, cause: Exception) -> None:
        """Fail a rollout that was claimed and that nobody can work on: given back it would come again."""
        self.skipped.tell(rollout_id, cause)
        error = ErrorInfo(
            blame=Blame.INFRASTRUCTURE,
            stage=stage,
            type="UnreadableRecord",
            message=f"the record in Redis cannot be read: {first_line(cause)}",
        )
        self._end("finish", rollout_id, fence, stage, Finish(State.FAILED, error_fields(error)))

    def absent_on(self, rollout_id: str) -> set[str]:
        """The nodes that could not start a rollout's image when they tried."""
        names = self._redis.hkeys(keys.record(rollout_id))
        return {name.removeprefix(ABSENT) for name in names if name.startswith(ABSENT)}

    def heartbeat(self, held: Iterable[tuple[str, int]]) -> list[str]:
        """Extend leases. One word each: `ok`, `lost`, `cancel` or `overdue`."""
        pairs = list(held)
        return self._do("heartbeat", held=pairs) if pairs else []

    def note(self, rollout_id: str, fence: int, fields: dict[str, str] | None = None, text: str = "") -> bool:
        """Write facts of a running stage, and a line for its timeline. False: it is not ours any more."""
        return self._do("note", id=rollout_id, fence=fence, fields=fields or {}, text=text)

    def decide(self, claim: Claim, outcome: Finish) -> bool:
        """Note how a stage will end, before its sandbox is released: should its worker be lost meanwhile, the
        reaper has it end so. False: the rollout is not the claim's any more.
        """
        return self._end("decide", claim.rollout_id, claim.fence, claim.stage, outcome)

    def finish(self, claim: Claim, outcome: Finish) -> str:
        """End a stage. Idempotent under one fence.

        Returns:
            The state that the rollout entered, or `lost` when the fence is not ours any more.
        """
        return self._end("finish", claim.rollout_id, claim.fence, claim.stage, outcome)

    def go_on(self, claim: Claim, outcome: Finish, message: bytes, **ask: Any) -> Call:
        """End INIT of a rollout that is ready, send its message to `next_queue`, and `claim_next` with a
        message of `queue`: all at once. `went_on` reads the answer.
        """
        ask |= self._ending(claim.rollout_id, claim.fence, claim.stage, outcome)
        return self._do, request("go_on", message, **ask)

    def went_on(self, answer: dict[str, Any]) -> Claim | str:
        """The next claim or why there is none; where the rollout is not ready, its state or `lost`."""
        return self._claimed(answer, Stage.INIT)

    def _end(self, operation: str, rollout_id: str, fence: int, stage: Stage, outcome: Finish) -> Any:
        stored = outcome.stored_trajectory
        ask = self._ending(rollout_id, fence, stage, outcome)
        return self._do(operation, *([] if stored is None else [stored]), **ask)

    def _ending(self, rollout_id: str, fence: int, stage: Stage, outcome: Finish) -> dict[str, Any]:
        delay = self._settings.requeue_s if outcome.delay_s is None else outcome.delay_s
        absent = [
            {"node": name.removeprefix(ABSENT), "why": why}
            for name, why in outcome.fields.items()
            if name.startswith(ABSENT)
        ]
        return {
            "id": rollout_id,
            "fence": fence,
            "stage": stage.value,
            "next": outcome.next,
            "delay": int(delay * 1000),
            "fields": {name: text for name, text in outcome.fields.items() if not name.startswith(ABSENT)},
            "absent": absent[0] if absent else None,
        }

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
        ends: list[tuple[str, str, str | None, int]] = []
        for first in range(0, len(rollout_ids), CANCEL_AT_ONCE):
            ids = rollout_ids[first : first + CANCEL_AT_ONCE]
            calls = [(self._do, request("cancel", id=rollout_id, tenant=tenant)) for rollout_id in ids]
            answers = send_many(self._redis, calls)
            if errors := [answer for answer in answers if isinstance(answer, Exception)]:
                raise errors[0]
            pairs = zip(ids, answers, strict=True)
            if held := [rollout_id for rollout_id, answer in pairs if answer["word"] == "cancelling"]:
                self._redis.publish(keys.CANCEL_CHANNEL, " ".join(held))
            ends += [
                (answer["word"], answer["state"], answer.get("node"), answer["attempt"]) for answer in answers
            ]
        return ends

    def overdue(self, limit: int = 200, latest: float | None = None) -> list[Overdue] | None:
        """Judge what is due; the state changes are made, the messages are the caller's to send.

        Args:
            latest: By Redis' clock, in seconds: if it is later, nothing is judged and the answer is None.
        """
        answer = self._do("overdue", limit=limit, latest=None if latest is None else int(latest * 1000))
        return None if "jumped" in answer else [Overdue(**thing) for thing in answer["todo"]]

    def vacate(self, nodes: Iterable[str], *, lost: bool) -> list[Overdue]:
        """Have the rollouts begin anew that wait for workers of these nodes, where none will come.

        Those that a worker holds are its own until their leases run out.

        Args:
            lost: The nodes did not end in order; each rollout uses up an attempt.

        Returns:
            What is to be done, as `overdue` has it.
        """
        return [Overdue(**thing) for thing in self._do("vacate", nodes=list(nodes), lost=lost)["todo"]]

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
        jump = {
            "ms": int(seconds * 1000),
            "token": secrets.token_hex(8),
            "longest_lease": self._lease_ms,
            "limit": MOVED_AT_ONCE,
            "within": int(within_s * 1000),
            "known": known_ms,
        }
        while self._jump("move", **jump):
            pass

    def trim(self) -> None:
        """Drop index entries of records that have expired."""
        # A record may have lived for its whole deadline (a week at most) before retention began.
        horizon = 1000 * (now(self._redis) - self._settings.retention_s - 8 * 86400)
        names = [keys.CREATED, keys.BATCHES, *(keys.by_state(state) for state in TERMINAL_STATES)]
        for tenant in self._redis.hkeys(keys.TENANTS_BYTES):
            self._do("forget", tenant=tenant)
        for pattern in (keys.by_tag("*", "*"), keys.by_tenant("*"), keys.batches_of("*")):
            names += list(self._redis.scan_iter(pattern, count=1000))
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.zremrangebyscore(name, "-inf", horizon)
            pipe.execute()
