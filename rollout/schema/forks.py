"""The contract of branches: what is kept of a rollout's turns, and rollouts that begin at one of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)

from rollout.schema.base import Identifier, Items, Strict, Tag
from rollout.schema.branches import Checkpointing, Origin
from rollout.schema.rollouts import MAX_ROLLOUTS_PER_CALL, Limits, RolloutRequest, SamplingParams, Webhook


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
    """What is left out of it is the other one's. Seeds of turns are made of the group's id as well, so forks
    with one seed sample each something else."""
    limits: Limits | None = None
    """Of the whole rollout: the shared turns and their tokens count, their time does not. What is left out of
    them is the other one's."""
    checkpoints: Checkpointing | None = None
    policy_version: Annotated[str, Field(max_length=128)] | None = None
    """Only backends with this version serve the rollouts; None = any, whatever the other one asked for."""
    tags: Items[Tag] = Field(default_factory=list, max_length=16)
    metadata: dict[str, Any] = Field(default_factory=dict, max_length=1000)
    webhook: Webhook | None = None

    @model_serializer(mode="wrap")
    def _as_sent(self, dump):
        """`from` has no place in Python as a name; of limits what was given is sent, though it is usual."""
        fields = dump(self)
        if "from_" in fields:
            fields["from"] = fields.pop("from_")
        for name in ("sampling", "limits"):
            if (given := getattr(self, name)) is not None:
                fields[name] = given.model_dump(exclude_unset=True)
        return fields

    @property
    def n(self) -> int:
        """Rollouts that it asks for."""
        return self.from_.n

    def rollout_ids(self) -> tuple[str, list[str]]:
        """The group id and the ids of the `n` rollouts."""
        return RolloutRequest(handler="-", n=self.n, id=self.id, group_id=self.group_id).rollout_ids()

    def applied(self, request: RolloutRequest) -> RolloutRequest:
        """What it asks for, where the other rollout was asked for so. Applied to that it changes nothing."""
        changes = dict(self)
        point = changes.pop("from_")
        for name in ("priority", "checkpoints", "webhook", "sampling", "limits"):
            if changes[name] is None:
                del changes[name]
        for name in changes.keys() & {"sampling", "limits"}:
            parts = {part: getattr(changes[name], part) for part in changes[name].model_fields_set}
            changes[name] = getattr(request, name).model_copy(update=parts)
        origin = Origin(rollout=point.rollout, turn=point.turn)
        return request.model_copy(update=changes | {"n": point.n, "origin": origin})


def _one_of_both(value: Any, _: ValidatorFunctionWrapHandler) -> RolloutRequest | ForkRequest:
    """The one that is meant: what is wrong is told of that alone."""
    if isinstance(value, RolloutRequest | ForkRequest):
        return value
    forks = isinstance(value, dict) and "from" in value
    return (ForkRequest if forks else RolloutRequest).model_validate(value)


AnyRequest = Annotated[RolloutRequest | ForkRequest, WrapValidator(_one_of_both)]
"""A request, or a fork, which has `from`."""


class SubmitRequest(Strict):
    """Many requests in one call: all are accepted, or none."""

    requests: Items[AnyRequest] = Field(min_length=1, max_length=MAX_ROLLOUTS_PER_CALL)

    @model_validator(mode="after")
    def _bounded(self) -> SubmitRequest:
        total = sum(request.n for request in self.requests)
        if total > MAX_ROLLOUTS_PER_CALL:
            raise ValueError(
                f"{total} rollouts in one call; at most {MAX_ROLLOUTS_PER_CALL}: send several calls"
            )
        return self


class Checkpoint(BaseModel):
    """A turn from which forks can go on."""

    turn: int
    """So many model calls, and what tools answered to them, are shared."""
    at: float
    """When it was taken, seconds since the epoch."""
    way: Literal["none", "same", "copy", "reflink"] = "none"
    """How the sandbox's files were kept: there are none, they are those of the checkpoint before, or they
    were copied, without or with the file system's help."""
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
