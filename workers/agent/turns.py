"""The turn log as RUN keeps it: what it does is written as it is done, and what a former worker did is gone
through again first.

A worker that takes RUN over runs the handler's `run` from its beginning. As long as the log has entries of
the former worker, model calls, tools and the handler's own operations of the sandbox take their outcomes from
there; behind the last one they are done. The sandbox is asked for the tool call that was under way by its old
number, and gives its outcome instead of doing it again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rollout.arrays import pack_ids
from rollout.trajectory import Message
from sandbox.client import SandboxClient
from services.engines.base import Completion
from services.state.turns.entries import (
    Answered,
    Appended,
    Begun,
    Entry,
    Operated,
    Sampled,
    decode,
    encode,
    from_json,
    to_json,
)
from workers.agent.calls import Calls
from workers.agent.parsing import ParsedTurn
from workers.agent.tools import Observation
from workers.errors import InfrastructureError
from workers.held import SHUTDOWN, Held

KEPT_S = 60.0
"""For how long written entries are kept here: a Redis that was killed loses about its last second."""
MOST_UNWRITTEN = 32
"""Entries that wait for the next model call to be written; more of them are written at once."""

E = TypeVar("E", bound=Entry)
Write = Callable[[int, Sequence[bytes]], Awaitable[dict[str, Any]]]
"""Adds entries behind so many; the answer is that of `turns.lua`."""


class RunDiverged(InfrastructureError):
    """RUN cannot go on where a former worker was: what it did there is not what is done now."""


class TurnLog:
    """The log of one attempt, and the `sandbox.journal.Journal` of its sandbox."""

    def __init__(
        self, stored: Sequence[bytes] = (), write: Write | None = None, held: Held | None = None
    ) -> None:
        """
        Args:
            stored: What former workers have written.
            write: None = nothing is kept.
            held: Why RUN may be interrupted, and its fence.

        Raises:
            RunDiverged: An entry cannot be read here.
        """
        try:
            self.before = decode(stored)
            """What former workers did."""
        except ValueError as error:
            raise RunDiverged(f"the turn log cannot be read: {error}") from error
        self._old = deque(self.before)
        sampled = [entry for entry in self.before if isinstance(entry, Sampled)]
        self.turns = len(sampled)
        """Model calls that former workers made."""
        self.spent_before_s = sampled[-1].spent_s if sampled else 0.0
        """Seconds of RUN's time limit that they used up."""
        self._began = time.monotonic()
        self._write = write
        self._held = held or Held("", stage=None)  # type: ignore[arg-type]
        self._writing = asyncio.Lock()
        self._written = len(stored)
        self._new: list[Entry] = []
        self._recent: deque[tuple[float, bytes]] = deque()
        self.calls = Calls()
        # The journal of the sandbox.
        self.fence = self._held.fence
        self.known = self._number = 0
        self._last = 0
        """The last operation that a former worker began."""
        self._in_call = False

    def begin(self) -> None:
        """RUN's time limit begins to run here."""
        self._began = time.monotonic()

    @property
    def place(self) -> tuple[int, int]:
        """Entries, with those that wait to be written, and operations of the sandbox that are in them."""
        return self._written + len(self._new), self._number

    # -- what former workers did -------------------------------------------------------------

    @property
    def repeats(self) -> bool:
        """Whether what comes next was done by a former worker."""
        return bool(self._old)

    def peek(self, kind: type[E]) -> E | None:
        """The next entry of a former worker if it is of this kind."""
        return self._old[0] if self._old and isinstance(self._old[0], kind) else None

    def take(self, kind: type[E]) -> E | None:
        """The next entry of a former worker; None: there is none left, so this is done for the first time.

        Raises:
            RunDiverged: It is of another kind.
        """
        if not self._old:
            return None
        entry = self._old.popleft()
        if not isinstance(entry, kind):
            raise RunDiverged(
                f"the former worker's next entry is {type(entry).__name__} where there is {kind.__name__} "
                "now: a handler whose `run` does not repeat itself says so in `repeatable`"
            )
        self.calls.repeat(entry)
        return entry

    def take_answer(self, place: int) -> Observation | None:
        """What a tool answered to the turn's call at this place; None as for `take`."""
        entry = self.take(Answered)
        if entry is None:
            return None
        self._number = self.known = entry.known
        text = entry.text
        if text is None:
            appended = next(later for later in self._old if isinstance(later, Appended))
            text = from_json(appended.messages)[place].text
        return Observation(text, entry.finished)

    # -- what is done now --------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Keep an entry, to be written with the next `flush`."""
        if self._write is not None:
            self._new.append(entry)
            if len(self._new) == MOST_UNWRITTEN:
                self.flush_soon()

    def add_begun(self, ids: list[int], messages: Sequence[Message], **first: str) -> None:
        """A chain begins; see `Begun`."""
        if self._write is not None:
            self.add(Begun(pack_ids(ids), to_json(messages), **first))

    def add_sampled(self, completion: Completion, turn: ParsedTurn, call: Any, backend: str) -> None:
        """A model call was answered; see `Sampled`."""
        if self._write is not None:
            spent_s = round(self.spent_before_s + time.monotonic() - self._began, 3)
            more = {"spent_s": spent_s, "backend": backend, "call": call}
            self.add(Sampled.of(completion, turn.message, turn.places, **more))

    def add_appended(self, ids: list[int], messages: Sequence[Message], cut: bool) -> None:
        """Messages were appended. Texts of tools that are in them are not kept twice."""
        if self._write is None:
            return
        answers = [entry for entry in self._new if isinstance(entry, Answered)]
        if not cut and [entry.text for entry in answers] == [message.text for message in messages]:
            for entry in answers:
                entry.text = None
        self.add(Appended(pack_ids(ids), to_json(messages), cut))

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call of a tool, of which only the answer is kept; see `add_answer`."""
        self._in_call = True
        self.calls.begin()
        try:
            yield
        finally:
            self._in_call = False

    def add_answer(self, observation: Observation, attempt: object = None) -> None:
        """A tool has answered the turn's attempt at a call."""
        self.add(Answered(observation.text, observation.finished, self._number, self.calls.tool(attempt)))

    def flush_soon(self) -> asyncio.Task[None]:
        """`flush` as a task, which may be given up."""
        task = asyncio.ensure_future(self.flush())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def flush(self) -> None:
        """Write what is not written.

        Raises:
            InfrastructureError: The rollout is not this worker's any more, or Redis has lost too much.
        """
        async with self._writing:
            while self._new:
                entries = self._new[:]
                await self._put([encode(entry) for entry in entries])
                del self._new[: len(entries)]
                for entry in entries:
                    if isinstance(entry, Answered | Operated):
                        self.known = entry.known

    async def _put(self, fresh: list[bytes]) -> None:
        at, lost = self._written, []
        while (answer := await self._write(at, [*lost, *fresh]))["word"] == "behind":
            at = answer["at"]
            missing = self._written - at
            if missing > len(self._recent):
                raise InfrastructureError(f"Redis has lost {missing} entries of the turn log")
            lost = [stored for _, stored in self._recent][-missing:]
        if answer["word"] != "ok":
            raise InfrastructureError("the rollout is not this worker's any more")
        now = time.monotonic()
        self._written += len(fresh)
        self._recent.extend((now, stored) for stored in fresh)
        while self._recent and self._recent[0][0] < now - KEPT_S:
            self._recent.popleft()

    async def pause(self) -> None:
        """Before a call of the model: where RUN is to leave this worker, it does so here."""
        if self._held.leaving:
            await self.flush()
            self._held.interrupt(SHUTDOWN)
            await asyncio.get_running_loop().create_future()  # which the interrupt ends
        self.calls.begin()

    # -- the sandbox -------------------------------------------------------------------------

    async def follow(self, sandbox: SandboxClient) -> None:
        """Number what RUN does in its sandbox from now on, and shut former workers out of it.

        Raises:
            RunDiverged: The sandbox is not where the record is.
            SandboxError: It is gone.
        """
        place = await sandbox.take(self.fence)
        numbers = [entry.known for entry in self._old if isinstance(entry, Answered | Operated)]
        written = numbers[-1] if numbers else 0
        if place is None:
            if self._old:
                raise RunDiverged(
                    "the sandbox is of an earlier release: it does not tell what was done in it"
                )
            return
        self._last, known = place
        if known > written or self._last < written:
            raise RunDiverged(_AHEAD.format(self._last, written))
        sandbox.journal = self

    def settle(self) -> None:
        """Behind what a former worker did and began: the sandbox has been told nothing else.

        Raises:
            RunDiverged: It has, by a turn that Redis has lost.
        """
        if not self._old and self._number < self._last:
            raise RunDiverged(_AHEAD.format(self._last, self._number))

    @property
    def leaves(self) -> bool:
        return self._held.reason == SHUTDOWN

    def recall(self) -> dict[str, Any] | None:
        entry = None if self._in_call else self.take(Operated)
        if entry is None:
            return None
        self._number = self.known = entry.known
        return entry.reply

    def number(self) -> int:
        self._number += 1
        return self._number

    def keep(self, number: int, reply: dict[str, Any]) -> None:
        if not self._in_call:
            self.add(Operated(number, reply))


_AHEAD = "the sandbox has done {} operations and its record says {}: Redis has lost what came between"
