"""The contract of reports: what a trainer says of its steps, as numbers by name."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from rollout.schema.base import MAX_INT53, Identifier, Strict

MAX_METRICS = 64
RunName = Annotated[Identifier, Field(max_length=64)]
MetricName = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,64}$")]


class ReportRequest(Strict):
    """What a step of a training run came to. The same step again takes the place of what was said before."""

    run: RunName = "default"
    step: int = Field(ge=0, le=MAX_INT53)
    metrics: dict[MetricName, float] = Field(min_length=1, max_length=MAX_METRICS)
    """By name: `reward`, `logprob_gap`, `staleness`, …; what is no finite number is refused."""
    policy_version: Annotated[str, Field(max_length=128)] | None = None
    """The weights after the step."""


class Report(BaseModel):
    """A step as it was reported."""

    step: int
    at: float
    """Seconds since the epoch."""
    metrics: dict[str, float]
    policy_version: str | None = None
