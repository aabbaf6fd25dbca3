"""The warm pool: sandboxes started ahead of requests, each used once.

A kind that was asked for is kept ready until nobody has asked for it for a while. Starting ahead yields to
requests that wait for a start of their own.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox.config import HostConfig
from sandbox.errors import SandboxError
from sandbox.runtimes.base import Bind
from sandbox.spec import Limits

if TYPE_CHECKING:
    from sandbox.container import Container

log = logging.getLogger(__name__)

BURST_S, MEMORY_S = 1.0, 60.0
"""As many are kept ready as were asked for within the first, at the busiest within the second."""
FIRST_BACK_OFF_S = 5.0
MOST_BACK_OFF_S = 300.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """All that is fixed when a sandbox is started; the rest is given at the claim."""

    image: str
    runtime: str
    """As asked for."""
    rootfs: Path | None
    interpreter: Path | None
    """See `Launch`."""
    network: str
    limits: Limits
    binds: tuple[Bind, ...]
    ipython: bool = False


@dataclasses.dataclass
class Shelf:
    """The warm sandboxes of one kind."""

    count: int = 0
    """How many shall be ready at least."""
    recent: collections.deque[float] = dataclasses.field(default_factory=collections.deque)
    """When the last were taken or missed, `time.monotonic()`; those of the last `BURST_S`."""
    most: int = 0
    """How many these were at the busiest of late."""
    busiest: float = 0.0
    """`time.monotonic()`; when that was."""
    last_asked: float = 0.0
    """`time.monotonic()`."""
    ready: collections.deque[Container] = dataclasses.field(default_factory=collections.deque)
    starting: int = 0
    failures: int = 0
    not_before: float = 0.0
    """`time.monotonic()`; after failed starts."""

    def note_demand(self, now: float) -> None:
        """Count one more that was asked for."""
        self.recent.append(now)
        while now - self.recent[0] > BURST_S:
            self.recent.popleft()
        if len(self.recent) >= self.most or now - self.busiest > MEMORY_S:
            self.most, self.busiest = len(self.recent), now

    def wanted(self, now: float) -> int:
        """How many shall be ready: what the next burst would take if it is like the last ones."""
        return max(self.count, self.most if now - self.busiest <= MEMORY_S else 0)


class WarmPool:
    """Keeps sandboxes ready. Used from the host's event loop."""

    def __init__(
        self,
        config: HostConfig,
        boot: Callable[[Kind], Awaitable[Container]],
        discard: Callable[[Container], object],
        is_busy: Callable[[], bool],
    ):
        """`boot` starts one, `discard` ends one; while `is_busy()` nothing is started ahead."""
        self._config = config
        self._boot = boot
        self._discard = discard
        self._is_busy = is_busy
        self._shelves: dict[Kind, Shelf] = {}
        self._tasks: set[asyncio.Task] = set()
        self._closed = False

    def take(self, kind: Kind) -> Container | None:
        """A ready sandbox of that kind, now the caller's; None when there is none."""
        shelf = self._shelves.get(kind)
        while shelf and shelf.ready:
            container = shelf.ready.popleft()
            if container.ending is None and not container.is_over():
                return container
        return None

    def asked(self, kind: Kind, count: int | None = None) -> None:
        """Note the demand; `count` ready ones are kept from now on (default: what the node keeps), or more
        where more are in demand.
        """
        if self._closed or self._config.warm == 0:
            return
        shelf = self._shelves.setdefault(kind, Shelf())
        shelf.last_asked = time.monotonic()
        if count is None:
            shelf.note_demand(shelf.last_asked)
            count = self._config.warm
        shelf.count = max(shelf.count, min(count, self._config.warm_total))
        self.tidy()

    def ready(self) -> int:
        """Number of sandboxes that are ready, over all kinds."""
        return sum(len(shelf.ready) for shelf in self._shelves.values())

    def tidy(self) -> None:
        """Drop the dead and the unwanted, and start what is missing, the kind asked for last first.

        Where all kinds want more than the node keeps, each has its share of that.
        """
        now = time.monotonic()
        for kind, shelf in list(self._shelves.items()):
            for container in [c for c in shelf.ready if c.ending is not None or c.exited.is_set()]:
                shelf.ready.remove(container)
            if now - shelf.last_asked > self._config.warm_idle_s:
                shelf.count = shelf.most = 0
                if not shelf.starting and not shelf.ready:
                    del self._shelves[kind]
        by_demand = sorted(self._shelves.items(), key=lambda item: -item[1].last_asked)
        total = self._config.warm_total
        wanted = max(total, sum(shelf.wanted(now) for shelf in self._shelves.values()))
        # One at a time: starting ahead must not take the slots of those who wait.
        may_start = not (self._closed or self._is_busy() or any(shelf.starting for _, shelf in by_demand))
        room = total
        for kind, shelf in by_demand:
            share = min(room, math.ceil(total * shelf.wanted(now) / wanted))
            room -= share
            while len(shelf.ready) > share:
                self._discard(shelf.ready.popleft())
            if may_start and len(shelf.ready) < share and now >= shelf.not_before:
                may_start = False
                shelf.starting += 1
                task = asyncio.create_task(self._fill(kind, shelf))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _fill(self, kind: Kind, shelf: Shelf) -> None:
        try:
            container = await self._boot(kind)
            shelf.failures = 0
            if self._closed or kind not in self._shelves:
                self._discard(container)
            else:
                shelf.ready.append(container)
        except SandboxError as error:
            shelf.failures += 1
            wait = min(FIRST_BACK_OFF_S * 2 ** (shelf.failures - 1), MOST_BACK_OFF_S)
            shelf.not_before = time.monotonic() + wait
            log.warning("cannot start a warm sandbox of %s, next try in %g s: %s", kind.image, wait, error)
        finally:
            shelf.starting -= 1
        self.tidy()

    async def close(self) -> None:
        """Start no more; those that are ready are ended with all others."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._shelves.clear()
