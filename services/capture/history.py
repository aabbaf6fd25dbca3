"""What was read before of a conversation: a program sends the whole of it with each call.

A history changes nothing of what a call says. It saves to read, and to hash, entries that are the same to the
byte as those of an earlier call of the session: their messages are the same objects.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from cachetools import LRUCache
from msgspec import Raw

from rollout.trajectory import Message

MOST_BYTES = 64 << 20
"""Of bodies whose histories a process keeps; as objects they take two to three times as much."""
MOST_BRANCHES = 4
"""Conversations of one session that are kept: sub-agents take turns with their parent."""


@dataclass
class History:
    """A conversation as it was read."""

    lead: Sequence[str] = ()
    """Texts that come before the entries."""
    entries: Sequence[Raw] = ()
    """What the body has a list of."""
    starts: list[int] = field(default_factory=list)
    """Of each entry the number of messages before its own."""
    messages: list[Message] = field(default_factory=list)
    state: Any = None
    """What a dialect must know to go on behind the last message."""
    tools: Any = None
    digests: list[bytes] = field(default_factory=list)
    """Of the tools, and of them with each of the first messages, as far as they were wanted."""

    def same(self, lead: Sequence[str], entries: Sequence[Raw]) -> int:
        """How many of a call's first entries were read here, up to a place where nothing is joined."""
        if lead != self.lead:
            return 0
        same = len(self.entries)
        if self.entries != entries[:same]:
            pairs = enumerate(zip(self.entries, entries, strict=False))
            same = next((at for at, (ours, theirs) in pairs if ours != theirs), min(same, len(entries)))
        return next((at for at in range(same, 0, -1) if self._ends(self._start(at))), 0)

    def _start(self, at: int) -> int:
        return self.starts[at] if at < len(self.starts) else len(self.messages)

    def _ends(self, start: int) -> bool:
        return start > 0 and self.messages[start - 1].role in ("user", "tool")

    def upto(self, at: int) -> History:
        """The same with so many entries, to be gone on with."""
        kept = self._start(at) if at else 0
        return replace(
            self,
            starts=self.starts[:at],
            messages=self.messages[:kept],
            state=self.state if at == len(self.entries) else None,
            digests=self.digests[: kept + 1],
        )


class Histories:
    """The latest ones of each session, bounded in bytes."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._of: LRUCache[Hashable, list[tuple[History, int]]] = LRUCache(most_bytes, _size)

    def of(self, session: Hashable) -> list[History]:
        """Those of a session."""
        return [history for history, _ in self._of.get(session, ())]

    def keep(self, session: Hashable, history: History, size: int) -> None:
        """Keep that of a body of so many bytes, in place of those that it goes on from."""
        others = [entry for entry in self._of.pop(session, ()) if not _repeats(history, entry[0])]
        kept = [*others[1 - MOST_BRANCHES :], (history, size)]
        if _size(kept) <= self._of.maxsize:
            self._of[session] = kept


def _size(entries: Iterable[tuple[History, int]]) -> int:
    return sum(size for _, size in entries)


def _repeats(history: History, before: History) -> bool:
    return before.lead == history.lead and before.entries == history.entries[: len(before.entries)]


def going_on(recent: Iterable[History], lead: Sequence[str], entries: Sequence[Raw]) -> History:
    """The history of a call, as far as one of the recent ones has it."""
    known, best = max(
        ((history.same(lead, entries), history) for history in recent),
        key=itemgetter(0),
        default=(0, History()),
    )
    return replace(best.upto(known), lead=lead, entries=entries)
