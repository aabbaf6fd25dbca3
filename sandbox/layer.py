"""What is not as it was in a sandbox, by the layer in which the kernel keeps what changes of its image.

The layer lies on the node, beside the directories that are the sandbox's alone, and holds what was written
and nothing else: to look at it costs nothing where a walk through the image costs a tenth of a second. Only
names and what `lstat` tells are read, for all of it may be the agent's. Where there is no such layer (another
runtime, a kernel without `userxattr`), `SandboxClient.note_tree` serves.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandbox import trees
from sandbox.connection import Address
from sandbox.errors import SandboxRequestError

OPAQUE = "user.overlay.opaque"
NOTED = "noted.json"
BESIDE = {"workspace": "workspace", "home": "home/sandbox", "tmp": "tmp"}
"""Directories that are the sandbox's alone, and where they are inside."""
INSIDE = frozenset(f"/{inside}" for inside in BESIDE.values())
MAX_ENTRIES = 100_000
"""Of what changed: the sandbox's server does not tell more either."""


class Closed(Exception):
    """Directories cannot be read, as a plain user's of mode 0."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(f"{len(paths)} directories cannot be read")
        self.paths = paths
        """As they are named inside."""


@dataclass
class LayerChanges:
    """What is not as it was noted; all paths begin with `/`."""

    changed: dict[str, int] = field(default_factory=dict)
    """Path of each file, link and directory that was made or changed, and its mode."""
    removed: list[str] = field(default_factory=list)
    """What is gone, a directory with all that was in it."""
    replaced: list[str] = field(default_factory=list)
    """Directories in the place of others: of what the image has there only what is in `changed` is left."""

    @property
    def locked(self) -> list[str]:
        """What of it its owner cannot read."""
        return [path for path, mode in self.changed.items() if mode & _needed(mode) != _needed(mode)]


class Layer:
    """The layer of one sandbox. What it does reads directories: not for an event loop."""

    def __init__(self, address: Address, exclude: Collection[str] = ()) -> None:
        """`exclude`: paths inside that are nobody's."""
        own = Path(address.path).parent
        self._noted = own / NOTED
        self._scratch = own.parent / "scratch" / own.name
        self._upper = self._scratch / "overlay" / "upper"
        self._exclude = frozenset(exclude)

    @property
    def there(self) -> bool:
        """Whether the sandbox has one."""
        return self._upper.is_dir()

    def note(self) -> None:
        """Remember what is there now, as long as the sandbox lives."""
        now = {path: _identity(info, opaque) for path, info, opaque in self._walk()}
        self._noted.write_text(json.dumps(now))

    def unchanged(self) -> dict[str, bool] | None:
        """Of all that was noted, whether it is as it was; None when nothing was. For :meth:`note_again`.
        Nothing may run in the sandbox. Closed directories are looked into, and closed again.
        """
        if not self._noted.exists():
            return None
        noted = json.loads(self._noted.read_text())
        now = self._now(noted)
        return {path: identity == now.get(path) for path, identity in noted.items()}

    def note_again(self, unchanged: Mapping[str, bool]) -> None:
        """Remember of a copy what was noted of its original: what has changed is never as it was again."""
        now = self._now(unchanged)
        noted = {path: now.get(path) if same else None for path, same in unchanged.items()}
        self._noted.write_text(json.dumps(noted))

    def _now(self, noted: Collection[str]) -> dict[str, list[int]]:
        with contextlib.ExitStack() as opened:
            walk = self._walk(opened)
            return {path: _identity(info, opaque) for path, info, opaque in walk if path in noted}

    def changes(self) -> LayerChanges:
        """What is not as it was noted. Nothing may run in the sandbox.

        Raises:
            Closed: Directories cannot be read.
            SandboxRequestError: There is more than `MAX_ENTRIES` of it, or nothing was noted.
        """
        try:
            noted = json.loads(self._noted.read_text())
        except FileNotFoundError:
            raise SandboxRequestError("nothing was noted of this sandbox") from None
        changes, seen = LayerChanges(), set()
        for path, info, opaque in self._walk():
            seen.add(path)
            if noted.get(path) == _identity(info, opaque):
                continue
            if _is_whiteout(info):
                changes.removed.append(path)
            else:
                changes.changed[path] = info.st_mode
                if opaque:
                    changes.replaced.append(path)
            if len(changes.changed) + len(changes.removed) > MAX_ENTRIES:
                raise SandboxRequestError(f"more than {MAX_ENTRIES} files are not what they were")
        changes.removed += [path for path in noted if path not in seen]
        return changes

    def _walk(self, opened: contextlib.ExitStack | None = None) -> Iterator[tuple[str, os.stat_result, bool]]:
        """Path, stat and whether nothing of the image shines through, of all that the directories hold.
        `opened`: open those that are closed; its end closes them again.
        """
        closed: list[str] = []
        pending = [(f"/{inside}", self._scratch / name) for name, inside in BESIDE.items()]
        pending.append(("", self._upper))
        while pending:
            directory, place = pending.pop()
            try:
                if opened is not None and not os.access(place, os.R_OK | os.X_OK):
                    opened.enter_context(trees.open_for_now((str(place),)))
                with os.scandir(place) as scan:
                    entries = list(scan)
            except PermissionError:
                closed.append(directory)
                continue
            for entry in entries:
                path = f"{directory}/{entry.name}"
                if path in self._exclude or (path in INSIDE and place.is_relative_to(self._upper)):
                    continue
                info = entry.stat(follow_symlinks=False)
                kind, opaque = stat.S_IFMT(info.st_mode), False
                if kind == stat.S_IFDIR:
                    pending.append((path, Path(entry.path)))
                    opaque = _is_opaque(entry.path)
                if kind in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK) or _is_whiteout(info):
                    yield path, info, opaque
        if closed:
            raise Closed(closed)


def _is_opaque(directory: str) -> bool:
    try:
        return os.getxattr(directory, OPAQUE) == b"y"
    except OSError:  # it has none; or it is closed, and looked at again
        return False


def _is_whiteout(info: os.stat_result) -> bool:
    """Whether it is what the kernel puts where something of the image was removed."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _needed(mode: int) -> int:
    return 0 if stat.S_ISLNK(mode) else stat.S_IRWXU if stat.S_ISDIR(mode) else stat.S_IRUSR


def _identity(info: os.stat_result, opaque: bool) -> list[int]:
    if stat.S_ISDIR(info.st_mode):
        return [info.st_mode, opaque]  # one that INIT wrote to may be replaced by another of its mode
    return [info.st_ino, info.st_ctime_ns, info.st_size, info.st_mode]
