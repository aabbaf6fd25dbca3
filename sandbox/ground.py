"""Places of the machine by what they are and not by their names, for a mount may show one in two places."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

Identity = tuple[int, int]


def identity(path: Path) -> Identity:
    """Device and inode. Raises OSError."""
    info = path.stat()
    return info.st_dev, info.st_ino


def overlap(path: Path, places: Iterable[Path]) -> Path | None:
    """The first of the places that `path` is, lies in or holds; None = it keeps clear of all.

    A place that is not there is compared by its name.
    """
    path = path.resolve()
    own = _line(path)
    for place in places:
        place = place.resolve()
        line = _line(place)
        if line[0] in own or own[0] in line:
            return place
    return None


def _line(path: Path) -> list[Identity | str]:
    """The path and all above it, nearest first."""
    found: list[Identity | str] = []
    for one in (path, *path.parents):
        try:
            found.append(identity(one))
        except OSError:
            found.append(str(one))
    return found
