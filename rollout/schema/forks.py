"""The contract of branches: what is kept of a rollout's turns, and rollouts that begin at one of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout.schema.base import Identifier, Items, Strict, Tag
from rollout.schema.branches import Checkpointing, Origin
from rollout.schema.rollouts import MAX_ROLLOUTS_PER_CALL, Limits, SamplingParams, Webhook


class ForkPoint(Origin):
    """The turn of a rollout from which others go on, and how many."""

    n: int = Field(default=1, ge=1, le=MAX_ROLLOUTS_PER_CALL)


class ForkRequest(Strict):
    """Rollouts that share another one's turns up to one, and go on from there each for itself.

    Handler, task, policy and agent are the other one's. So is what is left out here, but for tags, metadata
    and the group: the n rollouts are one of their own.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, populate_by_name=True)

    from_: ForkPoint = Field(alias="from")
    id: Identifier | None = None
    """As of a request: chosen by the caller, it makes the call idempotent."""
    group_id: Identifier | None = None
    priority: int | None = Field(default=None, ge=0, le=9)
    sampling: SamplingParams | None = None
    """A seed must be another one than the other rollout's to sample something else."""
    limits: Limits | None = None
    """Of the whole rollout: the shared turns and their tokens count, their time does not."""
    checkpoints: Checkpointing | None = None
    policy_version: Annotated[str, Field(max_length=128)] | None = None
    """Only backends with this version serve the rollouts; None = any, whatever the other one asked for."""
    tags: Items[Tag] = Field(default_factory=list, max_length=16)
    metadata: dict[str, Any] = Field(default_factory=dict, max_length=1000)
    webhook: Webhook | None = None


class Checkpoint(BaseModel):
    """A turn from which forks can go on."""

    turn: int
    """So many model calls, and what tools answered to them, are shared."""
    at: float
    """When it was taken, seconds since the epoch."""
    way: Literal["none", "same", "copy", "reflink"] = "none"
    """How the sandbox's files were kept: there are none, they are those of the checkpoint before, or were
    copied, without or with the file system's help."""
    node: str | None = None
    """That keeps the files; None = there are none."""
    bytes: int = 0
    """Of the files."""
    files: int = 0
    error: str | None = None
    """Why the files were not kept: nothing can go on from here."""


class CheckpointList(BaseModel):
    checkpoints: list[Checkpoint]
    """By turn."""
