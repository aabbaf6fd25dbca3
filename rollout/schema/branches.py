"""Where a fork left another rollout, and what it shares with it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from rollout.schema.base import RolloutId, Strict

Checkpointing = Literal["never", "on_tools", "every_turn"]
"""After which turns what forks need is kept: none, those with a tool call, or all."""


class Origin(Strict):
    """Where a fork left another rollout."""

    rollout: RolloutId
    turn: int = Field(ge=1, le=1000)
    """So many model calls are shared, with what tools answered to them."""


class Branch(BaseModel):
    """What a fork shares with the rollout that it left: sampled and trained there, given here."""

    rollout: str
    turn: int
    """So many model calls are shared."""
    tokens: int
    """Ids of the shared beginning, over the agent's chains: the prompt, turns and what tools answered."""
    sampled_tokens: int
    """Those of them that were sampled there."""
    policy_versions: list[str] = Field(default_factory=list)
    """Versions that sampled them, in order of first use."""
