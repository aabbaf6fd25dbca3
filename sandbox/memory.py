"""Memory that a sandbox holds, as far as it can be seen from outside: of its processes, and of no process.

What no cgroup counts for us is added up: private memory, swapped or not; shared memory, which stays in its
file though nobody maps it any more; and the file system that Apptainer keeps in memory for each container.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from sandbox.processes import Usage

INODE_BYTES = 1024
"""What the kernel needs for a file in memory that has no content; about."""
SOCKET_BYTES, PIPE_BYTES = 208 << 10, 64 << 10
"""The most that lies unread in a socket and a pipe, by the kernel's defaults."""
SHARED_NAMES = ("/memfd:", "/dev/zero (deleted)", "/SYSV")
"""In the maps of a process: files that are memory, of memfd_create, mmap and shmget."""


@dataclasses.dataclass(frozen=True)
class Holding:
    """What one sandbox holds, in bytes."""

    shares: dict[int, int]
    """Process → its memory, each shared page divided by the number of those who share it."""
    total: int
    """And what is in no process."""


def held(used: list[Usage], file_system: int | None) -> Holding:
    """What these processes and the file system in memory (an open directory in it) hold."""
    shares, private, shared = {}, 0, 0
    for one in used:
        own, common = _share(one)
        shares[one.pid] = own + common
        private, shared = private + own, shared + common
    files: dict[tuple[int, int], int] = {}
    for one in used:
        files.update(_memory_files(one.pid))
    return Holding(shares, private + max(shared, sum(files.values())) + _used_of(file_system))


def possible_buffers(used: list[Usage]) -> int:
    """The most that may lie in the sockets and pipes of these processes; nothing shows how much does."""
    sizes: dict[str, int] = {}
    for one in used:
        for name, _ in _descriptors(one.pid):
            if name.startswith("socket:"):
                sizes[name] = SOCKET_BYTES
            elif name.startswith("pipe:"):
                sizes[name] = PIPE_BYTES
    return sum(sizes.values())


def unlinked_bytes(pids: list[int]) -> int:
    """Bytes on disk in files that these processes hold open though no directory names them any more."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        for name, info in _descriptors(pid):
            if info is not None and name.endswith(" (deleted)") and not name.startswith(SHARED_NAMES):
                sizes[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(sizes.values())


def open_file_system(pid: int) -> int | None:
    """An open directory in the file system that a runtime keeps in memory for the container of that process;
    None where it cannot be opened. To be closed when the container has ended: until then it keeps the memory.
    """
    with contextlib.suppress(OSError):
        return os.open(f"/proc/{pid}/root/dev", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return None


def _share(one: Usage) -> tuple[int, int]:
    """(private bytes, bytes of shared memory); of a process that is closed to us all that is resident."""
    sizes = {}
    try:
        for line in Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size = line.split(":")
            sizes[name] = int(size.split()[0]) * 1024
    except PermissionError:
        return one.rss_bytes, 0
    except (OSError, ValueError):
        return 0, 0  # it has ended
    shared = sizes.get("Pss_Shmem", 0)
    return sizes.get("Pss", 0) + sizes.get("SwapPss", 0) - shared, shared


def _memory_files(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """(identity, bytes) of files in memory that a process has open or, as far as we may look, mapped."""
    for name, info in _descriptors(pid):
        if info is not None and name.startswith(SHARED_NAMES[0]):
            yield (info.st_dev, info.st_ino), info.st_blocks * 512
    with contextlib.suppress(OSError):  # it has ended, or only root may follow these links
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[1].endswith("s") and fields[5].startswith(SHARED_NAMES):
                info = os.stat(f"/proc/{pid}/map_files/{_as_link(fields[0])}")  # noqa: PTH116
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


def _used_of(file_system: int | None) -> int:
    if file_system is None:
        return 0
    found = os.fstatvfs(file_system)
    return (found.f_blocks - found.f_bfree) * found.f_frsize + (found.f_files - found.f_ffree) * INODE_BYTES
