"""Plays solutions of handlers, as `rollout tasks check` does."""

from __future__ import annotations

import asyncio
from typing import Any

from rollout.schema import Rollout, RolloutRequest
from services.settings import settings
from workers.handlers.base import AgentHandler
from workers.task_checks.play import play_oracle


def solved(handler: AgentHandler[Any], task: dict[str, Any]) -> Rollout:
    """The rollout in which the package's own solution was played."""
    played = asyncio.run(play_oracle(handler, RolloutRequest(handler=handler.name, task=task), settings()))
    assert played.no_oracle is None, played.no_oracle
    return played.rollout
