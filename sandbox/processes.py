"""Reading /proc: who is whose child, and is this pid still the process we started."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import signal
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHORT_BYTES = 64 << 10
"""A file of a process that is read at once ends before."""
_TABLES = re.compile(rb"^VmPTE:\s+(\d+) kB", re.MULTILINE)


def start_time(pid: int) -> int | None:
    """Start of the process in clock ticks since boot; None when there is none (or only its zombie).

    With the pid it names a process for good: pids are reused.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_alive(pid: int, started: int | None) -> bool:
    """Whether that very process still runs."""
    return started is not None and start_time(pid) == started


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from `state` (field 3) on; None when there is none (or only its zombie)."""
    try:
        fields = _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields if fields and fields[0] not in ("Z", "X") else None


def _read(pid: int, name: str) -> bytes:
    """A short file of a process; without what `pathlib` and buffers cost, for this is done most."""
    file = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, SHORT_BYTES)
    finally:
        os.close(file)


def children_of_all() -> dict[int, list[int]]:
    """Parent pid → pids of its children, for all processes visible here that are no zombies."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        if fields := _stat(pid):
            children.setdefault(int(fields[1]), []).append(pid)
    return children


def children(pid: int) -> list[int]:
    """Direct children of the process (of all its threads)."""
    if not _children_are_listed():
        return children_of_all().get(pid, [])
    pids: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),  # one that has ended
                open(f"/proc/{pid}/task/{thread}/children", "rb", 0) as file,  # noqa: PTH123
            ):
                pids += map(int, file.read().split())
    return pids


@functools.cache
def _children_are_listed() -> bool:
    """Not by a kernel without CONFIG_PROC_CHILDREN."""
    return Path("/proc/thread-self/children").exists()


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, nearest first, without zombies; `pid` itself is left out."""
    pids: list[int] = []
    front = [pid]
    while front:
        below = [child for parent in front for child in children(parent)]
        front = [child for child in below if _stat(child)]
        pids += front
    return pids


def above(pid: int, inner: int) -> tuple[list[int], int]:
    """Of a process's descendants the one that is `inner` in its own PID namespace, and all between the two.

    Raises ProcessLookupError when there is none.
    """
    below = descendants(pid)
    for descendant in reversed(below):
        with contextlib.suppress(OSError, StopIteration):
            status = Path(f"/proc/{descendant}/status").read_text(errors="replace").splitlines()
            names = next(line for line in status if line.startswith("NSpid:")).split()
            if int(names[-1]) != inner:
                continue
            chain, parent = [], descendant
            while (fields := _stat(parent)) and (parent := int(fields[1])) in below:
                chain.append(parent)
            return chain[::-1], descendant
    raise ProcessLookupError(f"no process below {pid} is {inner} inside")


def pid_namespace(pid: int) -> str | None:
    """Identity of the process's PID namespace, or None when it cannot be read."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None


def is_init(pid: int) -> bool:
    """Whether it is the first process of a PID namespace below ours."""
    with contextlib.suppress(OSError):
        names = re.search(rb"^NSpid:(.*)$", _read(pid, "status"), re.MULTILINE)
        return names is not None and names[1].split()[1:][-1:] == [b"1"]
    return False


def with_variable(name: str, value: str) -> list[int]:
    """Processes started with `name=value` in their environment (only those whose environment we may read)."""
    variable = f"{name}={value}".encode()
    pids = []
    for pid in all_pids():
        try:
            if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                pids.append(pid)
        except OSError:
            continue
    return pids


def group_lives(group: int) -> bool:
    """Whether a process of the group has not ended; whether it has been reaped does not matter."""
    stats = map(_stat, all_pids())
    return any(fields[2] == str(group) for fields in stats if fields)


def send(pids: list[int], number: int = signal.SIGKILL) -> None:
    """Signal each process; one that is gone already is fine."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def send_to(pid: int, started: int, number: int = signal.SIGKILL) -> None:
    """Signal that very process, and never the next of that pid."""
    try:
        process = os.pidfd_open(pid)
    except OSError:  # it is gone, or we have no descriptor left
        if is_alive(pid, started):
            send([pid], number)
        return
    try:
        if is_alive(pid, started):
            signal.pidfd_send_signal(process, number)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(process)


def all_pids() -> list[int]:
    """All processes that are visible here."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one process uses."""

    pid: int
    rss_bytes: int
    """Resident memory, in which shared pages count in full, and page tables."""
    table_bytes: int
    """Page tables: they grow by reading alone, where nothing becomes resident."""
    threads: int
    started: int
    """See :func:`start_time`."""


def usages(pid: int) -> list[Usage]:
    """The process and all its descendants; of a PID namespace, given its init or a parent of that, all."""
    all_usages = []
    pending = [pid]
    while pending:
        process = pending.pop()
        if not (fields := _stat(process)):
            continue
        tables = _table_bytes(process)
        all_usages.append(
            Usage(process, int(fields[21]) * _PAGE_BYTES + tables, tables, int(fields[17]), int(fields[19]))
        )
        pending += children(process)
    return all_usages


def _table_bytes(pid: int) -> int:
    # Of each process: its address space says nothing, for a page mapped alone may need two pages of tables.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        match = _TABLES.search(_read(pid, "status"))
        return int(match[1]) * 1024 if match else 0
    return 0


def memory_available() -> int:
    """Bytes of memory that the machine can still give (MemAvailable)."""
    return _meminfo("MemAvailable")


def memory_total() -> int:
    """Bytes of memory that the machine has."""
    return _meminfo("MemTotal")


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")
