"""What a node has left for sandboxes, and whether that is enough to start another one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import SandboxError
from sandbox.processes import memory_available, memory_total

DISK, MEMORY = "disk", "memory"
MIB = 1 << 20
DISK_FLOOR = "ROLLOUT_NODE_MIN_FREE_DISK_MB"
MEMORY_FLOOR = "ROLLOUT_NODE_MIN_FREE_MEMORY_MB"
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Floors:
    """MiB that must be left for another sandbox to start; 0 = not looked at."""

    disk_mb: int = 2048
    memory_mb: int = 1024

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Floors:
        """Raises SandboxError naming the variable that makes no sense."""
        given = {}
        for field, name in (("disk_mb", DISK_FLOOR), ("memory_mb", MEMORY_FLOOR)):
            text = environment.get(name, "").strip()
            if text and not text.isdecimal():
                raise SandboxError(f"{name}={text!r}: not a whole number")
            if text:
                given[field] = int(text)
        return cls(**given)


def shortages(scratch: Path, floors: Floors, margin: float = 1.0) -> dict[str, str]:
    """What is short, `disk` or `memory`, each with a sentence that says by how much.

    Args:
        scratch: Where sandboxes write; it need not be there yet.
        margin: The floors are multiplied by it, so that what just recovered does not fall short again.
    """
    reasons = {}
    if floors.disk_mb and (mib := free_disk(scratch) // MIB) < floors.disk_mb * margin:
        reasons[DISK] = f"{mib} MiB of disk are left at {scratch}, fewer than {DISK_FLOOR}={floors.disk_mb}"
    if floors.memory_mb and (mib := free_memory() // MIB) < floors.memory_mb * margin:
        reasons[MEMORY] = f"{mib} MiB of memory are left, fewer than {MEMORY_FLOOR}={floors.memory_mb}"
    return reasons


def free_disk(path: Path) -> int:
    """Bytes that an ordinary user may still write there."""
    while not path.exists():
        path = path.parent
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def free_memory() -> int:
    """Bytes that the machine, and the cgroups (version 2) of this process, can still give."""
    return min([memory_available(), *_left_in_cgroups()])


def own_cgroup() -> str | None:
    """The version 2 cgroup of this process, relative to where they are mounted; None without one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    return next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)


def memory_limit() -> int:
    """Bytes that this process may have in all: the machine's, or what the cgroups above it allow."""
    return min([memory_total(), *(limit for _, limit in _limits())])


def _left_in_cgroups() -> list[int]:
    rooms = []
    for place, limit in _limits():
        with suppress(OSError, ValueError):
            stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
            used = int((place / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            rooms.append(max(0, limit - used))
    return rooms


def _limits() -> list[tuple[Path, int]]:
    """A Slurm job's limit is that of a cgroup above the one that its processes are in."""
    own, limits = own_cgroup(), []
    if own is None:
        return []
    place = CGROUPS / own
    while place.is_relative_to(CGROUPS):
        # The root has no such file, and a version 1 hierarchy neither.
        with suppress(OSError, ValueError):
            limit = (place / "memory.max").read_text().strip()
            if limit != "max":
                limits.append((place, int(limit)))
        place = place.parent
    return limits
