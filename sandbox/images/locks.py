"""Locks of the image cache: advisory `flock`s, which the kernel drops when their process ends or dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox.errors import ImageError

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
HELD = b"held"


class LocksUnsupported(ImageError):
    """Some parallel file systems are mounted without locks."""


EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB
"""Without waiting."""


def acquire(path: Path, how: int) -> int | None:
    """Open and `flock` the file, which is made if absent; None when LOCK_NB is in `how` and it is taken.

    The file may be removed by whoever holds it exclusively; then the lock of the new file counts. Raises
    LocksUnsupported on a file system without locks.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.ExitStack() as unless_held:
            unless_held.callback(os.close, fd)
            try:
                fcntl.flock(fd, how)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                raise LocksUnsupported(
                    f"the file system of {path} has no file locks ({error.strerror}); for the image cache, "
                    "set ROLLOUT_IMAGE_CACHE to a directory on a disk of this node"
                ) from error
            if _is_still(fd, path):
                unless_held.pop_all()
                return fd


def _is_still(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[int | None]:
    """Hold the lock within the block; gives the descriptor, or None as `acquire` does."""
    fd = acquire(path, how)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


class Lease(contextlib.ExitStack):
    """Keeps an unpacked image in the cache until released, which may be done twice. Ends with the process."""

    release = contextlib.ExitStack.close


class SharedLeases:
    """The leases of one process: one open file an image, however many sandboxes hold it.

    While anybody holds an image, its lease file says so in its content too. So an image that was given back
    can be told from one whose holder was killed: sandboxes may run from that until a successor adopts them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Path, tuple[int, int]] = {}

    def hold(self, path: Path, is_there: Callable[[], bool]) -> Lease | None:
        """A lease on the image of that lease file, or None if it is not there once the file is locked."""
        with self._lock:
            fd, count = self._open.get(path, (-1, 0))
            if count == 0:
                taken = acquire(path, fcntl.LOCK_SH)
                assert taken is not None
                fd = taken
                if not is_there():
                    os.close(fd)
                    return None
                os.pwrite(fd, HELD, 0)
                os.truncate(fd, len(HELD))
            elif not is_there():  # removed by hand
                return None
            touch(fd)
            self._open[path] = fd, count + 1
        lease = Lease()
        lease.callback(self._release, path)
        return lease

    def _release(self, path: Path) -> None:
        with self._lock:
            fd, count = self._open[path]
            touch(fd)
            if count > 1:
                self._open[path] = fd, count - 1
                return
            del self._open[path]
            # Only the last holder of all processes gets it exclusively and may say that nobody holds it.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.truncate(fd, 0)
                touch(fd)
            os.close(fd)


def shield(directory: Path) -> int:
    """Keep `systemd-tmpfiles` from clearing the directory while this process lives; the open lock.

    It removes what was not touched for days below /tmp and /var/tmp, file by file, but not from a directory
    on which somebody holds a `flock` (https://systemd.io/TEMPORARY_DIRECTORIES). A file system without locks
    is none that it clears.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # it is being cleared just now; the next look will find it free
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            os.close(fd)
            raise
    return fd


def touch(file: int | Path) -> None:
    """Set the time of change to now. Explicitly, for the kernel's own clock for it moves in steps of 4 ms."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def orphaned_for(fd: int) -> float | None:
    """For an exclusively locked lease file: seconds since it was first noticed that its holder was killed,
    or None if nobody was.
    """
    content = os.pread(fd, 64, 0)
    if not content:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, time.time() - float(content))
    changed = os.fstat(fd)
    stamp = f"{time.time():.0f}".encode()
    os.truncate(fd, 0)
    os.pwrite(fd, stamp, 0)
    os.utime(fd, ns=(changed.st_atime_ns, changed.st_mtime_ns))  # still the time of its last use
    return 0.0
