"""Directory trees that a sandbox wrote: removing and measuring them, whatever it did to them."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

BLOCK_BYTES = 512  # unit of st_blocks (POSIX)


def remove(path: Path) -> None:
    """Remove a tree whatever permissions the sandbox gave its directories; errors are logged."""

    def open_up(function: object, name: str, error: object) -> None:
        entry = Path(name)
        for directory in (entry.parent, entry):
            if directory.is_dir() and not directory.is_symlink():
                directory.chmod(0o700)
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, onerror=None if entry == path else open_up)
        else:
            entry.unlink()

    if path.exists():
        try:
            shutil.rmtree(path, onerror=open_up)
        except OSError as error:
            log.error("cannot remove %s: %s", path, error)


def usage(root: Path, most_bytes: int, most_entries: int) -> tuple[int, int]:
    """(bytes on disk, number of entries) below `root`; stops counting when either is above its most."""
    total = entries = 0
    linked: set[tuple[int, int]] = set()
    for info in _entries(root):
        entries += 1
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            identity = (info.st_dev, info.st_ino)
            if identity in linked:
                continue
            linked.add(identity)
        total += info.st_blocks * BLOCK_BYTES
        if total > most_bytes or entries > most_entries:
            break
    return total, entries


def _entries(root: Path) -> Iterator[os.stat_result]:
    pending = [str(root)]
    while pending:
        directory = pending.pop()
        try:
            names = _scan(directory)
        except OSError:
            continue  # removed meanwhile
        for entry in names:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(info.st_mode):
                pending.append(entry.path)
            yield info


def _scan(directory: str) -> list[os.DirEntry[str]]:
    """Also of a directory that the agent has closed: what lies in it takes space all the same."""
    try:
        with os.scandir(directory) as found:
            return list(found)
    except PermissionError:
        mode = stat.S_IMODE(os.lstat(directory).st_mode)
        Path(directory).lchmod(mode | stat.S_IRUSR | stat.S_IXUSR)
        try:
            with os.scandir(directory) as found:
                return list(found)
        finally:
            Path(directory).lchmod(mode)
