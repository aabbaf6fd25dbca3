"""Rollouts that have ended, as a reader gets them."""

from __future__ import annotations

from typing import Any

from rollout.schema import Rollout, RolloutRequest, State


def ended(state: State = State.COMPLETED, **fields: Any) -> Rollout:
    """One of the handler `noop` with reward 1 (None where it is dropped); any field may be given."""
    values = {
        "id": "r",
        "group_id": "r",
        "index": 0,
        "handler": "noop",
        "attempt": 1,
        "request": RolloutRequest(handler="noop"),
        "reward": None if fields.get("drop") else 1.0,
        **dict.fromkeys(("created_at", "updated_at", "deadline_at"), 1.0),
    }
    return Rollout(**values | {"state": state} | fields)
