"""When the calls of an attempt were, for `Trajectory.calls`; the turn log keeps it for who goes on."""

from __future__ import annotations

import time
from typing import Any

from rollout.schema.agents import CallRecord
from rollout.trajectory import ToolCall
from services.engines.base import Completion
from services.state.turns.entries import Entry


class Calls:
    """Calls of the model and of tools, one after the other."""

    def __init__(self) -> None:
        self.records: list[CallRecord] = []
        self.begin()

    def begin(self) -> None:
        """A call begins now."""
        self._began = time.time(), time.monotonic()

    def repeat(self, entry: Entry) -> None:
        """Take over what a former worker has kept with an entry of the log."""
        if kept := getattr(entry, "call", None):
            self.records.append(CallRecord(**kept))

    def model(self, completion: Completion, backend: str, prompt_tokens: int) -> dict[str, Any]:
        """The model has answered; what is kept of it."""
        more = {"prompt_tokens": prompt_tokens, "cached_tokens": completion.cached_tokens}
        return self._ended(kind="model", id=completion.call_id, backend=backend, **more)

    def tool(self, call: object) -> dict[str, Any] | None:
        """A tool has answered; what is kept of it. None: it was no call of one."""
        return self._ended(kind="tool", id=call.id, name=call.name) if isinstance(call, ToolCall) else None

    def _ended(self, **fields: Any) -> dict[str, Any]:
        at, began = self._began
        record = CallRecord(at=round(at, 3), seconds=round(time.monotonic() - began, 4), **fields)
        self.records.append(record)
        return record.model_dump(exclude_defaults=True)
