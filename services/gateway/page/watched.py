"""A rollout that viewers look at: what was sampled and said since they look, and what its sandbox prints.

Events are made once, as bytes, and each viewer is somewhere in them: whoever is slow gets what is newest.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from typing import Any

from rollout.arrays import unpack_ids
from rollout.schema import Rollout, State
from rollout.trajectory import Message, Segment
from services.state import keys
from services.state.turns.entries import (
    Answered,
    Appended,
    Begun,
    Entry,
    Sampled,
    from_json,
    sampled_segments,
)

MOST_PIECES = 64
"""Segments and times of calls that are kept for those who have not got them; who is further behind reads the
trajectory."""
MOST_TEXT = 64 << 10
"""Characters of one operation's output that are kept for those who come later."""


def event(name: str, data: str) -> bytes:
    """A server-sent event; JSON has no line ends of its own."""
    return f"event: {name}\ndata: {data}\n\n".encode()


class Turns:
    """The segments of an attempt's turn log, and when its calls were."""

    def __init__(self) -> None:
        self.count = 0
        """Pieces so far, those that are not kept any more included."""
        self._pieces: deque[tuple[str, str]] = deque(maxlen=MOST_PIECES)
        self._chain, self._place = -1, 0
        self._counts = True
        """Whether the chain is one of the trajectory, so that the next has another number."""

    def take(self, entries: Iterable[Entry]) -> None:
        """Read further entries. What tools say is shown at once, before a model call reads it."""
        for entry in entries:
            if isinstance(entry, Sampled | Answered) and entry.call:
                self._put("calls", json.dumps(entry.call))
            if isinstance(entry, Begun):
                first = self._chain < 0
                self._chain, self._place, self._counts = self._chain + self._counts, 0, first
                self._add([_given(entry)])
            elif isinstance(entry, Sampled):
                self._counts = True
                self._add(sampled_segments(entry.completion, Message.model_validate_json(entry.message)))
            elif isinstance(entry, Appended) and entry.ids:
                self._add([_given(entry)])

    def _add(self, segments: list[Segment]) -> None:
        for segment in segments:
            said = segment.model_dump_json(exclude={"routed_experts"})
            self._put("pieces", f'{{"chain":{self._chain},"place":{self._place},"segment":{said}}}')
            self._place += 1

    def _put(self, kind: str, said: str) -> None:
        self._pieces.append((kind, said))
        self.count += 1

    def since(self, count: int) -> str:
        """What comes behind so many, as the rest of an event; else that it is not kept any more."""
        new = list(self._pieces)[len(self._pieces) - (self.count - count) :]
        if self.count - count > len(self._pieces):
            return '"refetch":true'
        said = {kind: ",".join(one for its, one in new if its == kind) for kind in ("pieces", "calls")}
        return f'"pieces":[{said["pieces"]}],"calls":[{said["calls"]}]'


def _given(entry: Begun | Appended) -> Segment:
    messages = from_json(entry.messages)
    return Segment(role=messages[-1].role, token_ids=unpack_ids(entry.ids), messages=messages)


class Screen:
    """What the sandbox prints: the output of its latest operation."""

    def __init__(self) -> None:
        self.seen = (0, 0, False)
        """Operation, bytes of its output, and whether it has ended: what there is to be seen."""
        self._pieces: deque[dict[str, Any]] = deque()
        self._length = 0
        self._made: dict[tuple[int, int], bytes] = {}

    def take(self, piece: dict[str, Any]) -> None:
        """Something was printed, or the operation has ended."""
        if piece["operation"] != self.seen[0]:
            self._pieces.clear()
            self._length = 0
        self._pieces.append(piece)
        self._length += len(piece["text"])
        while len(self._pieces) > 1 and self._length > MOST_TEXT:
            self._length -= len(self._pieces.popleft()["text"])
        self.seen = (piece["operation"], piece["end"], not piece["running"])
        self._made.clear()

    def since(self, operation: int, end: int) -> bytes:
        """What comes behind so many bytes of an operation's output, as one event."""
        known = end if operation == self.seen[0] else 0
        if (operation, known) not in self._made:
            last = self._pieces[-1]
            new = [piece for piece in self._pieces if piece["offset"] >= known and piece["text"]]
            offset = new[0]["offset"] if new else last["end"]
            said = {
                "operation": last["operation"],
                "kind": last["kind"],
                "offset": offset,
                "end": last["end"],
                "text": "".join(piece["text"] for piece in new),
                "skipped": offset - known,
                "running": last["running"],
            }
            self._made[operation, known] = event("output", json.dumps(said))
        return self._made[operation, known]


class Watched:
    """One rollout, as it was read last."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.turns, self.screen = Turns(), Screen()
        self.resets = 0
        """How often what was here of its turns was worth nothing any more."""
        self.length = -1 if rollout.state is State.RUNNING else 0
        """Entries of the turn log, or calls of the program's session, that were looked at; -1: none yet, and
        who looks reads for himself what there was."""
        self.counted = rollout.request.agent is not None
        """Whether its entries are only counted, and who looks is told that there are more: those of a
        program's session, and what cannot be read."""
        self.looked_at = float("-inf")
        self.read(rollout)

    def reset(self) -> None:
        """Begin anew: it is another attempt, or Redis has lost a part of this one."""
        self.resets += 1
        self.length = 0
        self.turns = Turns()

    def read(self, rollout: Rollout) -> None:
        """It is so now."""
        if rollout.attempt != self.rollout.attempt:
            self.reset()
        self.rollout = rollout
        self.summary = event("rollout", rollout.model_dump_json())

    @property
    def log(self) -> str:
        """The key of its turn log or, where a program drives it, of the calls of its session."""
        key = keys.turns if self.rollout.request.agent is None else keys.capture_nodes
        return key(self.rollout.id, self.rollout.attempt)
