"""Holds sandboxes to their limits where no cgroup does: looks at processes and disk, and steps in.

A single process is refused too much memory, too large a file and too many processes at once, by rlimits
(`server/confine.py`). What many processes use together is only seen by looking, here. A look costs CPU, so
those at one sandbox are spaced in proportion to what its last one took, and where there is very much to look
at it is done bit by bit: no agent delays what its neighbours are held to.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sandbox import connection, memory, processes, trees
from sandbox.container import Container
from sandbox.errors import SandboxError
from sandbox.processes import Usage

log = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 0.25
MOST_TICK_S = 5.0
DUTY = 50
"""All looks may take one part in so many of the time, each sandbox an equal share of that."""
LOOK_S = 0.5
"""After so long the rest of the sandboxes is left to the next look."""
COSTLY_S = 0.05
"""Sandboxes whose last look took longer come last."""
THOROUGH_PERIOD_S, MOST_THOROUGH_PERIOD_S = 5.0, 60.0
"""Between looks at disks, and at memory that resident sizes do not show."""
DISK_BUDGET_S = 0.1
"""Of one look at one sandbox's disk; the next one goes on."""
ALARM_BYTES = 256 << 20
"""When the machine has lost so much free space or memory, everything is measured now."""
NODE_RESERVE = 0.03
"""Part of the machine's memory that must stay available; else the largest sandbox gives way."""
NODE_DISK_RESERVE_BYTES = 256 << 20
"""The same for the disk that sandboxes write to, or `NODE_RESERVE` of it if that is less."""
FULL_SHARE = 1 / 16
"""Part of that reserve below which the disk counts as full."""
BREACH_TIMEOUT_S = 10.0
FAR_OVER = 2
"""A sandbox with so many times its memory resident is looked at again without a pause, up to a verdict."""
FULL_PROCESSES = 4
"""With so few processes (or a twentieth) left up to the limit the shell can hardly work."""
FULL_TICKS = 4
REGROWTH = 1.1
"""A sandbox that was over its disk limit may grow to so many times what it then had, before it is ended."""
MIB = 1 << 20


def _starved_s() -> float:
    """Seconds for which this thread has waited for a processor; 0 where the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


@dataclasses.dataclass
class Watched:
    """What is remembered of a sandbox between two looks."""

    due: float = 0.0
    """Not looked at before that, nor thoroughly before the next."""
    thorough_due: float = 0.0
    took_s: float = 0.0
    """The last look at it."""
    used: list[Usage] = dataclasses.field(default_factory=list)
    full_ticks: int = 0
    survey: memory.Survey = dataclasses.field(default_factory=memory.Survey)
    holding: memory.Holding | None = None
    """The last that the survey found."""
    counting: Iterator[tuple[int, int, bool]] | None = None
    """A count of what is on disk that is not through."""
    on_disk: int = 0
    """Bytes, by the last count, or the one that goes on if that is more already."""
    disk_bytes: int = 0
    """What it may use now: its limit, or more once it was over it."""
    files: int = 0
    answering: asyncio.Task | None = None

    @property
    def resident(self) -> int:
        """Bytes, in which what processes share counts for each."""
        return sum(usage.rss_bytes for usage in self.used)


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
        self._free: tuple[int, ...] = (0, 0)
        self._thread = ThreadPoolExecutor(1, "watchdog")
        self._worked_s = 0.0
        """Seconds of that thread, less those in which it waited for a processor."""
        self.breaches = dict.fromkeys(("memory", "processes", "disk"), 0)

    def on_disk(self, sandbox_id: str) -> int:
        """Bytes that a sandbox had on disk when that was counted."""
        return self._watched[sandbox_id].on_disk if sandbox_id in self._watched else 0

    async def run(self) -> None:
        """For ever."""
        while True:
            began = time.monotonic()
            try:
                await self.look()
            except Exception:
                log.exception("the watchdog stumbled")
            took = time.monotonic() - began
            await asyncio.sleep(max(TICK_S, took))

    async def look(self) -> None:
        """One look at all sandboxes whose turn it is."""
        containers = [c for c in self._claimed() if c.runtime.name != "local-unsafe"]
        self._watched = {c.id: self._watched.get(c.id) or Watched() for c in containers}
        if not containers:
            return
        began = time.monotonic()
        if self._alarmed():
            for watched in self._watched.values():
                watched.due = watched.thorough_due = 0.0
        for container in sorted(containers, key=self._turn):
            if time.monotonic() - began > LOOK_S:
                break
            if time.monotonic() >= self._watched[container.id].due:
                await self._look_at(container)
        await self._check_node_memory(containers)
        await self._check_node_disk(containers)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """In one of its own: it must not wait for starts or clean-ups."""

        def timed() -> T:
            began = time.monotonic() - _starved_s()
            try:
                return function(*args)
            finally:
                self._worked_s += time.monotonic() - _starved_s() - began

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)

    def _turn(self, container: Container) -> tuple[bool, float]:
        watched = self._watched[container.id]
        return watched.took_s > COSTLY_S, watched.due

    async def _look_at(self, container: Container) -> None:
        watched, began, worked_s = self._watched[container.id], time.monotonic(), self._worked_s
        thorough = began >= watched.thorough_due
        with _apart(container):
            pid = container.pid
            watched.used = await self._in_thread(processes.usages, pid) if pid else []
            self._check_processes(container)
        with _apart(container):
            await self._check_memory(container, thorough)
        if thorough or watched.counting:
            with _apart(container):
                await self._check_disk(container)
        ended = time.monotonic()
        watched.took_s = ended - began
        pause = DUTY * len(self._watched) * (self._worked_s - worked_s)
        watched.due = ended + min(max(TICK_S, pause), MOST_TICK_S)
        if watched.survey.unfinished and watched.resident > FAR_OVER * _most_memory(container):
            watched.due = ended
        if thorough:
            watched.thorough_due = ended + min(max(THOROUGH_PERIOD_S, pause), MOST_THOROUGH_PERIOD_S)

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

    def _check_processes(self, container: Container) -> None:
        """The kernel refuses more than the limit; here only a sandbox that stays full is set free again."""
        watched = self._watched[container.id]
        most = container.limits.processes or 0
        # As the kernel counts for the user namespace: the runtime's own are among them.
        count = sum(usage.threads for usage in watched.used)
        full = most - max(FULL_PROCESSES, most // 20)
        watched.full_ticks = watched.full_ticks + 1 if count >= full else 0
        if watched.full_ticks >= FULL_TICKS:
            watched.full_ticks = 0
            self._breach(container, "processes", f"{count} processes and threads of at most {most}")

    # -- memory ----------------------------------------------

    async def _check_memory(self, container: Container, thorough: bool) -> None:
        watched = self._watched[container.id]
        most = _most_memory(container)
        if watched.resident <= most and not thorough and not watched.survey.unfinished:
            return
        # Resident sizes count shared pages once for each process; before a verdict they are shared out, and
        # what lies in no process's memory is added.
        holding = await self._hold(container)
        if holding is None or holding.total <= most:
            return
        shares = holding.shares
        largest = max(watched.used, key=lambda usage: shares.get(usage.pid, 0))
        what = f"{holding.total / MIB:.0f} MiB of memory of at most {container.limits.memory_mb} MiB"
        self._breach(container, "memory", what)
        if largest.pid not in container.protected and holding.total - shares.get(largest.pid, 0) <= most:
            processes.send_to(largest.pid, largest.started)  # at once; what the server does takes longer

    async def _hold(self, container: Container, at_once: bool = False) -> memory.Holding | None:
        """What it holds now; None when that is still to be seen, which it never is `at_once`."""
        watched = self._watched[container.id]
        known = watched.used, container.file_system, _most_memory(container)
        holding = await self._in_thread(watched.survey.held, *known, at_once)
        watched.holding = holding or watched.holding
        return holding

    # -- the node ----------------------------------------------

    # What the node lacks is no agent's fault. Its sandbox is ended: what it did since cannot be judged.

    async def _check_node_memory(self, containers: list[Container]) -> None:
        """With the machine itself short of memory the sandbox that holds most gives way before the kernel
        chooses. What may lie in sockets and pipes counts in full: hidden there it shows nowhere else.
        """
        available, total = processes.memory_available(), processes.memory_total()
        if available >= NODE_RESERVE * total or _giving_way(containers):
            return
        held = {container.id: self._watched[container.id].resident for container in containers}
        for container in containers:
            with _apart(container):
                held[container.id] = await self._held_at_most(container)
        largest = max(containers, key=lambda c: held[c.id])
        shortage = f"the node has {available / MIB:.0f} MiB of memory left"
        self._end_for(largest, f"was ended: {shortage} and this sandbox uses most", "node")

    async def _held_at_most(self, container: Container) -> int:
        """As it is now, or was if that is more and not all can be seen at once: else who is not seen to the
        end could grow meanwhile, and another would give way.
        """
        watched = self._watched[container.id]
        pid, before = container.pid, watched.holding
        watched.used = await self._in_thread(processes.usages, pid) if pid else []
        now = await self._hold(container, at_once=True)
        assert now
        holdings = [now] if now.whole or before is None else [now, before]
        return max(holding.total + holding.buffers for holding in holdings)

    async def _check_node_disk(self, containers: list[Container]) -> None:
        """The same for its disk. Once that is full, any sandbox may have met the end of it."""
        disk = shutil.disk_usage(self._scratch)
        reserve = min(NODE_DISK_RESERVE_BYTES, NODE_RESERVE * disk.total)
        if disk.free >= reserve or _giving_way(containers):
            return
        shortage = f"the node has {disk.free / MIB:.0f} MiB of disk left"
        if disk.free < reserve * FULL_SHARE:
            for container in containers:
                self._end_for(container, f"was ended: {shortage}, so that writing may have failed", "node")
            return
        for container in containers:
            with _apart(container):
                await self._finish_disk(container)
        largest = max(containers, key=lambda c: self._watched[c.id].on_disk)
        self._end_for(largest, f"was ended: {shortage} and this sandbox uses most", "node")

    # -- disk ----------------------------------------------

    def _counting(self, container: Container) -> Iterator[tuple[int, int, bool]]:
        watched = self._watched[container.id]
        watched.disk_bytes = watched.disk_bytes or (container.limits.disk_mb or 0) * MIB
        watched.files = watched.files or container.limits.files or 0
        return trees.counting(container.launch.scratch, 4 * watched.disk_bytes, 4 * watched.files)

    async def _finish_disk(self, container: Container) -> None:
        """Count all of it now, however long that takes: the last count says little of who is largest."""
        watched = self._watched[container.id]
        *_, (size, _, _) = await self._in_thread(list, self._counting(container))
        watched.on_disk = size + (watched.holding.unlinked if watched.holding else 0)

    async def _check_disk(self, container: Container) -> None:
        watched = self._watched[container.id]
        most_mb, most_files = container.limits.disk_mb or 0, container.limits.files or 0
        counting = watched.counting or self._counting(container)
        watched.counting = None
        size, count, through = await self._in_thread(_go_on, counting)
        if not through:
            watched.counting = counting
            watched.on_disk = max(watched.on_disk, size)
            return
        size += watched.holding.unlinked if watched.holding else 0
        watched.on_disk = size
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
            await connection.exchange(container.address, request, BREACH_TIMEOUT_S)
        except SandboxError as error:
            self._end_for(
                container, f"was ended: over its limit ({what}) and not answering: {error}", "limited"
            )


def _giving_way(containers: list[Container]) -> bool:
    """Whether one is being ended already, which may be enough."""
    return any(container.ending is not None for container in containers)


def _most_memory(container: Container) -> int:
    return (container.limits.memory_mb or 0) * MIB


@contextlib.contextmanager
def _apart(container: Container) -> Iterator[None]:
    """What goes wrong with one sandbox must not leave the others unwatched: an agent might bring it about."""
    try:
        yield
    except Exception:
        log.exception("the watchdog stumbled over sandbox %s", container.id)


def _go_on(counting: Iterator[tuple[int, int, bool]]) -> tuple[int, int, bool]:
    """Count for a while."""
    ends = time.monotonic() + DISK_BUDGET_S
    return next(count for count in counting if count[2] or time.monotonic() > ends)
