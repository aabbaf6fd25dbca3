"""Reads the archive of ended rollouts: JSON lines in gzip files, one `Rollout` a line.

A file is a row of gzip members, each written whole; only the last one can be cut, by a crash, and then what
it held is in the next file. A rollout may be in the archive twice, with the same content; it is read once.
"""

from __future__ import annotations

import io
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rollout.schema import Rollout

log = logging.getLogger("rollout")

SUFFIX = ".jsonl.gz"
OPEN_SUFFIX = SUFFIX + ".open"
"""Of the file that is being written."""
_GZIP = 31
"""`wbits` of a gzip member."""
_READ_BYTES = 1 << 20


def files(directory: Path) -> list[Path]:
    """The archive's files in the order in which they were begun.

    Raises:
        NotADirectoryError: There is no such directory.
    """
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is no directory; give the one that ROLLOUT_ARCHIVE_DIR names")
    # The open one first: one that is closed meanwhile is then listed twice, and never not at all.
    return sorted([*directory.glob(f"*{OPEN_SUFFIX}"), *directory.glob(f"*{SUFFIX}")])


def _opened(path: Path) -> BinaryIO:
    """The file, by its last name where it was closed since it was listed. An empty one is removed then."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        closed = path.with_name(path.name.removesuffix(OPEN_SUFFIX) + SUFFIX)
        return closed.open("rb") if closed.exists() else io.BytesIO()


def members(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole members of a file: where each ends, and its text. A member that was cut is left out."""
    end = 0
    with _opened(path) as file:
        rest = b""
        while True:
            unpack, pieces, taken = zlib.decompressobj(_GZIP), [], 0
            while not unpack.eof:
                if not rest and not (rest := file.read(_READ_BYTES)):
                    if taken:
                        log.warning("%s: the last %d bytes were cut; they are in the next file", path, taken)
                    return
                try:
                    pieces.append(unpack.decompress(rest))
                except zlib.error as error:
                    log.warning("%s: what follows byte %d cannot be read: %s", path, end, error)
                    return
                taken += len(rest) - len(unpack.unused_data)
                rest = unpack.unused_data
            end += taken
            yield end, b"".join(pieces)


def read(directory: Path) -> Iterator[Rollout]:
    """Every rollout of an archive once, in the order of completion.

    Remembers the ids it has seen, about 100 bytes each.

    Raises:
        NotADirectoryError: There is no such directory.
        pydantic.ValidationError: A newer version of the service wrote it.
    """
    seen: set[str] = set()
    for path in files(directory):
        for _, text in members(path):
            for line in text.splitlines():
                rollout = Rollout.model_validate_json(line)
                if rollout.id not in seen:
                    seen.add(rollout.id)
                    yield rollout
