"""The node's cache of unpacked images: a quota, and the least recently used goes first.

For an image of key K there lie in the cache's directory
  K/               the tree, complete from the moment it has this name
  K.json           what it takes and what it came from
  K.lock           locked exclusively by whoever makes or removes the tree
  K.lease          locked shared by whoever runs sandboxes from it; its time of change is the last use
  .K.unpacking/    under way if K.lock is locked; else left by a process that was killed, and replaced
  .K.removing/     under way if `quota.lock` is locked; else left likewise
  .guard           its time of change is when a process last kept the system from clearing the cache
`quota.lock` is held while space is reckoned up and made. Locks are taken in the order K.lock, quota.lock, and
others' K.lock and K.lease without waiting.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sandbox import paths, trees
from sandbox.errors import ImageError
from sandbox.images import locks
from sandbox.images.locks import EXCLUSIVE

GB = 10**9
DEFAULT_QUOTA_GB = 50.0
ORPHAN_GRACE_S = 600.0
"""How long the images of a killed host are kept for the sandboxes it left, until another host adopts them."""
STALE_NOTES_S = 3600.0  # a write takes milliseconds
GUARD_EVERY_S = 3600.0
UNGUARDED_MOST_S = 9 * 86400.0
"""systemd-tmpfiles takes files away that were not touched for 10 days (/tmp) or 30 (/var/tmp)."""
KEY = re.compile(r"[0-9a-f]{20}(-\d+)?")


def default_quota() -> int:
    """Bytes, from `ROLLOUT_IMAGE_CACHE_GB` (1 GB = 10⁹ bytes). Raises ImageError when that makes no sense."""
    text = os.environ.get("ROLLOUT_IMAGE_CACHE_GB", "").strip()
    with contextlib.suppress(ValueError, OverflowError):
        quota = int(float(text or DEFAULT_QUOTA_GB) * GB)
        if quota > 0:
            return quota
    raise ImageError(f"ROLLOUT_IMAGE_CACHE_GB={text!r} must be a number above 0")


@dataclass(frozen=True)
class Cached:
    """An unpacked image."""

    key: str
    tree: Path
    bytes: int
    """Disk space."""
    source: str | None
    """The file it was unpacked from first; None if that is not known."""
    last_used: float
    """Seconds since 1970."""
    in_use: str | None = None
    """Why it may not be evicted now; None = it may."""


class ImageCache:
    """Trees by key. Thread- and process-safe; blocking."""

    def __init__(self, directory: Path, quota: int | None = None):
        """`quota`: bytes; None = `ROLLOUT_IMAGE_CACHE_GB`, read when it is needed."""
        self.directory = directory
        self._quota = quota
        self._leases = locks.SharedLeases()
        self._shield: int | None = None
        self._guarded_at = float("-inf")

    @property
    def quota(self) -> int:
        """Bytes that all trees together may take."""
        return default_quota() if self._quota is None else self._quota

    def make(self) -> None:
        """Make the directory. Raises SandboxError when it is somebody else's."""
        # The sandboxes of root run as another user and pass through.
        paths.own_directory(self.directory, 0o711 if os.geteuid() == 0 else 0o700)
        self.guard()

    def guard(self) -> None:
        """Keep the system from clearing the cache while this process lives; to be called now and then.

        What lay unguarded so long that files of it may be gone is evicted, to be unpacked again.
        """
        now = time.monotonic()
        if now - self._guarded_at < GUARD_EVERY_S or not self.directory.is_dir():
            return
        first, self._guarded_at = self._shield is None, now
        shield = locks.shield(self.directory)
        if self._shield is not None:
            os.close(self._shield)
        self._shield = shield
        mark = self.directory / ".guard"
        unguarded_s = time.time() - mark.stat().st_mtime if mark.exists() else 0.0
        mark.touch(0o600)
        if first and unguarded_s > UNGUARDED_MOST_S:
            self.prune(everything=True)

    def tree(self, key: str) -> Path:
        """Where the image lies, or would."""
        return self.directory / key

    def key_of(self, path: Path) -> str | None:
        """The key of the tree that `path` is or lies in; None if it is not in the cache."""
        base = self.directory if path.is_relative_to(self.directory) else self.directory.resolve()
        if path.is_relative_to(base) and path != base:
            name = path.relative_to(base).parts[0]
            return name if KEY.fullmatch(name) else None
        return None

    # -- use -----------------------------------------------------------------------------

    def touch(self, key: str) -> None:
        """The image is being used."""
        lease = self._file(key, "lease")
        try:
            locks.touch(lease)
        except FileNotFoundError:
            os.close(os.open(lease, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def hold(self, key: str) -> locks.Lease | None:
        """Keep the tree from being evicted; None if it is not there (any more)."""
        return self._leases.hold(self._file(key, "lease"), self.tree(key).is_dir)

    def fill(self, key: str, source: Path, need: int, unpack: Callable[[Path, int], int | None]) -> Path:
        """The tree, made by `unpack(directory, lock)` unless it is there; `need`: bytes it will take, if
        `unpack` does not return what it took.

        Concurrent callers wait for the first. Raises ImageError, e.g. when there is no room for it.
        """
        tree, unpacking = self.tree(key), self._hidden(key, "unpacking")
        with locks.locked(self._file(key, "lock")) as lock:
            assert lock is not None
            if tree.is_dir():
                return tree
            with locks.locked(self.directory / "quota.lock"):
                self._remove(unpacking)
                self._sweep()
                self._make_room(need, source)
                unpacking.mkdir(0o700)
                write_json(self._file(key, "json"), {"bytes": need, "source": str(source)})
            try:
                taken = unpack(unpacking, lock)
                if taken is not None:
                    write_json(self._file(key, "json"), {"bytes": taken, "source": str(source)})
                unpacking.chmod(0o755)
                unpacking.rename(tree)
            except BaseException:
                self._remove(unpacking)
                self._file(key, "json").unlink(missing_ok=True)
                raise
            self.touch(key)
        return tree

    # -- space ---------------------------------------------------------------------------

    def entries(self) -> list[Cached]:
        """All complete trees, the least recently used first, each with why it may not go."""
        if not self.directory.is_dir():
            return []
        with locks.locked(self.directory / "quota.lock"):
            return self._entries()

    def _entries(self) -> list[Cached]:
        """Under `quota.lock`: for it takes each image's locks, which would look like use to another."""
        entries = []
        for key in self._keys():
            with self._idle(key) as in_use:
                if self.tree(key).is_dir():
                    entries.append(self._describe(key, in_use))
        return sorted(entries, key=lambda cached: cached.last_used)

    def prune(self, everything: bool = False, dry_run: bool = False) -> list[Cached]:
        """Evict down to the quota, or everything, but never what is in use; and clear away what killed
        processes left. Returns what was (or would be) evicted.
        """
        self.make()
        with locks.locked(self.directory / "quota.lock"):
            if not dry_run:
                self._sweep()
                self._sweep_files()
            entries = self._entries()
            total = sum(cached.bytes for cached in entries) + self._reserved()
            evicted = []
            for cached in entries:
                if not everything and total <= self.quota:
                    break
                if cached.in_use is None and (dry_run or self._evict(cached.key)):
                    total -= cached.bytes
                    evicted.append(cached)
        return evicted

    def _make_room(self, need: int, source: Path) -> None:
        """Under `quota.lock`: evict until `need` bytes fit the quota and the disk, or raise ImageError."""
        reserved = self._reserved()
        quota = self.quota
        entries = self._entries()
        while True:
            total = sum(cached.bytes for cached in entries)
            # What others are unpacking is partly written and thus counted twice, to be safe.
            free = shutil.disk_usage(self.directory).free - reserved
            if total + reserved + need <= quota and need <= free:
                return
            idle = [cached for cached in entries if cached.in_use is None]
            # An image that can never fit shall not empty the cache.
            if need > quota or not idle:
                break
            self._evict(idle[0].key)
            entries = [cached for cached in entries if cached.tree.is_dir() and cached is not idle[0]]
        if need > free:
            raise ImageError(
                f"unpacking {source} needs {size_text(need)}, but only {size_text(max(free, 0))} are free in "
                f"{self.directory} and nothing more in it can be evicted; free some, or set "
                "ROLLOUT_IMAGE_CACHE to a directory on a larger disk"
            )
        used = size_text(total + reserved)
        raise ImageError(
            f"unpacking {source} needs {size_text(need)}, but the quota of the image cache "
            f"{self.directory} is {size_text(quota)}, of which {used} are in use; raise "
            "ROLLOUT_IMAGE_CACHE_GB, or run fewer different images on this node at a time"
        )

    def _evict(self, key: str) -> bool:
        """Under `quota.lock`: remove the tree unless somebody uses it."""
        removing = self._hidden(key, "removing")
        with self._idle(key) as in_use:
            if in_use:
                return False
            self._remove(removing)
            tree = self.tree(key)
            with contextlib.suppress(PermissionError):
                tree.chmod(0o700)
            tree.rename(removing)
            self._file(key, "json").unlink(missing_ok=True)
        self._remove(removing)
        return True

    def _reserved(self) -> int:
        """Under `quota.lock`: bytes of the trees that are being unpacked."""
        keys = (path.name[1 : -len(".unpacking")] for path in self.directory.glob(".*.unpacking"))
        return sum(int(read_json(self._file(key, "json")).get("bytes", 0)) for key in keys)

    def _sweep(self) -> None:
        """Under `quota.lock`: remove what killed processes left."""
        for path in self.directory.glob(".*.removing"):
            self._remove(path)
        for path in self.directory.glob(".*.unpacking"):
            key = path.name[1 : -len(".unpacking")]
            with locks.locked(self._file(key, "lock"), EXCLUSIVE) as fd:
                if fd is not None:
                    self._remove(path)
                    if not self.tree(key).is_dir():
                        self._file(key, "json").unlink(missing_ok=True)

    def _sweep_files(self) -> None:
        """Lock files of no image, and notes whose writer was killed half way."""
        for path in [*self.directory.glob("*.lock"), *self.directory.glob("*.lease")]:
            if not KEY.fullmatch(path.stem) or self.tree(path.stem).exists():
                continue
            with locks.locked(path, EXCLUSIVE) as fd:
                if fd is not None and not self.tree(path.stem).exists():
                    path.unlink(missing_ok=True)
        for path in self.directory.glob(".*.json.*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - STALE_NOTES_S:
                    path.unlink()

    # -- files ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _idle(self, key: str) -> Iterator[str | None]:
        """Lock the image's two files exclusively, so that nobody uses it within the block; gives None, or who
        does already.
        """
        with locks.locked(self._file(key, "lock"), EXCLUSIVE) as lock:
            if lock is None:
                yield "being unpacked"
                return
            with locks.locked(self._file(key, "lease"), EXCLUSIVE) as lease:
                if lease is None:
                    yield "in use"
                elif (orphaned := locks.orphaned_for(lease)) is None or orphaned >= ORPHAN_GRACE_S:
                    yield None
                else:
                    yield "its host was killed; sandboxes may still run from it"

    def _describe(self, key: str, in_use: str | None) -> Cached:
        notes = read_json(self._file(key, "json"))
        if not isinstance(notes.get("bytes"), int):  # the notes were lost or damaged
            notes["bytes"], _ = trees.usage(self.tree(key), sys.maxsize, sys.maxsize)
            write_json(self._file(key, "json"), notes)
        try:
            last_used = self._file(key, "lease").stat().st_mtime
        except FileNotFoundError:
            last_used = 0.0
        return Cached(key, self.tree(key), notes["bytes"], notes.get("source"), last_used, in_use)

    def _keys(self) -> list[str]:
        return [entry.name for entry in os.scandir(self.directory) if KEY.fullmatch(entry.name)]

    def _file(self, key: str, kind: str) -> Path:
        return self.directory / f"{key}.{kind}"

    def _hidden(self, key: str, kind: str) -> Path:
        return self.directory / f".{key}.{kind}"

    def _remove(self, tree: Path) -> None:
        if not tree.exists():
            return
        trees.remove(tree)
        if tree.exists():
            raise ImageError(f"cannot remove {tree} from the image cache; remove it by hand")


def write_json(path: Path, value: dict) -> None:
    """Replace the file at once, so that nobody reads half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    temporary.write_text(json.dumps(value))
    temporary.rename(path)


def read_json(path: Path) -> dict:
    """The object in the file; {} if it is absent or damaged."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def size_text(size: int) -> str:
    """Bytes to read, in MB or GB (powers of ten)."""
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 10**6:.1f} MB"
