"""Images: finding them, and unpacking a SIF once per node into a directory that every sandbox shares
read-only.

A directory starts seven times faster than a SIF (no FUSE mounts) and its pages are shared between sandboxes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import struct
import subprocess
from pathlib import Path

from sandbox import paths
from sandbox.errors import ImageError

UNPACK_TIMEOUT_S = 1800.0
KEY_CHARS = 20  # of the SHA-256 in hexadecimal: 80 bits, no accidental collision
SIF_MAGIC = b"SIF_MAGIC\0"
SQUASHFS_MAGIC = b"hsqs"


class ImageStore:
    """Resolves image names and keeps the node's cache of unpacked images. Thread- and process-safe."""

    def __init__(self, cache: Path | None = None):
        self.cache = cache or paths.image_cache()
        self._hashes: dict[tuple[str, int, int, int], str] = {}

    def find(self, image: str) -> Path:
        """The SIF file or directory behind a path or a name. Raises ImageError saying where it was looked
        for.
        """
        if "/" in image:
            candidates = [Path(image)]
        else:
            images = paths.rollout_home() / "images"
            candidates = [images / f"{image}.sif", images / image]
        for path in candidates:
            if path.exists():
                return path.resolve()
        places = " and ".join(map(str, candidates))
        remedy = "run deploy/setup/image.sh" if image == "base" else "build it or give its path"
        raise ImageError(f"image {image!r} not found; looked for {places}; {remedy}")

    def rootfs(self, image: str, owner: int | None = None) -> Path:
        """The image as a directory, unpacked now if this node has not done it yet (seconds; blocking).

        `owner`: uid the unpacked files shall belong to, so that the sandbox's user may change its copy of
        them; an image that is a directory already is used as it is. Raises ImageError.
        """
        path = self.find(image)
        if path.is_dir():
            return path
        key = self._content_hash(path) + ("" if owner is None else f"-{owner}")
        target = self.cache / key
        paths.own_directory(
            self.cache, 0o711 if os.geteuid() == 0 else 0o700
        )  # root's sandboxes pass through
        if target.is_dir():
            return target
        with (self.cache / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                self._unpack(path, target, owner)
        return target

    def _content_hash(self, path: Path) -> str:
        """SHA-256 of the file; remembered as long as inode, size and time of change stay."""
        info = path.stat()
        identity = (str(path), info.st_ino, info.st_size, info.st_mtime_ns)
        if identity not in self._hashes:
            with path.open("rb") as file:
                self._hashes[identity] = hashlib.file_digest(file, "sha256").hexdigest()[:KEY_CHARS]
        return self._hashes[identity]

    def _unpack(self, path: Path, target: Path, owner: int | None) -> None:
        """Under the lock: into a temporary directory, then one rename, so that no half image is ever seen."""
        temporary = target.with_name(f".{target.name}.unpacking")
        shutil.rmtree(temporary, ignore_errors=True)
        unsquashfs = shutil.which("unsquashfs", path=paths.tool_path())
        if unsquashfs is None:
            raise ImageError(f"cannot unpack {path}: unsquashfs is missing; run deploy/setup/apptainer.sh")
        command = [
            unsquashfs,
            "-q",
            "-n",
            "-no-xattrs",
            "-d",
            str(temporary),
            "-o",
            str(squashfs_offset(path)),
            str(path),
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                timeout=UNPACK_TIMEOUT_S,
                env={"PATH": paths.tool_path(), "LANG": "C"},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ImageError(f"cannot unpack {path}: {error}") from error
        # Exit code 2: something was skipped, for a plain user the device nodes, which nobody needs.
        if done.returncode not in (0, 2) or not (temporary / "usr").exists():
            said = done.stderr.decode(errors="replace").strip()[-1000:]
            shutil.rmtree(temporary, ignore_errors=True)
            raise ImageError(f"cannot unpack {path} into {target}: {said}")
        if os.geteuid() == 0:
            _hand_over(temporary, owner)
        temporary.chmod(0o755)
        temporary.rename(target)


def _hand_over(directory: Path, owner: int | None) -> None:
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


def squashfs_offset(path: Path) -> int:
    """Where in the file the root file system begins: 0 for bare squashfs, else from the SIF header.

    SIF (github.com/apptainer/sif, version 1, little-endian): a 128-byte header, then descriptors of equal
    size, each beginning with type (int32), used (bool), id, group, link (uint32), offset and size (int64).
    Raises ImageError.
    """
    with path.open("rb") as file:
        header = file.read(128)
        if header.startswith(SQUASHFS_MAGIC):
            return 0
        if header[32:42] != SIF_MAGIC or len(header) < 128:
            raise ImageError(f"{path} is neither a SIF nor a squashfs file")
        _, total, table, table_bytes = struct.unpack_from("<qqqq", header, 80)
        if not 0 < total <= 4096 or table_bytes < total * 33:
            raise ImageError(f"{path} has a damaged SIF header")
        for number in range(total):
            file.seek(table + number * (table_bytes // total))
            _, used, _, _, _, offset, _ = struct.unpack("<i?IIIqq", file.read(33))
            if used:
                file.seek(offset)
                if file.read(4) == SQUASHFS_MAGIC:
                    return offset
    raise ImageError(f"{path} holds no squashfs file system; rebuild it with apptainer build")
