"""SIF and squashfs files: where the file system begins, what it holds, unpacking it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sandbox import paths
from sandbox.errors import ImageError

UNPACK_TIMEOUT_S = 1800.0
LIST_TIMEOUT_S = 300.0
BLOCK_BYTES = 4096  # what a file's size is rounded up to on common file systems
SIF_MAGIC = b"SIF_MAGIC\0"
SQUASHFS_MAGIC = b"hsqs"
SIF_JSON = 0x4006
"""The type of a part with JSON."""
MOST_JSON_BYTES, MOST_JSON_PARTS = 1 << 20, 8
ROOT = "squashfs-root"
LINE = re.compile(rf"([-dlcbps])\S{{9}} \S+/\S+ +(\d+)(?:, *\d+)? \d{{4}}-\d\d-\d\d \d\d:\d\d {ROOT}(.*)")
"""Of `unsquashfs -ll`: type, permissions, owner/group, size (or major, minor), date, time, name."""


class Entry(NamedTuple):
    """A file, directory or link of an image."""

    kind: str
    """As `ls -l` shows it: `-`, `d`, `l`, …"""
    size: int
    """Bytes; of no meaning for devices."""
    name: str
    """Below the root, without a leading slash; "" is the root; a link's ends with ` -> target`."""


def squashfs_offset(path: Path) -> int:
    """Where in the file the root file system begins: 0 for bare squashfs, else from the SIF header.

    Raises ImageError.
    """
    with path.open("rb") as file:
        if file.read(len(SQUASHFS_MAGIC)) == SQUASHFS_MAGIC:
            return 0
        for _, offset, _ in _descriptors(path, file):
            file.seek(offset)
            if file.read(4) == SQUASHFS_MAGIC:
                return offset
    raise ImageError(f"{path} holds no squashfs file system; rebuild it with apptainer build")


def json_parts(path: Path) -> list[bytes]:
    """The JSON documents that a SIF has beside its file system: in one of them Apptainer keeps the
    configuration of the Docker image that it was made from. Raises ImageError.
    """
    texts = []
    with path.open("rb") as file:
        if file.read(len(SQUASHFS_MAGIC)) == SQUASHFS_MAGIC:
            return []
        for kind, offset, size in _descriptors(path, file):
            if kind == SIF_JSON and size <= MOST_JSON_BYTES:
                file.seek(offset)
                texts.append(file.read(size))
    return texts[:MOST_JSON_PARTS]


def _descriptors(path: Path, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """(type, offset, size) of each part of a SIF.

    SIF (github.com/apptainer/sif, version 1, little-endian): a 128-byte header, then descriptors of equal
    size, each beginning with type (int32), used (bool), id, group, link (uint32), offset and size (int64).
    """
    file.seek(0)
    header = file.read(128)
    if header[32:42] != SIF_MAGIC or len(header) < 128:
        raise ImageError(f"{path} is neither a SIF nor a squashfs file")
    _, total, table, table_bytes = struct.unpack_from("<qqqq", header, 80)
    if not 0 < total <= 4096 or table_bytes < total * 33:
        raise ImageError(f"{path} has a damaged SIF header")
    for number in range(total):
        file.seek(table + number * (table_bytes // total))
        descriptor = file.read(33)
        if len(descriptor) < 33:
            raise ImageError(f"{path} is cut off within its SIF header; copy or build it again")
        kind, used, _, _, _, offset, size = struct.unpack("<i?IIIqq", descriptor)
        if used and offset > 0:
            yield kind, offset, size


def entries(path: Path, user: int | None = None) -> Iterator[Entry]:
    """All that a SIF or squashfs file holds, read by `user` if we are root. Raises ImageError when it is
    damaged.
    """
    with path.open("rb") as file:
        arguments = ["-ll", "-o", str(squashfs_offset(path))]
        process = _unsquashfs(path, file.fileno(), "read", arguments, LIST_TIMEOUT_S, user=user)
    if process.returncode != 0:
        raise ImageError(f"cannot read {path}: {_complaint(process)}; copy or build it again")
    for line in process.stdout.decode(errors="surrogateescape").split("\n"):
        if match := LINE.fullmatch(line):  # a name with a line break gives lines that do not match
            yield Entry(match[1], int(match[2]), match[3].removeprefix("/"))


def unpacked_bytes(path: Path, user: int | None = None) -> int:
    """Disk space that the unpacked image takes: an estimate from above, for hard links count each time."""
    total = 0
    for kind, size, _ in entries(path, user):
        total += -(-size // BLOCK_BYTES) * BLOCK_BYTES if kind == "-" else BLOCK_BYTES * (kind == "d")
    return total


def unpack(
    path: Path, target: Path, lock: int | None = None, *, opened: int | None = None, user: int | None = None
) -> None:
    """Unpack into `target`, which must not exist or be empty; what an error leaves there is the caller's.

    `lock`: a locked file, if any, that unsquashfs inherits; should we be killed, it stays locked until
    unsquashfs has stopped writing. `opened`: `path` as it was opened, whatever has its name now. `user`: who
    unpacks if we are root, and then owns the files; root's own hands stay off what others may have written.
    Raises ImageError.
    """
    target.mkdir(exist_ok=True)
    # Relative to where it stands: the user may be unable to come there by the whole path.
    arguments = ["-q", "-n", "-no-xattrs", "-f", "-d", ".", "-o", str(squashfs_offset(path))]
    with path.open("rb") as file:
        opened = file.fileno() if opened is None else opened
        how: dict[str, Any] = {"keep": () if lock is None else (lock,), "user": user, "cwd": target}
        process = _unsquashfs(path, opened, "unpack", arguments, UNPACK_TIMEOUT_S, **how)
    # Exit code 2: something was skipped, for a plain user the device nodes, which nobody needs. A full disk
    # is exit code 1.
    if process.returncode not in (0, 2) or not any((target / name).exists() for name in ("usr", "bin")):
        raise ImageError(f"cannot unpack {path} into {target.parent}: {_complaint(process)}")


def read_file(path: Path, name: str, most: int, user: int | None = None) -> bytes:
    """The beginning of a file in a SIF or squashfs file, read by `user` if we are root; empty where there is
    none, or unsquashfs is older than 4.5. Raises ImageError.
    """
    with path.open("rb") as file:
        arguments = ["-cat", "-o", str(squashfs_offset(path))]
        command, options = _command(path, file.fileno(), "read", arguments, user=user)
        with subprocess.Popen(
            [*command, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **options
        ) as process:
            assert process.stdout is not None
            content = process.stdout.read(most)
            process.kill()  # an image is not to be trusted: there may be very much more
    return content


def reader(opened: int, user: int | None) -> int | None:
    """`user` if it may read the file; None where it is closed to all but root, who alone has written it."""
    info = os.fstat(opened)
    if user is None or os.geteuid() != 0:
        return None
    return user if info.st_mode & stat.S_IROTH or info.st_uid == user else None


def _unsquashfs(
    path: Path, opened: int, verb: str, arguments: list[str], timeout: float, **how: Any
) -> subprocess.CompletedProcess[bytes]:
    """It has run to its end; `how`: as :func:`_command` takes it. Raises ImageError."""
    command, options = _command(path, opened, verb, arguments, **how)
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImageError(f"cannot {verb} {path}: {error}") from error


def _command(
    path: Path,
    opened: int,
    verb: str,
    arguments: list[str],
    keep: Sequence[int] = (),
    user: int | None = None,
    cwd: Path = Path("/"),
) -> tuple[list[str], dict[str, Any]]:
    """Of unsquashfs, and how it is to be started. Raises ImageError where it is missing."""
    program = shutil.which("unsquashfs", path=paths.tool_path())
    if program is None:
        raise ImageError(f"cannot {verb} {path}: unsquashfs is missing; run deploy/setup/apptainer.sh")
    user = reader(opened, user)
    options: dict[str, Any] = {
        "env": {"PATH": paths.tool_path(), "LANG": "C"},
        "pass_fds": (opened, *keep),
        "cwd": cwd,
    }
    as_user = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    return [program, *arguments, f"/proc/self/fd/{opened}"], options | as_user


def _complaint(process: subprocess.CompletedProcess[bytes]) -> str:
    return process.stderr.decode(errors="replace").strip()[-1000:] or f"unsquashfs gave {process.returncode}"
