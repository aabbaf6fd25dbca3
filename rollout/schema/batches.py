"""The wire contract of batches: groups of rollouts with dynamic sampling."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from rollout.schema.base import MAX_INT53, Identifier, Items, Strict
from rollout.schema.forks import AnyRequest, ForkRequest
from rollout.schema.rollouts import MAX_ROLLOUTS_PER_CALL, Rollout

MAX_PROMPTS_PER_CALL = 1000
"""Prompts that one call may bring; further calls extend the batch."""
MAX_BATCH_ID = 100
"""Characters of an id that a caller chooses: those of its groups are made from it, and must be ids, too."""


class BatchState(StrEnum):
    """Where a batch is."""

    RUNNING = "running"
    DONE = "done"
    """As many informative groups as wanted are there."""
    EXHAUSTED = "exhausted"
    """No prompt is left, and fewer groups than wanted were kept."""
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self is not BatchState.RUNNING


class Verdict(StrEnum):
    """What became of a group."""

    KEPT = "kept"
    FILTERED = "filtered"
    """A filter has refused it; `reason` is the filter's."""
    FAILED = "failed"
    """Too few of its rollouts were scored."""
    CANCELLED = "cancelled"


class FilterSpec(Strict):
    """A filter and its options; docs/batches.md lists those that come along."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    options: dict[str, Any] = Field(default_factory=dict, max_length=100)


def _require_unnamed(prompts: list[Any], kind: type = Strict) -> None:
    for position, prompt in enumerate(prompts):
        for name, value in (("id", None), ("group_id", None), ("n", 1)):
            if isinstance(prompt, kind) and getattr(prompt, name) != value:
                where = "from.n" if isinstance(prompt, ForkRequest) and name == "n" else name
                raise ValueError(f"prompts.{position}.{where}: the batch gives its own; leave it out")


class BatchRequest(Strict):
    """Groups wanted, the prompts they may come from, and what makes a group worth keeping."""

    id: Annotated[Identifier, Field(max_length=MAX_BATCH_ID)] | None = None
    """Chosen by the caller, it makes the call idempotent."""
    prompts: Items[AnyRequest] = Field(default_factory=list)
    """One group each, in this order: of a task, or from a turn of another rollout. Their `n`, `id` and
    `group_id` are the batch's to give. A call takes 1,000 of them; the client makes several calls of more."""
    n: int = Field(default=8, ge=1, le=MAX_ROLLOUTS_PER_CALL)
    """Rollouts of a group."""
    groups: int = Field(ge=1, le=100_000)
    """Groups to keep."""
    filters: Annotated[Items[FilterSpec], Field(max_length=32)] | None = None
    """None = `uniform_reward` where `n` > 1, else none; [] = none."""
    min_scored: int | None = Field(default=None, ge=1, le=MAX_INT53)
    """Rollouts of a group that must have a reward; None = all for `n` <= 2, else half."""
    oversample: float = Field(default=1.5, ge=1.0, le=16.0)
    """Groups under way at once, as a multiple of those that are still missing."""
    max_in_flight: int | None = Field(default=None, ge=1, le=100_000)
    """Rollouts under way at once; None = `n` x `groups` x `oversample`."""
    max_staleness: int | None = Field(default=None, ge=0, le=MAX_INT53)
    """Weight updates that a group's oldest tokens may be behind when it is decided; None = any number."""
    closed: bool = True
    """False: further prompts may come with `POST /v1/batches/ID/prompts`."""
    carry: Literal["groups", "none"] = "groups"
    """What becomes of groups under way when the batch is done: they go on, for the next batch to take over,
    or are cancelled at once."""
    carry_from: Identifier | None = None
    """A batch that has ended: this one takes over its groups under way, finished siblings included, and its
    unused prompts."""
    max_carried: int | None = Field(default=None, ge=0, le=MAX_INT53)
    """Most groups to take over, those with most of their rollouts ended first; None = all."""

    @model_validator(mode="after")
    def _fits(self) -> BatchRequest:
        if self.min_scored is not None and self.min_scored > self.n:
            raise ValueError(f"min_scored = {self.min_scored} is above n = {self.n}")
        _require_unnamed(self.prompts)
        if self.closed and not self.prompts and self.carry_from is None:
            raise ValueError("prompts: a closed batch needs some, or carry_from")
        return self

    @property
    def scored_needed(self) -> int:
        """`min_scored` with its default."""
        if self.min_scored is not None:
            return self.min_scored
        return self.n if self.n <= 2 else max(2, (self.n + 1) // 2)

    @property
    def open_limit(self) -> int:
        """Groups that may be under way at the start."""
        return max(1, round(self.groups * self.oversample))

    @property
    def slots(self) -> int:
        """`max_in_flight` with its default."""
        return self.max_in_flight or self.n * self.open_limit


class PromptsRequest(Strict):
    """More prompts for a batch."""

    id: Identifier | None = None
    """Chosen by the caller, it makes the call idempotent: the same one again adds nothing."""
    prompts: Items[AnyRequest] = Field(default_factory=list)
    closed: bool | None = None
    """True: these are the last."""

    @model_validator(mode="after")
    def _fits(self) -> PromptsRequest:
        _require_unnamed(self.prompts, ForkRequest)  # of others it never heeded them
        return self


class PromptsResponse(BaseModel):
    waiting: int
    """Prompts that have not been started."""


class Batch(BaseModel):
    """A batch as the API shows it. Groups: `started + carried_in = kept + filtered + failed + cancelled +
    carried_out + open`."""

    id: str
    tenant: str = "default"
    state: BatchState
    paused: bool = False
    wanted: int
    """Groups to keep."""
    n: int
    started: int = 0
    """Groups of its own prompts."""
    carried_in: int = 0
    """Groups taken over from another batch."""
    kept: int = 0
    filtered: int = 0
    failed: int = 0
    cancelled: int = 0
    carried_out: int = 0
    """Groups that another batch took over."""
    open: int = 0
    """Groups under way or not decided yet."""
    in_flight: int = 0
    """Rollouts that have not ended."""
    waiting_prompts: int = 0
    reasons: dict[str, int] = Field(default_factory=dict)
    """Why groups were not kept."""
    rollouts_scored: int = 0
    """Of decided groups."""
    rollouts_dropped: int = 0
    """Of decided groups: without a reward."""
    closed: bool = True
    created_at: float
    finished_at: float | None = None


class BatchList(BaseModel):
    batches: list[Batch]


class Group(BaseModel):
    """A decided group."""

    id: str
    batch: str
    verdict: Verdict
    reason: str | None = None
    """Why it was not kept."""
    carried: bool = False
    """It was begun in an earlier batch."""
    rollouts: list[Rollout] = Field(default_factory=list)
    """In the order of their indices; empty where only verdicts were asked for."""


class GroupPage(BaseModel):
    """Groups in the order in which they were decided."""

    groups: list[Group]
    cursor: str
    """Pass it to get those decided after these; the same cursor gives the same answer again."""
    ahead: list[str] = Field(default_factory=list)
    """Where further pages of this size begin after the next one, as far as there is something in them: so
    several can be fetched at once."""
    batch: Batch
    last: bool = False
    """True: the batch has ended, and no group comes after these."""
