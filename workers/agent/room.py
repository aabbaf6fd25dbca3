"""Waiting for room on the backends, on a worker's event loop: whom a message of Redis wakes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rollout.schema import new_id

LOOK_AGAIN_S = 2.0
"""Longest pause before a rollout that waits for room asks again by itself: messages may be lost."""


class Room:
    """Those of a worker that wait. Redis has the order; here is who is to ask now."""

    def __init__(self) -> None:
        self.process = new_id()
        """Names it in Redis, which tells it of room for its rollouts (`keys.room_of`)."""
        self.changed = asyncio.Event()
        self._waiting: dict[str, asyncio.Event] = {}
        """Those that wait for room, by the names of their reservations, in order of arrival."""

    def wake(self, granted: str = "") -> None:
        """A message of the room channel: those that got room look for it.

        Without any, something changed for the better: those whom no backend could take ask again, and of
        those that wait for room the first, on behalf of all.
        """
        for name in granted.split() if granted else [*self._waiting][:1]:
            if name in self._waiting:
                self._waiting[name].set()
        if not granted:
            self.changed.set()
            self.changed = asyncio.Event()

    @contextmanager
    def waiting(self, rollout_id: str, slot: str) -> Iterator[asyncio.Event]:
        """Have `wake` hear of a rollout: what it sets, from before the rollout asks for room."""
        name = f"{rollout_id}|{slot}" if slot else rollout_id
        event = self._waiting[name] = asyncio.Event()
        try:
            yield event
        finally:
            if self._waiting.get(name) is event:
                del self._waiting[name]

    async def change(self, changed: asyncio.Event) -> None:
        """Wait for a `wake` since you took `changed`, which is before you look, or for about two seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN_S * random.uniform(0.5, 1.0)):
                await changed.wait()
