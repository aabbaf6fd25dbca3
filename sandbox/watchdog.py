"""Holds sandboxes to their limits where no cgroup does: looks at processes and disk, and steps in.

A single process is refused too much memory, too large a file and too many processes at once, by rlimits
(`server/confine.py`). What many processes use together is only seen by looking, here. A look costs CPU, so
looks are spaced in proportion to what the last one took.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sandbox import aio, memory, processes, trees
from sandbox.container import Container
from sandbox.errors import SandboxError
from sandbox.processes import Usage

log = logging.getLogger(__name__)

TICK_S = 0.25
MOST_TICK_S = 5.0
DUTY = 50
"""A look may take one part in so many of the time."""
THOROUGH_PERIOD_S = 5.0
"""Between looks at disks, and at memory that resident sizes do not show."""
ALARM_BYTES = 256 << 20
"""When the machine has lost so much free space or memory, everything is measured now."""
NODE_RESERVE = 0.03
"""Part of the machine's memory that must stay available; else the largest sandbox gives way."""
NODE_DISK_RESERVE_BYTES = 256 << 20
"""The same for the disk that sandboxes write to, or `NODE_RESERVE` of it if that is less."""
FULL_SHARE = 1 / 16
"""Part of that reserve below which the disk counts as full."""
BREACH_TIMEOUT_S = 10.0
FULL_PROCESSES = 4
"""With so few processes (or a twentieth) left up to the limit the shell can hardly work."""
FULL_TICKS = 4
REGROWTH = 1.1
"""A sandbox that was over its disk limit may grow to so many times what it then had, before it is ended."""
MIB = 1 << 20


@dataclasses.dataclass
class Watched:
    """What is remembered of a sandbox between two looks."""

    full_ticks: int = 0
    disk_bytes: int = 0
    """What it may use now: its limit, or more once it was over it."""
    files: int = 0
    answering: asyncio.Task | None = None


class Watchdog:
    """Watches the claimed sandboxes of a host."""

    def __init__(
        self,
        claimed: Callable[[], list[Container]],
        end_for: Callable[[Container, str, str], None],
        scratch: Path,
    ):
        """`end_for(container, reason, count)` ends one for good."""
        self._claimed = claimed
        self._end_for = end_for
        self._scratch = scratch
        self._watched: dict[str, Watched] = {}
        self._thorough_due = 0.0
        self._free: tuple[int, ...] = (0, 0)
        self.breaches = dict.fromkeys(("memory", "processes", "disk"), 0)

    async def run(self) -> None:
        """For ever."""
        while True:
            began = time.monotonic()
            try:
                await self.look()
            except Exception:
                log.exception("the watchdog stumbled")
            took = time.monotonic() - began
            await asyncio.sleep(min(max(TICK_S, DUTY * took), MOST_TICK_S))

    async def look(self) -> None:
        """One look at all sandboxes."""
        containers = [c for c in self._claimed() if c.runtime.name != "local-unsafe"]
        self._watched = {c.id: self._watched.get(c.id) or Watched() for c in containers}
        if not containers:
            return
        trees_of = await asyncio.to_thread(_usages, containers)
        for container in containers:
            with _apart(container):
                self._check_processes(container, trees_of[container.id])
        thorough = self._alarmed() or time.monotonic() >= self._thorough_due
        began = time.monotonic()
        for container in containers:
            with _apart(container):
                await self._check_memory(container, trees_of[container.id], thorough)
            if thorough:
                with _apart(container):
                    await self._check_disk(container, trees_of[container.id])
        if thorough:
            took = time.monotonic() - began
            self._thorough_due = time.monotonic() + max(THOROUGH_PERIOD_S, DUTY * took)
        await self._check_node_memory(containers, trees_of)
        await self._check_node_disk(containers)

    def _alarmed(self) -> bool:
        """Whether the machine's free disk space or memory fell by much since it was last said so."""
        disk = os.statvfs(self._scratch)
        free = (disk.f_bavail * disk.f_frsize, processes.memory_available())
        if any(was - now > ALARM_BYTES for was, now in zip(self._free, free, strict=True)):
            self._free = free
            return True
        self._free = tuple(map(max, self._free, free))
        return False

    # -- processes ----------------------------------------------

    def _check_processes(self, container: Container, used: list[Usage]) -> None:
        """The kernel refuses more than the limit; here only a sandbox that stays full is set free again."""
        watched = self._watched[container.id]
        most = container.limits.processes or 0
        # As the kernel counts for the user namespace: the runtime's own are among them.
        count = sum(one.threads for one in used)
        full = most - max(FULL_PROCESSES, most // 20)
        watched.full_ticks = watched.full_ticks + 1 if count >= full else 0
        if watched.full_ticks >= FULL_TICKS:
            watched.full_ticks = 0
            self._breach(container, "processes", f"{count} processes and threads of at most {most}")

    # -- memory ----------------------------------------------

    async def _check_memory(self, container: Container, used: list[Usage], thorough: bool) -> None:
        most = (container.limits.memory_mb or 0) * MIB
        total = sum(one.rss_bytes for one in used)
        if total <= most and not thorough:
            return
        # Resident sizes count shared pages once for each process; before a verdict they are shared out, and
        # what lies in no process's memory is added.
        holding = await asyncio.to_thread(memory.held, used, container.file_system)
        if holding.total <= most:
            return
        shares = holding.shares
        largest = max(shares, key=lambda pid: shares[pid])
        what = f"{holding.total / MIB:.0f} MiB of memory of at most {container.limits.memory_mb} MiB"
        if largest not in container.protected and holding.total - shares[largest] <= most:
            processes.send([largest], signal.SIGKILL)  # at once; what the server does besides takes longer
        self._breach(container, "memory", what)

    # -- the node ----------------------------------------------

    # What the node lacks is no agent's fault. Its sandbox is ended: what it did since cannot be judged.

    async def _check_node_memory(self, containers: list[Container], used: dict[str, list[Usage]]) -> None:
        """With the machine itself short of memory the sandbox that holds most gives way before the kernel
        chooses. What may lie in sockets and pipes counts in full: hidden there it shows nowhere else.
        """
        available, total = processes.memory_available(), processes.memory_total()
        if available >= NODE_RESERVE * total or _giving_way(containers):
            return

        def holding(container: Container) -> int:
            own = used[container.id]
            return memory.held(own, container.file_system).total + memory.possible_buffers(own)

        holdings = await asyncio.to_thread(lambda: {c.id: holding(c) for c in containers})
        largest = max(containers, key=lambda c: holdings[c.id])
        left = f"the node has {available / MIB:.0f} MiB of memory left"
        self._end_for(largest, f"was ended: {left} and this sandbox uses most", "node")

    async def _check_node_disk(self, containers: list[Container]) -> None:
        """The same for its disk. Once that is full, any sandbox may have met the end of it."""
        disk = shutil.disk_usage(self._scratch)
        reserve = min(NODE_DISK_RESERVE_BYTES, NODE_RESERVE * disk.total)
        if disk.free >= reserve or _giving_way(containers):
            return
        left = f"the node has {disk.free / MIB:.0f} MiB of disk left"
        if disk.free < reserve * FULL_SHARE:
            for container in containers:
                self._end_for(container, f"was ended: {left}, so that writing may have failed", "node")
            return
        sizes = {
            c.id: (await asyncio.to_thread(trees.usage, c.launch.scratch, sys.maxsize, sys.maxsize))[0]
            for c in containers
        }
        largest = max(containers, key=lambda c: sizes[c.id])
        self._end_for(largest, f"was ended: {left} and this sandbox uses most", "node")

    # -- disk ----------------------------------------------

    async def _check_disk(self, container: Container, used: list[Usage]) -> None:
        watched = self._watched[container.id]
        most_mb, most_files = container.limits.disk_mb or 0, container.limits.files or 0
        watched.disk_bytes = watched.disk_bytes or most_mb * MIB
        watched.files = watched.files or most_files
        root = container.launch.scratch
        size, count = await asyncio.to_thread(trees.usage, root, 4 * watched.disk_bytes, 4 * watched.files)
        size += await asyncio.to_thread(memory.unlinked_bytes, [one.pid for one in used])
        if size <= watched.disk_bytes and count <= watched.files:
            return
        what = (
            f"{size / MIB:.0f} MiB in {count} files on disk of at most {most_mb} MiB and {most_files} files"
        )
        if watched.disk_bytes > most_mb * MIB or watched.files > most_files:
            self._end_for(container, f"was ended: over its disk limit again, with {what}", "limited")
            return
        # The agent may tidy up, so it gets a little room; it is not told twice of the same files.
        watched.disk_bytes = max(watched.disk_bytes, int(size * REGROWTH) + 16 * MIB)
        watched.files = max(watched.files, int(count * REGROWTH) + 1000)
        self._breach(container, "disk", what)

    # -- stepping in ----------------------------------------------

    def _breach(self, container: Container, kind: str, what: str) -> None:
        """Have the server end the agent's processes and say why; without an answer end the sandbox."""
        watched = self._watched[container.id]
        if container.ending is not None or (watched.answering and not watched.answering.done()):
            return
        self.breaches[kind] += 1
        log.warning("sandbox %s of %r is over its limit: %s", container.id, container.spec.owner, what)
        watched.answering = asyncio.create_task(self._tell(container, kind, what))

    async def _tell(self, container: Container, kind: str, what: str) -> None:
        message = f"{kind} limit of the sandbox: {what}; its processes were ended"
        request = {"op": "breach", "kind": kind, "message": message}
        try:
            await aio.exchange(container.address, request, BREACH_TIMEOUT_S)
        except SandboxError as error:
            self._end_for(
                container, f"was ended: over its limit ({what}) and not answering: {error}", "limited"
            )


def _giving_way(containers: list[Container]) -> bool:
    """Whether one is being ended already, which may be enough."""
    return any(container.ending is not None for container in containers)


@contextlib.contextmanager
def _apart(container: Container) -> Iterator[None]:
    """What goes wrong with one sandbox must not leave the others unwatched: an agent might bring it about."""
    try:
        yield
    except Exception:
        log.exception("the watchdog stumbled over sandbox %s", container.id)


def _usages(containers: Iterable[Container]) -> dict[str, list[Usage]]:
    return {c.id: processes.usages(c.pid) if c.pid else [] for c in containers}
