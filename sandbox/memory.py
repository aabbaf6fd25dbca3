"""Memory that a sandbox holds, as far as it can be seen from outside: of its processes, and of no process.

What no cgroup counts for us is added up: private memory, swapped or not; page tables; shared memory, which
stays in its file though nobody maps it any more; and the file system that Apptainer keeps in memory for each
container.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sandbox.processes import Usage

INODE_BYTES = 1024
"""What the kernel needs for a file in memory that has no content; about."""
SOCKET_BYTES, PIPE_BYTES = 208 << 10, 64 << 10
"""The most that lies unread in a socket and a pipe, by the kernel's defaults."""
SHARED_NAMES = ("/memfd:", "/dev/zero (deleted)", "/SYSV")
"""In the maps of a process: files that are memory, of memfd_create, mmap and shmget."""
MAPPED = re.compile(
    rb"^(\S+) \S{3}s \S+ (\S+ \d+) +(?:%s)" % b"|".join(re.escape(name.encode()) for name in SHARED_NAMES),
    re.MULTILINE,
)
"""A line of such: its addresses; device and inode."""
BUDGET_S, MOST_CALLS = 0.1, 20
"""CPU time of a call of `Survey.held`, and after so many it has an answer."""
LARGE = 4
"""Times its sandbox's limit: what is resident of a process that is larger is not shared out. The kernel would
walk each mapping of each page, which takes longer than any budget. Java maps its heap three times."""

Identity = tuple[int, int]
"""Device and inode."""


@dataclasses.dataclass(frozen=True)
class Holding:
    """What one sandbox holds, in bytes."""

    shares: dict[int, int]
    """Process → its memory, each shared page divided by the number of those who share it."""
    total: int
    """And what is in no process."""
    buffers: int
    """The most that may lie in sockets and pipes; nothing shows how much does."""
    unlinked: int
    """On disk, in files that are open though no directory names them any more."""
    whole: bool
    """Whether all was looked at; else some counts by what is resident."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one process holds."""

    rss_bytes: int
    """When it was looked at."""
    private: int
    shared: int = 0
    memory_files: dict[Identity, int] = dataclasses.field(default_factory=dict)
    unlinked: dict[Identity, int] = dataclasses.field(default_factory=dict)
    buffers: dict[str, int] = dataclasses.field(default_factory=dict)


class Survey:
    """Looks at all processes of one sandbox, a few at a time if they are many or hold many things: an agent
    must not keep the watchdog from the others by what it opens and maps.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], Seen] = {}
        self._calls = 0

    @property
    def unfinished(self) -> bool:
        """Whether the last call was not through."""
        return self._calls > 0

    def held(
        self, used: list[Usage], file_system: int | None, most: int, at_once: bool = False
    ) -> Holding | None:
        """What these processes and the file system in memory (an open directory in it) hold, of a sandbox
        that may hold `most` bytes; None when it is not through yet, and goes on with the next call. After
        `MOST_CALLS`, or `at_once`, the rest counts by what is resident, and what has been seen by how much it
        has grown since. The order is random, so that nothing stays unseen for long.
        """
        ends = time.thread_time() + BUDGET_S
        self._calls += 1
        known = {(usage.pid, usage.started): usage for usage in used}
        self._seen = {key: seen for key, seen in self._seen.items() if key in known}
        grown = [key for key, seen in self._seen.items() if known[key].rss_bytes > seen.rss_bytes]
        unseen = [key for key in known if key not in self._seen]
        random.shuffle(unseen)
        whole = True
        for key in unseen + grown:
            usage = known[key]
            if time.thread_time() < ends:
                self._seen[key] = _look_at(usage, most)
            elif key in self._seen:
                before = self._seen[key]
                private = before.private + usage.rss_bytes - before.rss_bytes
                self._seen[key] = dataclasses.replace(before, private=private, rss_bytes=usage.rss_bytes)
            elif at_once or self._calls >= MOST_CALLS:
                self._seen[key], whole = Seen(usage.rss_bytes, usage.rss_bytes), False
            else:
                return None
        seen, self._seen, self._calls = self._seen, {}, 0
        shared = sum(process.shared for process in seen.values())
        files = _sum_of(process.memory_files for process in seen.values())
        private = sum(process.private for process in seen.values())
        return Holding(
            {pid: process.private + process.shared for (pid, _), process in seen.items()},
            private + max(shared, files) + _used_of(file_system),
            _sum_of(process.buffers for process in seen.values()),
            _sum_of(process.unlinked for process in seen.values()),
            whole,
        )


def open_file_system(pid: int) -> int | None:
    """An open directory in the file system that a runtime keeps in memory for the container of that process;
    None where it cannot be opened. To be closed when the container has ended: until then it keeps the memory.
    """
    with contextlib.suppress(OSError):
        devices = Path("/proc", str(pid), "root", "dev")  # as that process sees them
        return os.open(devices, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None


def _share(usage: Usage, most: int) -> tuple[int, int]:
    """(private bytes, bytes of shared memory); all that is resident of a process that is closed to us, or so
    large that the kernel would be long about it.
    """
    if usage.rss_bytes > LARGE * most:
        return usage.rss_bytes, 0
    sizes = {}
    try:
        for line in Path(f"/proc/{usage.pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size = line.split(":")
            sizes[name] = int(size.split()[0]) * 1024
    except PermissionError:
        return usage.rss_bytes, 0
    except (OSError, ValueError):
        return 0, 0  # it has ended
    shared = sizes.get("Pss_Shmem", 0)
    return sizes.get("Pss", 0) + sizes.get("SwapPss", 0) + usage.table_bytes - shared, shared


def _look_at(usage: Usage, most: int) -> Seen:
    seen = Seen(usage.rss_bytes, *_share(usage, most))
    for name, info in _descriptors(usage.pid):
        if name.startswith("socket:"):
            seen.buffers[name] = SOCKET_BYTES
        elif name.startswith("pipe:"):
            seen.buffers[name] = PIPE_BYTES
        elif info is not None:
            kind = seen.memory_files if name.startswith(SHARED_NAMES) else seen.unlinked
            kind[info.st_dev, info.st_ino] = info.st_blocks * 512
    seen.memory_files.update(_mapped_files(usage.pid))
    return seen


def _mapped_files(pid: int) -> Iterator[tuple[Identity, int]]:
    """(identity, bytes) of files in memory that a process has mapped, as far as we may look."""
    with contextlib.suppress(OSError):  # it has ended, or only root may follow these links
        places = {what: place for place, what in MAPPED.findall(Path(f"/proc/{pid}/maps").read_bytes())}
        for place in places.values():
            info = os.stat(f"/proc/{pid}/map_files/{_as_link(place.decode())}")  # noqa: PTH116
            yield (info.st_dev, info.st_ino), info.st_blocks * 512


def _as_link(addresses: str) -> str:
    """`7f00-7f01` as the links are named: without leading zeros."""
    return "-".join(f"{int(address, 16):x}" for address in addresses.split("-"))


def _descriptors(pid: int) -> Iterator[tuple[str, os.stat_result | None]]:
    """What a process has open: name, and the file if it has no name in any directory."""
    directory = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for fd in os.listdir(directory):  # noqa: PTH208
            with contextlib.suppress(OSError):  # it has been closed meanwhile
                name = os.readlink(f"{directory}/{fd}")  # noqa: PTH115
                deleted = name.endswith(" (deleted)")
                yield name, os.stat(f"{directory}/{fd}") if deleted else None  # noqa: PTH116


def _sum_of(tables: Iterable[dict[Any, int]]) -> int:
    """Each thing once, whoever has it."""
    return sum({key: size for sizes in tables for key, size in sizes.items()}.values())


def _used_of(file_system: int | None) -> int:
    if file_system is None:
        return 0
    stat = os.fstatvfs(file_system)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize + (stat.f_files - stat.f_ffree) * INODE_BYTES
