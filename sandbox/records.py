"""What the host writes down of each container, so that a host that follows a killed one can take it over."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import msgspec

from sandbox import processes
from sandbox.spec import Limits, SandboxInfo, SandboxSpec

PAGE_BYTES = 4096


@dataclasses.dataclass
class Record:
    """One container on disk: enough to end it, and once `info` is there, enough to adopt it."""

    id: str
    runtime: str
    run_as: int | None
    boot_id: str
    pid: int | None = None
    start_time: int | None = None
    """With the pid, names the process for good."""
    protected: list[int] = dataclasses.field(default_factory=list)
    """Processes of the runtime and the server, which the watchdog must not end."""
    spec: SandboxSpec | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    rootfs: str | None = None
    deadline: float | None = None
    """Seconds of CLOCK_BOOTTIME; None = not claimed by anybody yet."""
    info: SandboxInfo | None = None

    def is_running(self) -> bool:
        """Whether its first process is that of this boot of the machine and alive."""
        return (
            self.boot_id == boot_id()
            and self.pid is not None
            and processes.is_alive(self.pid, self.start_time)
        )

    def may_be_adopted(self) -> bool:
        """Whether somebody was given the sandbox, it still runs and its time is not over."""
        return self.info is not None and self.is_running() and (self.deadline or 0) > now()


class Records:
    """The directory of records. Each write replaces the whole content."""

    def __init__(self, directory: Path):
        self._directory = directory

    def write(self, record: Record) -> None:
        """Write it; who comes after us sees the old one or the new one."""
        content, path = msgspec.json.encode(record), self._path(record.id)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            content = content.ljust(os.fstat(file).st_size)
            if len(content) <= PAGE_BYTES:  # of which a process that is killed has written all or nothing
                os.pwrite(file, content, 0)
                return
        finally:
            os.close(file)
        # ext4 has a file on the disk before it lets it take another one's name.
        temporary = path.with_suffix(".new")
        temporary.write_bytes(content)
        temporary.rename(path)

    def remove(self, sandbox_id: str) -> None:
        """Forget it; harmless when there is none."""
        self._path(sandbox_id).unlink(missing_ok=True)

    def all(self) -> list[Record]:
        """All records; one that cannot be read yields only its id."""
        records = []
        for path in self._directory.glob("*.json"):
            try:
                records.append(msgspec.json.decode(path.read_bytes(), type=Record))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                records.append(Record(path.stem, "", None, ""))
        return records

    def _path(self, sandbox_id: str) -> Path:
        return self._directory / f"{sandbox_id}.json"


def boot_id() -> str:
    """Names this boot of the machine: pids and CLOCK_BOOTTIME of another mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def now() -> float:
    """Seconds since the machine started, the same for every host on it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
