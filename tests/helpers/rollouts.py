"""Rollouts and trajectories as tests need them, without a service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.schema import Chain, Rollout, RolloutRequest, Segment, State


def sampled(ids: Sequence[int], logprobs: Sequence[float] | None = None, **fields: Any) -> Segment:
    """A segment that the engine sampled; without `logprobs` each is -1."""
    values = [-1.0] * len(ids) if logprobs is None else list(logprobs)
    return Segment(role="assistant", token_ids=list(ids), sampled=True, logprobs=values, **fields)


def chain(prompt: Sequence[int], *following: Segment | Sequence[int]) -> Chain:
    """A prompt and what follows it; ids alone are what a tool has said."""
    result = Chain()
    result.append(Segment(role="user", token_ids=list(prompt)))
    for part in following:
        result.append(part if isinstance(part, Segment) else Segment(role="tool", token_ids=list(part)))
    return result


def ended(**fields: Any) -> Rollout:
    """A rollout that was completed, with these fields."""
    defaults = {
        "id": "r",
        "group_id": "g",
        "index": 0,
        "handler": "h",
        "state": State.COMPLETED,
        "attempt": 1,
        "request": RolloutRequest(handler="h"),
        **dict.fromkeys(("created_at", "updated_at", "deadline_at"), 1.0),
    }
    return Rollout(**(defaults | fields))
