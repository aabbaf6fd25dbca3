"""A rollout that viewers look at: what it is, what was sampled since they look, what its sandbox prints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rollout.arrays import unpack_ids
from rollout.schema import Rollout, State
from rollout.trajectory import Message, Segment
from services.state.turns.entries import (
    Answered,
    Appended,
    Begun,
    Entry,
    Sampled,
    from_json,
    sampled_segments,
)

MOST_TEXT = 64 << 10
"""Characters of one operation's output that are kept for those who come later."""

GIVEN = {"sampled": False, **dict.fromkeys(("logprobs", "policy_version", "call_id", "finish_reason"))}
"""What a segment says that was not sampled."""


def event(name: str, data: str) -> bytes:
    """A server-sent event; JSON has no line ends of its own."""
    return f"event: {name}\ndata: {data}\n\n".encode()


class Watched:
    """One rollout. What happens to it is made an event here, once for all who look."""

    def __init__(self, rollout: Rollout) -> None:
        self.length = -1 if rollout.state is State.RUNNING else 0
        """Entries of the turn log, or calls of the program's session, that were looked at; -1: none yet, and
        who looks reads for himself what there was."""
        self._screen: dict[str, Any] | None = None
        self.begin()
        self.read(rollout)

    def begin(self) -> None:
        """The turn log is read from its beginning."""
        self._chain, self._place, self._turns = -1, 0, 0
        self._counts = True
        """Whether the chain is one of the trajectory, so that the next has another number."""

    def read(self, rollout: Rollout) -> None:
        """It is so now."""
        self.rollout = rollout
        self.summary = event("rollout", rollout.model_dump_json())

    @property
    def refetch(self) -> bytes:
        """What a viewer has of the turns is worth nothing, or a program's tree has grown."""
        return event("turns", json.dumps({"attempt": self.rollout.attempt, "refetch": True}))

    def turns(self, entries: Iterable[Entry]) -> bytes:
        """Further entries of the turn log. What tools say is shown at once, before a model call reads it."""
        pieces, calls = [], []
        for entry in entries:
            if isinstance(entry, Sampled | Answered) and entry.call:
                calls.append(json.dumps(entry.call))
            if isinstance(entry, Begun):
                first = self._chain < 0
                self._chain, self._place, self._counts = self._chain + self._counts, 0, first
            self._counts |= isinstance(entry, Sampled)
            self._turns += isinstance(entry, Sampled)
            shared = (origin := self.rollout.request.origin) and self._turns <= origin.turn
            for segment in _segments(entry):
                if shared:  # it was sampled in the rollout that this one left
                    segment = segment.model_copy(update=GIVEN)
                said = segment.model_dump_json(exclude={"routed_experts"})
                pieces.append(f'{{"chain":{self._chain},"place":{self._place},"segment":{said}}}')
                self._place += 1
        said = f'"pieces":[{",".join(pieces)}],"calls":[{",".join(calls)}]'
        return event("turns", f'{{"attempt":{self.rollout.attempt},{said}}}')

    def printed(self, piece: dict[str, Any]) -> bytes:
        """The sandbox has printed something, or what printed has ended."""
        before = self._screen or {"operation": 0}
        same = piece["operation"] == before["operation"]
        piece["skipped"] = max(0, piece["offset"] - (before["end"] if same else 0))
        self._screen = piece
        if same and before["end"] == piece["offset"] and len(before["text"] + piece["text"]) <= MOST_TEXT:
            self._screen = piece | {"offset": before["offset"], "text": before["text"] + piece["text"]}
        return event("output", json.dumps(piece))

    @property
    def screen(self) -> bytes | None:
        """What its latest operation has printed, for who has seen nothing."""
        return self._screen and event(
            "output", json.dumps(self._screen | {"skipped": self._screen["offset"]})
        )


def _segments(entry: Entry) -> list[Segment]:
    if isinstance(entry, Sampled):
        return sampled_segments(entry.completion, Message.model_validate_json(entry.message))
    if isinstance(entry, Begun | Appended) and entry.ids:
        messages = from_json(entry.messages)
        return [Segment(role=messages[-1].role, token_ids=unpack_ids(entry.ids), messages=messages)]
    return []
