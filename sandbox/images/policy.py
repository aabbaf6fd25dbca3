"""Which images a host starts sandboxes from: what its operator put under a name or below a root."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from sandbox import ground, paths
from sandbox.errors import ImageError, NotAllowed

ROOTS = "ROLLOUT_SANDBOX_IMAGE_ROOTS"


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
        if place := ground.overlap(path, self.closed):
            raise NotAllowed(f"image {image!r} is at, in or above {place}, which no sandbox may show")
        if place := ground.overlap(path, self.writable):
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
