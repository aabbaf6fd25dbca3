"""Images by name or path, and as directories unpacked once per node."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sandbox import paths
from sandbox.errors import ImageError, NotAllowed
from sandbox.images import squashfs
from sandbox.images.cache import ImageCache, read_json, write_json
from sandbox.images.locks import Lease

KEY_CHARS = 20  # of the SHA-256 in hexadecimal: 80 bits, no accidental collision
HASHES_KEPT = 1000
ROOTS = "ROLLOUT_SANDBOX_IMAGE_ROOTS"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class ImagePolicy:
    """What a host decides of images, whoever asks."""

    roots: tuple[Path, ...] = ()
    """Directories below which an image may be named by its path."""
    closed: tuple[Path, ...] = ()
    """Never an image, nor holding one: where sandboxes live and what they must not see."""
    writable: tuple[Path, ...] = ()
    """The same for places that sandboxes may write to."""

    def check_path(self, image: str) -> None:
        """Before the path is looked at, so that nobody learns what is there. Raises NotAllowed."""
        path = Path(image).resolve()
        if any(path.is_relative_to(root) for root in self.roots):
            return
        allowed = ":".join(map(str, self.roots)) or "none"
        raise NotAllowed(
            f"image {image!r} is a path, and this node takes images by name, or below {ROOTS}={allowed}; "
            f"name it (`rollout images build NAME {image}`), or set {ROOTS} where the sandbox host starts"
        )

    def check_place(self, image: str, path: Path) -> None:
        """`path`: what the name or path of the image resolves to. Raises NotAllowed."""
        if place := paths.overlap(path, self.closed):
            raise NotAllowed(f"image {image!r} is at, in or above {place}, which no sandbox may show")
        if place := paths.overlap(path, self.writable):
            raise NotAllowed(f"image {image!r} is at, in or above {place}, which sandboxes may write to")
        info = path.stat()
        if info.st_mode & stat.S_IWOTH:
            raise NotAllowed(f"image {image!r}: everybody may write to {path}; chmod o-w it")
        if stat.S_ISREG(info.st_mode) and os.geteuid() == 0 and info.st_uid == paths.sandbox_user():
            raise NotAllowed(
                f"image {image!r}: {path} belongs to the sandboxes' user, who may change it; chown it to root"
            )
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
            raise ImageError(f"image {image!r}: {path} is neither a file nor a directory")


class ImageStore:
    """Resolves image names and keeps the node's cache of unpacked images. Thread- and process-safe."""

    def __init__(
        self, cache: Path | None = None, quota: int | None = None, policy: ImagePolicy | None = None
    ):
        """`cache`: its directory; `quota`: bytes. None = what `ROLLOUT_IMAGE_CACHE` and
        `ROLLOUT_IMAGE_CACHE_GB` say. `policy`: what may be an image; None = anything, for the
        operator's own tools.
        """
        self.cache = ImageCache(cache or paths.image_cache(), quota)
        self._policy = policy
        self._without_sockets: set[Path] = set()
        self._hashes: dict[str, str] = {}
        self._given: dict[str, tuple[str, int | None]] = {}
        self._lock = threading.Lock()

    def find(self, image: str) -> Path:
        """The SIF file or directory behind a path or a name. Raises ImageError saying where it was looked
        for, NotAllowed when it may not be an image here.
        """
        if "/" in image:
            if self._policy is not None:
                self._policy.check_path(image)
            candidates = [Path(image)]
        else:
            images = paths.image_dir()
            if not NAME.fullmatch(image):
                raise ImageError(
                    f"image {image!r} is neither a path (with a slash) nor a name of letters, digits, "
                    "'.', '_' and '-'"
                )
            candidates = [images / f"{image}.sif", images / image]
        for path in candidates:
            if path.exists():
                target = path.resolve()
                if self._policy is not None:
                    self._policy.check_place(image, target)
                return target
        places = " and ".join(map(str, candidates))
        remedy = "run deploy/setup/image.sh" if image == "base" else "build it or give its path"
        raise ImageError(f"image {image!r} not found; looked for {places}; {remedy}")

    def rootfs(self, image: str, owner: int | None = None) -> Path:
        """The image as a directory, unpacked now if this node has not done it yet (seconds; blocking).

        `owner`: uid the unpacked files shall belong to, so that the sandbox's user may change its copy of
        them; an image that is a directory already is used as it is. It stays only while somebody holds it.
        Raises ImageError.
        """
        path = self.find(image)
        if path.is_dir():
            self._refuse_sockets(image, path)
            return path
        self.cache.make()
        with path.open("rb") as file:  # once, for hash and content shall be those of one file
            key = self._hash_of(path, file) + ("" if owner is None else f"-{owner}")
            self._given[key] = (image, owner)
            tree = self.cache.tree(key)
            if tree.is_dir():
                self.cache.touch(key)
                return tree
            before = _identity(path, file)

            def unpack(target: Path, lock: int) -> None:
                user = squashfs.reader(file.fileno(), owner)
                if user is not None:
                    os.chown(target, user, user)
                squashfs.unpack(path, target, lock, opened=file.fileno(), user=user)
                if os.geteuid() == 0 and user is None:
                    hand_over(target, owner)
                if _identity(path, file) != before:
                    raise ImageError(f"{path} changed while it was unpacked; start the sandbox again")

            return self.cache.fill(key, path, squashfs.unpacked_bytes(path, owner), unpack)

    def _refuse_sockets(self, image: str, directory: Path) -> None:
        """Once for each directory: nobody but the operator writes there."""
        if self._policy is None or directory in self._without_sockets:
            return
        if socket := find_socket(directory):
            raise NotAllowed(f"image {image!r} holds a socket, {socket}; remove it")
        self._without_sockets.add(directory)

    def hold(self, rootfs: Path) -> Lease:
        """Keep a directory that `rootfs` gave from being evicted until the lease is released or this process
        ends; should it have been evicted since, it is unpacked again. Of a directory outside the cache the
        lease does nothing. Raises ImageError.
        """
        key = self.cache.key_of(rootfs)
        if key is None:
            return Lease()
        while (lease := self.cache.hold(key)) is None:
            if key not in self._given:
                raise ImageError(f"{rootfs} is not in the image cache any more; start the sandbox again")
            again = self.rootfs(*self._given[key])
            if again != self.cache.tree(key):
                raise ImageError(f"image {self._given[key][0]!r} has changed; start the sandbox again")
        return lease

    def content_hash(self, path: Path) -> str:
        """The first 20 digits of the file's SHA-256. Remembered, in the cache's directory too, as long as
        inode, size and times of change stay: a large image on a busy file system takes long to read.
        """
        with path.open("rb") as file:
            return self._hash_of(path, file)

    def _hash_of(self, path: Path, file: BinaryIO) -> str:
        identity = _identity(path, file)
        memory = self.cache.directory / "hashes.json"
        with self._lock:
            if identity not in self._hashes:
                self._hashes = self._hashes | read_json(memory)
            known = self._hashes.get(identity)
        if known is not None:
            return known
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:KEY_CHARS]
        with self._lock:
            # A concurrent process may overwrite this; then the hash is computed once more.
            self._hashes = dict([*read_json(memory).items(), (identity, digest)][-HASHES_KEPT:])
            self.cache.make()
            write_json(memory, self._hashes)
        return digest


def _identity(path: Path, file: BinaryIO) -> str:
    """Another one whenever the file's content may be: nobody but the kernel sets the time of change."""
    info = os.fstat(file.fileno())
    return f"{path}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}"


def hand_over(directory: Path, owner: int | None) -> None:
    """Give the tree to `owner`, which also clears setuid bits; device nodes are removed."""
    for parent, directories, files in os.walk(directory):
        for name in directories + files:
            entry = Path(parent, name)
            mode = entry.lstat().st_mode
            if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
                entry.unlink()
            elif owner is not None:
                os.lchown(entry, owner, owner)
    if owner is not None:
        os.lchown(directory, owner, owner)


def find_socket(directory: Path) -> Path | None:
    """A socket somewhere in the tree: mounted, it would connect a sandbox with whoever listens on it."""
    pending = [str(directory)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif not (entry.is_file(follow_symlinks=False) or entry.is_symlink()) and stat.S_ISSOCK(
                        entry.stat(follow_symlinks=False).st_mode
                    ):
                        return Path(entry.path)
        except PermissionError:
            continue  # closed to us, and so to a sandbox of ours
    return None
