"""The snapshots of a node: names, quota, retention. Each is a directory with its manifest and its files."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox import paths
from sandbox.errors import SnapshotError
from sandbox.snapshots.copying import MANIFEST
from sandbox.snapshots.manifest import Manifest, read

log = logging.getLogger(__name__)

FILES = "files"
PACKED_FILES = f"{FILES}.tar"
UNFINISHED = "."


@dataclasses.dataclass(eq=False)
class Kept:
    """One of them."""

    place: Path
    name: str
    owner: str
    size: int
    taken_at: float
    users: int = 0
    """Sandboxes that are being begun with it; until then it stays."""
    gone: bool = False


class Store:
    """Used from the host's event loop; what takes long is left to `remove`."""

    def __init__(self, place: Path, most_bytes: int, most_s: float, remove: Callable[[Path], object]) -> None:
        """`remove` removes a tree soon."""
        self.place = place
        self._most_bytes = most_bytes
        self._most_s = most_s
        self._remove = remove
        self._kept: dict[str, Kept] = {}

    def open(self) -> None:
        """Find what an earlier host kept; remove what it had not finished."""
        manifests = []
        for place in self.place.glob("*"):
            try:
                if place.name.startswith(UNFINISHED):
                    raise SnapshotError("it was not finished")
                manifests.append((place, read((place / MANIFEST).read_bytes())))
            except (OSError, SnapshotError) as error:
                log.warning("snapshot %s is removed: %s", place, error)
                self._remove(place)
        for place, manifest in sorted(manifests, key=lambda entry: entry[1].taken_at):
            self._add(place, manifest)

    def begin(self, owner: int | None) -> Path:
        """A new directory for one that is about to be taken, whose files shall be `owner`'s."""
        paths.own_directory(self.place, 0o700)
        place = self.place / f"{UNFINISHED}{secrets.token_hex(8)}"
        (place / FILES).mkdir(parents=True, mode=0o700)
        if owner is not None:
            os.chown(place / FILES, owner, owner)
            place.chmod(0o711)  # for that user's programs, begun from within; the store is closed to them
        return place

    def finish(self, place: Path, manifest: Manifest, text: bytes) -> None:
        """Have it, under its name, from now on; another of that name is dropped. `text`: the manifest's."""
        (place / MANIFEST).write_bytes(text)
        self._add(place.rename(self.place / place.name.removeprefix(UNFINISHED)), manifest)
        self.make_room("", 0)  # others may have been taken at the same time

    @contextlib.contextmanager
    def used(self, name: str) -> Iterator[Path]:
        """The directory of one, which is not removed meanwhile. Raises SnapshotError when there is none."""
        if (kept := self._kept.get(name)) is None:
            raise SnapshotError(f"no snapshot {name!r} is kept on this node (any more)")
        kept.users += 1
        try:
            yield kept.place
        finally:
            kept.users -= 1
            self._remove_if_gone(kept)

    def forget(self, owner: str) -> int:
        """Drop all of that owner; returns how many."""
        return self._drop([kept for kept in self._kept.values() if kept.owner == owner], "forgotten")

    def make_room(self, name: str, size: int) -> None:
        """Drop the oldest until one of that size may be kept, in the place of its like; SnapshotError when it
        never may.
        """
        most = self._most_bytes
        if size > most:
            quota = f"ROLLOUT_SANDBOX_SNAPSHOTS_MB={most >> 20}"
            raise SnapshotError(f"{size >> 20} MiB are more than {quota}")
        others = [kept for kept in self._kept.values() if kept.name != name]
        while sum(kept.size for kept in others) + size > most:
            self._drop([others.pop(0)], "dropped for others")

    def tidy(self, short: bool) -> None:
        """Drop what was kept long enough, and the oldest while the node is short of disk."""
        before = time.time() - self._most_s
        self._drop([kept for kept in self._kept.values() if kept.taken_at < before], "dropped with time")
        if short and self._kept:
            self._drop([next(iter(self._kept.values()))], "dropped for want of disk")

    @property
    def size(self) -> int:
        """What all of them were on disk, which is more than they are where blocks are shared."""
        return sum(kept.size for kept in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def _add(self, place: Path, manifest: Manifest) -> None:
        if before := self._kept.get(manifest.name):
            self._drop([before], "replaced")
        packed = place / PACKED_FILES
        # What names take is in no block of the files.
        size = max(manifest.bytes, packed.stat().st_size if packed.exists() else 0)
        kept = Kept(place, manifest.name, manifest.owner, size, manifest.taken_at)
        self._kept[kept.name] = kept  # in the order of time

    def _drop(self, dropped: list[Kept], why: str) -> int:
        for kept in dropped:
            log.info("snapshot %s of %r is %s", kept.name, kept.owner, why)
            del self._kept[kept.name]
            kept.gone = True
            self._remove_if_gone(kept)
        return len(dropped)

    def _remove_if_gone(self, kept: Kept) -> None:
        if kept.gone and not kept.users:
            self._remove(kept.place)
