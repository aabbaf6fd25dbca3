"""Directory trees that a sandbox wrote: removing and measuring them, whatever it did to them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandbox import paths

log = logging.getLogger(__name__)

BLOCK_BYTES = 512  # unit of st_blocks (POSIX)
MOST_CLOSED = 64  # directories closed to their owner; each is opened again for all that lies below it

STEP = 200  # entries: about a millisecond


def remove(path: Path) -> None:
    """Remove a tree whatever the sandbox did to it: closed directories, any depth. Errors are logged.

    Symbolic links are removed, never followed.
    """
    if not os.path.lexists(path):
        return
    try:
        shutil.rmtree(path)
        return
    except (OSError, RecursionError):
        pass  # it has closed directories, or is deeper than Python walks
    tool_env = {"PATH": paths.tool_path(), "LC_ALL": "C"}
    for command in (["chmod", "-R", "u+rwx", "--", path], ["rm", "-rf", "--one-file-system", "--", path]):
        process = subprocess.run(command, env=tool_env, capture_output=True, check=False)
    if os.path.lexists(path):
        log.error("cannot remove %s: %s", path, process.stderr.decode(errors="replace").strip()[-500:])


def usage(root: Path, most_bytes: int, most_entries: int) -> tuple[int, int]:
    """(bytes on disk, number of entries) below `root`; stops counting when either is above its most."""
    *_, (total, entries, _) = counting(root, most_bytes, most_entries)
    return total, entries


def counting(root: Path, most_bytes: int, most_entries: int) -> Iterator[tuple[int, int, bool]]:
    """:func:`usage` step by step, for who cannot wait: what it has come to, and whether that is all.

    A tree that is deeper than a path can be long counts as too many entries, and so does one with many
    directories that are closed even to their owner: nobody needs one, and they could not be counted.
    """
    total = entries = 0
    linked: set[tuple[int, int]] = set()
    for info in _entries(root):
        if info is None:
            yield total, most_entries + 1, True
            return
        entries += 1
        if entries % STEP == 0:
            yield total, entries, False
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            identity = (info.st_dev, info.st_ino)
            if identity in linked:
                continue
            linked.add(identity)
        total += info.st_blocks * BLOCK_BYTES
        if total > most_bytes or entries > most_entries:
            break
    yield total, entries, True


def _entries(root: Path) -> Iterator[os.stat_result | None]:
    """All entries below; None for what cannot be looked into."""
    pending: list[tuple[str, tuple[str, ...]]] = [(str(root), ())]  # with the closed ones on the way to it
    most = MOST_CLOSED
    while pending:
        directory, closed = pending.pop()
        try:
            try:
                scan = _scan(directory, closed)
            except PermissionError:  # closed by the agent: what lies in it takes space all the same
                most -= 1
                if most < 0:
                    yield None
                    return
                closed = (*closed, directory)
                scan = _scan(directory, closed)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                yield None
            continue  # else removed meanwhile
        with scan:
            while batch := list(itertools.islice(scan, STEP)):
                for path, info in _look_at(batch, closed):
                    if info is not None and stat.S_ISDIR(info.st_mode):
                        pending.append((path, closed))
                    yield info


def _scan(directory: str, closed: tuple[str, ...]) -> Any:
    """Its entries (of `os.scandir`). Raises PermissionError also where only their names may be read."""
    with open_for_now(closed):
        scan = os.scandir(directory)
        if os.access(directory, os.X_OK):
            return scan
        scan.close()
        raise PermissionError(errno.EACCES, "cannot look into", directory)


def _look_at(batch: list[os.DirEntry], closed: tuple[str, ...]) -> list[tuple[str, os.stat_result | None]]:
    """What these are; none of the directories stays open while the count is not going on."""
    infos: list[tuple[str, os.stat_result | None]] = []
    with contextlib.suppress(OSError), open_for_now(closed):  # one may have been removed
        for entry in batch:
            try:
                infos.append((entry.path, entry.stat(follow_symlinks=False)))
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    infos.append((entry.path, None))
    return infos


@contextlib.contextmanager
def open_for_now(closed: tuple[str, ...]) -> Iterator[None]:
    """Let us into directories of ours that are closed even to ourselves, each below the one before; in the
    end they are closed again, but for those whose mode the agent has set meanwhile.
    """
    with contextlib.ExitStack() as after:
        for directory in closed:
            # By descriptor, so that what was a directory cannot be a link to another when its mode is set.
            fd = os.open(directory, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY)
            after.callback(os.close, fd)
            itself, mode = Path(f"/proc/self/fd/{fd}"), stat.S_IMODE(os.fstat(fd).st_mode)
            opened = mode | stat.S_IRUSR | stat.S_IXUSR
            if opened != mode:
                itself.chmod(opened)
                after.callback(_close_again, itself, opened, mode)
        yield


def _close_again(directory: Path, opened: int, mode: int) -> None:
    if stat.S_IMODE(directory.stat().st_mode) == opened:
        directory.chmod(mode)
