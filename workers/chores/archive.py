"""Writes ended rollouts to the archive: in every worker that has its directory; the elected one does it.

A batch is appended and synced before the cursor in Redis moves. So a crash in between writes some rollouts
twice, and never loses one.
"""

from __future__ import annotations

import gzip
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

import redis

from rollout.archive import OPEN_SUFFIX, SUFFIX, members
from services.state import keys
from services.state.results.stream import ResultStream
from workers.chores.base import Chore
from workers.services import WorkerServices

BATCH = 32
"""Rollouts of one gzip member: a long trajectory is 1 MB of JSON, and a batch is held in memory."""
LEVEL = 6
LONGEST_OPEN_S = 3600.0
"""A file is closed after that long, however small, so that readers of closed files are not far behind."""
FAULT_PAUSE_S = 10.0


class ArchiveFile:
    """The file that is being written."""

    def __init__(self, directory: Path, cursor: str) -> None:
        """
        Args:
            cursor: The result before the first one in it.
        """
        # The token keeps two writers apart, should one have been stopped while it thought itself elected.
        millis, _, number = cursor.partition("-")
        place = f"{int(millis):015d}-{int(number or 0):06d}"  # sorts as text as it does as a cursor
        self.path = directory / f"rollouts-{place}-{secrets.token_hex(3)}{OPEN_SUFFIX}"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o640)
        self.bytes = 0
        self._opened = time.monotonic()
        _sync_directory(directory)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._opened

    def append(self, packed: bytes) -> None:
        """Write one member and wait until the disk has it.

        Raises:
            OSError: It has not; the file is as it was before.
        """
        try:
            rest = memoryview(packed)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fsync(self._fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self.bytes)
            raise
        self.bytes += len(packed)

    def close(self) -> None:
        """Let go of it as it is; whoever is elected next gives it its name."""
        os.close(self._fd)

    def seal(self) -> None:
        """Close it for good."""
        self.close()
        seal(self.path)


def seal(path: Path) -> None:
    """Give a file its final name, without what a crash has left of a member at its end."""
    whole = 0
    for whole, _ in members(path):  # noqa: B007 (the last one counts)
        pass
    if whole == 0:
        path.unlink()
        return
    if whole < path.stat().st_size:
        os.truncate(path, whole)
    path.rename(path.with_name(path.name.removesuffix(OPEN_SUFFIX) + SUFFIX))
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Archiver(Chore):
    """Follows the results with a cursor of its own."""

    name = "archive"
    setting = "archive_dir"
    lock = keys.ARCHIVE_LOCK

    def __init__(self, services: WorkerServices) -> None:
        """
        Raises:
            OSError: The directory cannot be made or written to.
        """
        super().__init__(services)
        settings = services.settings
        self._redis = services.redis
        self._results = ResultStream(services.redis)
        self._directory = Path(settings.archive_dir)
        self._file_bytes = settings.archive_file_bytes
        self._kept_ms = int(settings.retention_s * 1000)
        self._elected = False
        self._file: ArchiveFile | None = None
        self._directory.mkdir(parents=True, exist_ok=True)
        if not os.access(self._directory, os.W_OK):
            raise PermissionError(f"ROLLOUT_ARCHIVE_DIR={self._directory} is not writable for this user")

    def tick(self) -> float | None:
        """Archive what has ended; the disk failing is waited out."""
        try:
            if not self._elected:
                for path in sorted(self._directory.glob(f"*{OPEN_SUFFIX}")):
                    seal(path)
                self._elected = True
            # From the beginning at first: what ended before the archive was set up comes along.
            self._redis.set(keys.ARCHIVE_CURSOR, "0-0", nx=True)
            while self._batch() == BATCH and not self.stopping.is_set() and self.election.won():
                pass
            if self._file is not None and self._file.age_s > LONGEST_OPEN_S:
                self._rotate()
        except OSError as error:
            self._count("archive_errors")
            self.log.error("nothing is archived now; it is tried again", error=str(error))
            return FAULT_PAUSE_S
        return None

    def stand_by(self) -> None:
        self._elected = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.seal()

    def _batch(self) -> int:
        """Archive what ended next; how much that was."""
        cursor = self._redis.get(keys.ARCHIVE_CURSOR) or "0-0"
        ids, after = self._results.since(cursor, limit=BATCH)
        if not ids:
            # Expires when nobody archives any more, so that nothing waits for the archive then.
            self._redis.pexpire(keys.ARCHIVE_CURSOR, self._kept_ms)
            return 0
        if cursor != "0-0" and self._results.missed(cursor):
            self.log.warning("results went past their retention before they were archived", cursor=cursor)
            self._count("archive_missed")
        rollouts = list(self._services.store.get_many(ids))
        if len(rollouts) < len(ids):
            gone = sorted(set(ids) - {item.id for item in rollouts})
            self.log.warning("rollouts went past their retention before they were archived", ids=gone)
            self._count("archive_missed", len(gone))
        if rollouts:
            text = b"".join(item.model_dump_json().encode() + b"\n" for item in rollouts)
            self._append(gzip.compress(text, LEVEL, mtime=0), cursor)
        self._redis.set(keys.ARCHIVE_CURSOR, after, px=self._kept_ms)
        self._count("archived", len(rollouts))
        return len(ids)

    def _append(self, packed: bytes, cursor: str) -> None:
        if self._file is None:
            self._file = ArchiveFile(self._directory, cursor)
        self._file.append(packed)
        self._count("archived_bytes", len(packed))
        if self._file.bytes >= self._file_bytes:
            self._rotate()

    def _rotate(self) -> None:
        file, self._file = self._file, None
        file.seal()

    def _count(self, name: str, by: int = 1) -> None:
        with suppress(redis.RedisError):
            self._redis.hincrby(keys.RESULTS_TOTALS, name, by)
