"""The contract of results: pages of rollouts, and what may be done with those that ended."""

from __future__ import annotations

from pydantic import BaseModel, Field

from rollout.schema.base import Items, RolloutId, Strict
from rollout.schema.rollouts import MAX_ROLLOUTS_PER_CALL, Rollout


class RolloutPage(BaseModel):
    rollouts: list[Rollout]
    cursor: str | None = None
    """Pass it to get the next page; None = there is none."""


class ResultPage(BaseModel):
    """Rollouts that ended, in the order in which they did."""

    rollouts: list[Rollout]
    cursor: str
    """Pass it to get what ended after these; the same cursor gives the same answer again."""
    expired: list[str] = Field(default_factory=list)
    """Ids among these whose records are past their retention, or cannot be read."""
    missed: bool = False
    """True: the cursor asked for is older than what is kept; some before these are past their retention."""


CompletionPage = ResultPage
"""Another name of `ResultPage`, as `/v1/completions` is of `/v1/results`."""


class AckRequest(Strict):
    """Results that have arrived for good."""

    ids: Items[RolloutId] = Field(min_length=1, max_length=MAX_ROLLOUTS_PER_CALL)


class RedeliverRequest(AckRequest):
    """Rollouts whose webhooks are wanted once more."""


class AckResponse(BaseModel):
    """How many of the ids were what."""

    acknowledged: int
    already_acknowledged: int
    not_ended: int
    """Refused: only what has ended can be acknowledged."""
    unknown: int


class CancelResponse(BaseModel):
    """How many rollouts were what."""

    cancelled: int
    already_ended: int
    unknown: int
    unknown_ids: list[str] = Field(default_factory=list)
    """Those of the `ids` of the request; older gateways do not name them."""
