"""Files and directories of any size between this machine and a sandbox, piece by piece.

Written once, as generators like those of `calls.py`, but each on a connection of its own and with the file
I/O of this side in between; the asyncio client runs them in a thread. What comes out of a sandbox is hostile
input: see `server/archive.py`.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import secrets
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from sandbox.calls import Call, Request
from sandbox.errors import SandboxRequestError
from sandbox.server import archive

MAX_BYTES = 1 << 30
PIECE_TIMEOUT_S = 120.0
"""For one piece: the other side may be slow to read or write it, but not this slow."""


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
    """A file or symbolic link that is not what it was."""

    path: str
    """Below the directory; bytes that are not UTF-8 are surrogates, as `os.fsdecode` has it."""
    kind: str
    """`file` or `link`."""
    size: int
    """Bytes."""
    mode: int
    """Permission bits."""
    link: str
    """Where a link leads; "" for a file."""
    new: bool
    """Nothing, or a directory, was there when the tree was noted."""


@dataclasses.dataclass(frozen=True)
class TreeChanges:
    """What became of a directory since it was noted."""

    changed: list[TreeEntry]
    removed: list[str]
    """Paths of files and links that are gone."""


def note_tree(path: str, exclude: Sequence[str]) -> Call[int]:
    """Remember what is in a directory."""
    body = {"op": "note_tree", "path": path, "exclude": list(exclude)}
    return (yield _request(body))["entries"]


def changed_tree(path: str) -> Call[TreeChanges]:
    """What is not as it was noted."""
    result = yield _request({"op": "changed_tree", "path": path})
    return TreeChanges([TreeEntry(**entry) for entry in result["changed"]], result["removed"])


def stat(path: str, follow: bool) -> Call[FileInfo]:
    """What is at a path."""
    return FileInfo(**(yield Request({"op": "stat", "path": path, "follow": follow})))


def list_dir(path: str) -> Call[list[FileInfo]]:
    """What is in a directory."""
    result = yield Request({"op": "list_dir", "path": path})
    return [FileInfo(**entry) for entry in result["entries"]]


def upload(
    local: str | os.PathLike[str], path: str, exclude: Sequence[str], max_bytes: int
) -> Call[Transfer]:
    """Copy a local file or directory into the sandbox."""
    source = Path(local)
    if not source.exists():
        raise SandboxRequestError(f"cannot upload {source}: it does not exist")
    tally = archive.Tally(max_bytes)
    begin = {"op": "upload", "path": path, "max_bytes": max_bytes}
    if source.is_dir():
        yield _request(begin | {"kind": "directory"})
        parts = archive.pieces(archive.stream(str(source), list(exclude), tally))
    else:
        yield _request(begin | {"kind": "file", "mode": source.stat().st_mode & 0o777})
        parts = _file_pieces(source)
    with contextlib.closing(parts):
        try:
            for piece in parts:
                yield _request({"op": "piece", "content": base64.b64encode(piece).decode()})
        except (archive.ArchiveError, OSError) as error:
            yield _request({"op": "piece", "give_up": True})  # answered when all is removed there
            raise SandboxRequestError(f"cannot upload {source}: {error}") from error
    moved = yield _request({"op": "piece", "last": True})
    return Transfer(moved["bytes"], moved["files"], tally.skipped + moved["skipped"])


def download(
    path: str, local: str | os.PathLike[str], exclude: Sequence[str], max_bytes: int
) -> Call[Transfer]:
    """Copy a file or directory out of the sandbox."""
    target = Path(local)
    info = yield from stat(path, follow=True)
    if info.kind == "file":
        return (yield from _download_file(path, target, info, max_bytes))
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
        moved = yield from _fetch_packed(path, spool, exclude, max_bytes, room, compress=False)
        spool.seek(0)
        unpacked.mkdir()
        tally = archive.Tally(max_bytes)
        with _said_plainly(f"cannot download {path}"):
            archive.unpack(spool, str(unpacked), tally)
        unpacked.rename(target)
    return Transfer(tally.bytes, tally.files, moved["skipped"] + tally.skipped)


def pack(path: str, local: str | os.PathLike[str], exclude: Sequence[str], max_bytes: int) -> Call[Transfer]:
    """Save a directory of the sandbox as a .tar.gz file, which is not looked into here."""
    target = Path(local)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(target) as temporary:
        with temporary.open("xb") as file:
            # gzip makes what cannot be compressed a little longer.
            room = max_bytes + max_bytes // 100 + archive.MAX_ENTRIES * 4 * archive.BLOCK_BYTES
            moved = yield from _fetch_packed(path, file, exclude, max_bytes, room, compress=True)
        temporary.replace(target)
    return Transfer(moved["bytes"], moved["files"], moved["skipped"])


def _download_file(path: str, target: Path, info: FileInfo, max_bytes: int) -> Call[Transfer]:
    if target.is_dir():
        raise SandboxRequestError(f"cannot download {path} to {target}: that is a directory; name the file")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(target) as temporary:
        with temporary.open("xb") as file:
            while True:
                body = {"op": "read_piece", "path": path, "offset": file.tell(), "size": archive.PIECE_BYTES}
                piece = base64.b64decode((yield _request(body))["content"])
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
    path: str, file: IO[bytes], exclude: Sequence[str], max_bytes: int, room: int, compress: bool
) -> Call[dict[str, Any]]:
    body = {
        "op": "pack",
        "path": path,
        "max_bytes": max_bytes,
        "exclude": list(exclude),
        "compress": compress,
    }
    reply = yield _request(body)
    while "content" in reply:
        file.write(base64.b64decode(reply["content"]))
        if file.tell() > room:
            raise SandboxRequestError(
                f"cannot transfer {path}: more came than max_bytes={max_bytes} can become"
            )
        reply = yield _request({"op": "more"})
    return reply


def _file_pieces(source: Path) -> Generator[bytes, None, None]:
    with source.open("rb") as file:
        while piece := file.read(archive.PIECE_BYTES):
            yield piece


def _request(body: dict[str, Any]) -> Request:
    return Request(body, PIECE_TIMEOUT_S)


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A path beside `target` that is gone afterwards."""
    path = target.with_name(f".{target.name[:100]}.part-{secrets.token_hex(6)}")
    try:
        yield path
    finally:
        archive.remove(str(path))


@contextlib.contextmanager
def _said_plainly(what: str) -> Iterator[None]:
    try:
        yield
    except archive.ArchiveError as error:
        raise SandboxRequestError(f"{what}: {error}") from error


def advance(call: Call[Any], value: Any) -> tuple[bool, Any]:
    """Run a generator to its next request: (False, request), or at its end (True, result)."""
    try:
        return False, call.send(value)
    except StopIteration as end:
        return True, end.value
