"""Where things lie: installation home, state directory, image cache, and the PATH that finds our tools."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from sandbox.errors import SandboxError

SOCKET_PATH_MAX = 107
"""Bytes of a Unix socket path (`sun_path` is 108 with its final NUL)."""

NOBODY = 65534

_REPOSITORY = Path(__file__).resolve().parent.parent

Identity = tuple[int, int]
"""Device and inode: what a place is, whatever its names, for a mount may show it under two."""


def rollout_home() -> Path:
    """What the set-up scripts installed: `ROLLOUT_HOME`, else `.local` in the repository."""
    value = os.environ.get("ROLLOUT_HOME")
    return Path(value).resolve() if value else _REPOSITORY / ".local"


def state_dir() -> Path:
    """The host's sockets, records and scratch: `ROLLOUT_SANDBOX_DIR`, else `/tmp/sbx-<uid>`.

    Short on purpose (socket paths are limited) and node-local on purpose.
    """
    return Path(os.environ.get("ROLLOUT_SANDBOX_DIR") or f"/tmp/sbx-{os.getuid()}")


def image_cache() -> Path:
    """Unpacked images, node-local: `ROLLOUT_IMAGE_CACHE`, else `/var/tmp/rollout-images-<uid>`."""
    return Path(os.environ.get("ROLLOUT_IMAGE_CACHE") or f"/var/tmp/rollout-images-{os.getuid()}")


def image_dir() -> Path:
    """Images by name: `ROLLOUT_IMAGES`, else `images` in `ROLLOUT_HOME`. All nodes may share it."""
    value = os.environ.get("ROLLOUT_IMAGES")
    return Path(value).resolve() if value else rollout_home() / "images"


def snapshot_dir() -> Path | None:
    """Packed snapshots, for other nodes: `ROLLOUT_SNAPSHOT_DIR`, which all nodes see; None = none."""
    value = os.environ.get("ROLLOUT_SNAPSHOT_DIR")
    return Path(value).resolve() if value else None


def pack_dir() -> Path:
    """Programs that the operator has built for sandboxes: `harnesses` in `ROLLOUT_HOME`."""
    return rollout_home() / "harnesses"


def tool_path() -> str:
    """PATH that also finds what the set-up scripts unpacked privately; the machine's own tools come first."""
    private = (rollout_home() / "apptainer").resolve()  # set-up may have put it where others may enter
    extra = [private / "usr/bin", private / "tools/usr/bin", private / "tools/usr/sbin"]
    own = os.environ.get("PATH") or "/usr/local/bin:/usr/bin:/bin"
    return ":".join([own, *map(str, extra), "/usr/sbin", "/sbin"])


def sandbox_user() -> int | None:
    """The uid (and gid) sandboxes run as when we are root; None = our own.

    A container of root's is uid 0 of the machine without capabilities: still the owner of `/proc/sys` and of
    every root-owned file that is bound in. So root starts containers as `ROLLOUT_SANDBOX_UID` (default:
    nobody), and as itself only where that is 0.
    """
    return int(os.environ.get("ROLLOUT_SANDBOX_UID", NOBODY)) or None if os.geteuid() == 0 else None


def closed_to_others(path: Path) -> Path | None:
    """The first directory above `path`, links resolved, that not everybody may enter; None = all may."""
    above = reversed(path.resolve().parents)
    return next((place for place in above if not place.stat().st_mode & stat.S_IXOTH), None)


def own_directory(path: Path, mode: int) -> Path:
    """Make `path` if absent and insist that it is ours, for its parents (`/tmp`, `/var/tmp`) are open to all.

    Raises SandboxError when somebody else owns it.
    """
    path.mkdir(parents=True, exist_ok=True)
    info = path.lstat()
    if info.st_uid != os.geteuid() or path.is_symlink():
        raise SandboxError(
            f"{path} belongs to uid {info.st_uid}, not to uid {os.geteuid()}; "
            "remove it or choose another directory"
        )
    path.chmod(mode)
    return path


def check_socket_path(path: str) -> str:
    """`path`, if a Unix socket can have it; else SandboxError."""
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise SandboxError(
            f"socket path {path!r} is longer than {SOCKET_PATH_MAX} bytes; "
            "set ROLLOUT_SANDBOX_DIR to a short directory"
        )
    return path


def overlap(path: Path, places: Iterable[Path]) -> Path | None:
    """The first of the places that `path` is, lies in or holds, by what they are and not by their names; None
    = it keeps clear of all. A place that is not there is compared by its name.
    """
    own = _line(path)
    for place in places:
        line = _line(place)
        if line[0] in own or own[0] in line:
            return place.resolve()
    return None


def _line(path: Path) -> list[Identity | str]:
    """The path, links resolved, and all above it, nearest first."""
    place, above = os.path.realpath(path), None  # without what `pathlib` costs, for each start looks
    identities: list[Identity | str] = []
    while place != above:
        try:
            info = os.stat(place)  # noqa: PTH116
            identities.append((info.st_dev, info.st_ino))
        except OSError:
            identities.append(place)
        place, above = os.path.dirname(place), place  # noqa: PTH120
    return identities
