"""Files and directories of any size between this machine and a sandbox, piece by piece.

`SandboxClient` runs these functions in a thread, each on a connection of its own, of which it gives them the
`ask`. What comes out of a sandbox is hostile input: see `server/archive.py`.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import secrets
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from sandbox.errors import SandboxRequestError
from sandbox.server import archive

MAX_BYTES = 1 << 30
PIECE_TIMEOUT_S = 120.0
"""For one piece: the other side may be slow to read or write it, but not this slow."""

Ask = Callable[..., dict[str, Any]]
"""Makes one request: the operation, and its fields by name."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What was moved."""

    bytes: int
    """Content of files, uncompressed."""
    files: int
    skipped: list[str]
    """Entries left away: sockets, devices, and symbolic links that lead out of the directory."""


@dataclasses.dataclass(frozen=True)
class FileInfo:
    """What is at a path."""

    kind: str | None
    """`file`, `directory`, `link`, `other`; None = nothing is there."""
    size: int
    """Bytes."""
    mode: int
    """Permission bits."""
    mtime: float
    """Seconds since the epoch."""
    name: str = ""
    """Within its directory; only from `list_dir`."""


@dataclasses.dataclass(frozen=True)
class TreeEntry:
    """A file, a symbolic link, or a directory where those were noted too, that is not what it was."""

    path: str
    """Below the directory; bytes that are not UTF-8 are surrogates, as `os.fsdecode` has it."""
    kind: str
    """`file`, `link` or `directory`."""
    size: int
    """Bytes."""
    mode: int
    """Permission bits."""
    link: str
    """Where a link leads; "" for anything else."""
    new: bool
    """Nothing, or a directory that was not noted, was there when the tree was noted."""


@dataclasses.dataclass(frozen=True)
class TreeChanges:
    """What became of a directory since it was noted."""

    changed: list[TreeEntry]
    removed: list[str]
    """Paths of what is gone."""


def upload(
    ask: Ask, local: str | os.PathLike[str], path: str, exclude: Sequence[str], max_bytes: int
) -> Transfer:
    """Copy a local file or directory into the sandbox."""
    source = Path(local)
    if not source.exists():
        raise SandboxRequestError(f"cannot upload {source}: it does not exist")
    tally = archive.Tally(max_bytes)
    if source.is_dir():
        ask("upload", path=path, max_bytes=max_bytes, kind="directory")
        parts = archive.pieces(archive.stream(str(source), list(exclude), tally))
    else:
        mode = source.stat().st_mode & 0o777
        ask("upload", path=path, max_bytes=max_bytes, kind="file", mode=mode)
        parts = _file_pieces(source)
    with contextlib.closing(parts):
        try:
            for piece in parts:
                ask("piece", content=base64.b64encode(piece).decode())
        except (archive.ArchiveError, OSError) as error:
            ask("piece", give_up=True)  # answered when all is removed there
            raise SandboxRequestError(f"cannot upload {source}: {error}") from error
    moved = ask("piece", last=True)
    return Transfer(moved["bytes"], moved["files"], tally.skipped + moved["skipped"])


def download(
    ask: Ask, path: str, local: str | os.PathLike[str], exclude: Sequence[str], max_bytes: int
) -> Transfer:
    """Copy a file or directory out of the sandbox."""
    target = Path(local)
    info = FileInfo(**ask("stat", path=path, follow=True))
    if info.kind == "file":
        return _download_file(ask, path, target, info, max_bytes)
    if info.kind != "directory":
        what = "there is nothing" if info.kind is None else "it is neither a file nor a directory"
        raise SandboxRequestError(f"cannot download {path}: {what}")
    if target.exists() or target.is_symlink():
        raise SandboxRequestError(
            f"cannot download {path} to {target}: that exists already; name a new directory"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # A file without a name: nothing is left of it, however this ends.
    with tempfile.TemporaryFile(dir=target.parent) as spool, _temporary(target) as unpacked:
        # A tar archive takes more than what is in it; an honest one by far less than this.
        room = 2 * max_bytes + archive.MAX_ENTRIES * 4 * archive.BLOCK_BYTES
        moved = _fetch_packed(ask, path, spool, exclude, max_bytes, room, compress=False)
        spool.seek(0)
        unpacked.mkdir()
        tally = archive.Tally(max_bytes)
        try:
            archive.unpack(spool, str(unpacked), tally)
        except archive.ArchiveError as error:
            raise SandboxRequestError(f"cannot download {path}: {error}") from error
        unpacked.rename(target)
    return Transfer(tally.bytes, tally.files, moved["skipped"] + tally.skipped)


def pack(
    ask: Ask,
    path: str,
    local: str | os.PathLike[str],
    exclude: Sequence[str],
    max_bytes: int,
    entries: Sequence[tuple[str, int | None]] | None = None,
) -> Transfer:
    """Save a directory of the sandbox as a .tar.gz file, which is not looked into here; entries as a .tar."""
    target = Path(local)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(target) as temporary:
        with temporary.open("xb") as file:
            # gzip makes what cannot be compressed a little longer.
            room = max_bytes + max_bytes // 100 + archive.MAX_ENTRIES * 4 * archive.BLOCK_BYTES
            how = {"compress": True} if entries is None else {"compress": False, "entries": entries}
            moved = _fetch_packed(ask, path, file, exclude, max_bytes, room, **how)
        temporary.replace(target)
    return Transfer(moved["bytes"], moved["files"], moved["skipped"])


def _download_file(ask: Ask, path: str, target: Path, info: FileInfo, max_bytes: int) -> Transfer:
    if target.is_dir():
        raise SandboxRequestError(f"cannot download {path} to {target}: that is a directory; name the file")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(target) as temporary:
        with temporary.open("xb") as file:
            while True:
                reply = ask("read_piece", path=path, offset=file.tell(), size=archive.PIECE_BYTES)
                piece = base64.b64decode(reply["content"])
                if not piece:
                    break
                file.write(piece)
                if file.tell() > max_bytes:
                    raise SandboxRequestError(
                        f"cannot download {path}: it has more than max_bytes={max_bytes}"
                    )
            size = file.tell()
        temporary.chmod(info.mode & 0o777 | 0o600)
        temporary.replace(target)
    return Transfer(size, 1, [])


def _fetch_packed(
    ask: Ask, path: str, file: IO[bytes], exclude: Sequence[str], max_bytes: int, room: int, **how: Any
) -> dict[str, Any]:
    reply = ask("pack", path=path, max_bytes=max_bytes, exclude=list(exclude), **how)
    while "content" in reply:
        file.write(base64.b64decode(reply["content"]))
        if file.tell() > room:
            raise SandboxRequestError(
                f"cannot transfer {path}: more came than max_bytes={max_bytes} can become"
            )
        reply = ask("more")
    return reply


def _file_pieces(source: Path) -> Generator[bytes, None, None]:
    with source.open("rb") as file:
        while piece := file.read(archive.PIECE_BYTES):
            yield piece


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A path beside `target` that is gone afterwards."""
    path = target.with_name(f".{target.name[:100]}.part-{secrets.token_hex(6)}")
    try:
        yield path
    finally:
        archive.remove(str(path))
