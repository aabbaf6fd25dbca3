"""Bundles: a task directory in one file, named by its content, as it goes to the nodes.

A bundle is a tar archive in gzip; its name is the SHA-256 of the archive before compression. The same
directory always makes the same archive: sorted names, no times, no owners, two modes. Whoever takes one reads
it by `contents`, which holds all limits, and writes nothing outside of where it is told to.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rollout.suites import SuiteError

MEDIA_TYPE = "application/gzip"
DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_BYTES = 32 << 20
"""Of a bundle, compressed."""
MAX_UNPACKED_BYTES = 256 << 20
"""Of its archive."""
MAX_MEMBERS = 20_000
MAX_NAME_BYTES = 4096
LEFT_OUT = frozenset({".git", "__pycache__", ".DS_Store"})
"""What no task is made of, wherever it lies in the directory."""
_BLOCK = tarfile.BLOCKSIZE
_PIECE, _FED = 1 << 20, 4 << 10
_PAX_RECORD = re.compile(rb"(\d{1,6}) (path|linkpath)=([^\n\0]+)\n")


@dataclass(frozen=True)
class Bundle:
    """A task directory as it travels."""

    digest: str
    content: bytes
    """The archive, compressed."""


@dataclass(frozen=True)
class Member:
    """One entry of a bundle: a file, a directory or a link."""

    name: str
    mode: int
    link: str | None = None
    content: Iterator[bytes] | None = None
    """Of a file, to be read before the next member is asked for."""


class _Archive:
    """Where an archive is written to: hashed, compressed, and held to the limits."""

    def __init__(self, what: object) -> None:
        self._what, self._size, self._hash = what, 0, hashlib.sha256()
        self._packed = io.BytesIO()
        self._gzip = gzip.GzipFile(fileobj=self._packed, mode="wb", compresslevel=6, mtime=0)

    def tell(self) -> int:
        return self._size

    def write(self, data: bytes) -> int:
        self._size += len(data)
        if self._size > MAX_UNPACKED_BYTES or self._packed.tell() > MAX_BYTES:
            raise _too_large(self._what)
        self._hash.update(data)
        return self._gzip.write(data)

    def bundle(self) -> Bundle:
        self._gzip.close()
        if self._packed.tell() > MAX_BYTES:
            raise _too_large(self._what)
        return Bundle(self._hash.hexdigest(), self._packed.getvalue())


def _too_large(what: object) -> SuiteError:
    unpacked, packed = MAX_UNPACKED_BYTES >> 20, MAX_BYTES >> 20
    return SuiteError(
        f"{what}: larger than {unpacked} MiB, or {packed} MiB compressed; put what is large into the image"
    )


def pack(path: str | Path) -> Bundle:
    """The bundle of a directory.

    Raises:
        SuiteError: It is too large or cannot be read, holds what is neither file, directory nor link, or a
            link that leads out of it.
    """
    root = Path(path)
    if not root.is_dir():
        raise SuiteError(f"{root}: there is no such directory")
    archive = _Archive(root)
    try:
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
            for count, name in enumerate(_names(root), 1):
                if count > MAX_MEMBERS:
                    raise SuiteError(f"{root}: more than {MAX_MEMBERS} files and directories")
                _add(tar, root, name)
    except OSError as error:
        raise SuiteError(f"{root}: cannot be read: {error}") from None
    return archive.bundle()


def _names(root: Path) -> list[str]:
    def refuse(error: OSError) -> None:
        raise error

    names = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        here = Path(folder).relative_to(root)
        names += [(here / name).as_posix() for name in (*folders, *files) if name not in LEFT_OUT]
    return sorted(names)


def _add(tar: tarfile.TarFile, root: Path, name: str) -> None:
    path, info = root / name, tarfile.TarInfo(name)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise SuiteError(f"{path!r}: its name is not UTF-8") from None
    if path.is_symlink():
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
        if fault := _link_fault(name, info.linkname):
            raise SuiteError(f"{path}: a link to {info.linkname!r}, {fault}")
        tar.addfile(info)
    elif path.is_dir():
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
    elif path.is_file():
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            info.size, info.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
            tar.addfile(info, file)
    else:
        raise SuiteError(f"{path}: neither a file, a directory nor a link")


def _link_fault(name: str, target: str) -> str | None:
    """Why a link cannot be kept. `..` may only come first: behind another link it leads anywhere."""
    parts = target.split("/")
    ups = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    if not target or target.startswith("/") or "\0" in target:
        return "which is no relative path"
    if ups > name.count("/") or ".." in parts[ups:]:
        return "which may lead out of the task"
    return None


# ------------------------------------------------------------------------------------ reading


class _Reader:
    """A compressed archive, one member of gzip and nothing behind it, as it is read, bounded and hashed."""

    def __init__(self, content: bytes) -> None:
        self._source, self._inflate = io.BytesIO(content), zlib.decompressobj(wbits=31)
        self._size, self.hash = 0, hashlib.sha256()

    def read(self, size: int) -> bytes:
        """So many bytes; fewer only at the end."""
        data = bytearray()
        while len(data) < size and not self._inflate.eof:
            fed = self._inflate.unconsumed_tail or self._source.read(_FED)
            if not fed:
                raise SuiteError("the bundle ends too early")
            data += self._inflate.decompress(fed, size - len(data))
        if self._inflate.eof and (self._inflate.unused_data or self._source.read(1)):
            raise SuiteError("the bundle holds something behind its archive")
        self._size += len(data)
        if self._size > MAX_UNPACKED_BYTES:
            raise _too_large("the bundle")
        self.hash.update(data)
        return bytes(data)

    def whole(self, size: int) -> bytes:
        data = self.read(size)
        if len(data) < size:
            raise SuiteError("the bundle ends too early")
        return data


def contents(content: bytes, digest: str) -> Iterator[Member]:
    """The members of a bundle that anybody may have made; the digest is looked at behind the last one.

    Raises:
        SuiteError: It is no such bundle, has another digest, passes a limit, or would write outside of the
            directory that it is unpacked into.
    """
    if len(content) > MAX_BYTES:
        raise _too_large("the bundle")
    reader = _Reader(content)
    try:
        yield from _members(reader)
        while reader.read(_PIECE):
            pass
    except (zlib.error, tarfile.TarError, UnicodeError) as error:
        raise SuiteError(f"the bundle is no archive in gzip: {error}") from None
    if reader.hash.hexdigest() != digest:
        raise SuiteError(f"the bundle's digest is {reader.hash.hexdigest()}, not {digest}")


def _members(reader: _Reader) -> Iterator[Member]:
    kinds: dict[str, bytes] = {}
    longer: dict[str, str] = {}
    while (header := reader.whole(_BLOCK)).strip(b"\0"):
        info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        if info.type == tarfile.XHDTYPE and not longer:
            longer = _longer_names(info, reader)
            continue
        name = longer.get("path", info.name)
        name = name.removesuffix("/") if info.type == tarfile.DIRTYPE else name
        link = longer.get("linkpath", info.linkname) if info.type == tarfile.SYMTYPE else None
        longer = {}
        _require_fit(name, info.type, link, kinds)
        kinds[name] = info.type
        if len(kinds) > MAX_MEMBERS:
            raise SuiteError(f"the bundle holds more than {MAX_MEMBERS} files and directories")
        pieces = _pieces(reader, info.size) if info.type == tarfile.REGTYPE else None
        yield Member(name, 0o755 if info.mode & 0o100 else 0o644, link, pieces)
        for _ in pieces or ():
            pass  # what the caller has left


def _pieces(reader: _Reader, size: int) -> Iterator[bytes]:
    rest = size
    while rest > 0:
        piece = reader.whole(min(rest, _PIECE))
        rest -= len(piece)
        yield piece
    reader.whole(-size % _BLOCK)


def _longer_names(info: tarfile.TarInfo, reader: _Reader) -> dict[str, str]:
    """The names that a header has no room for, in records of their own."""
    if not 0 < info.size <= 3 * MAX_NAME_BYTES:
        raise SuiteError("the bundle holds a name that is too long")
    records = reader.whole(info.size)
    reader.whole(-info.size % _BLOCK)
    found, at = {}, 0
    while at < len(records):
        record = _PAX_RECORD.match(records, at)
        if record is None or int(record[1]) != record.end() - at:
            raise SuiteError("the bundle holds a header that bundles have none of")
        found[record[2].decode()] = record[3].decode()
        at = record.end()
    return found


def _require_fit(name: str, kind: bytes, link: str | None, kinds: dict[str, bytes]) -> None:
    """Refuse what `pack` does not make."""
    parts = name.split("/")
    if len(name.encode()) > MAX_NAME_BYTES or "\0" in name or {"", ".", ".."} & {*parts}:
        raise SuiteError(f"the bundle holds {name[:200]!r}, which is no path in it")
    if name in kinds:
        raise SuiteError(f"the bundle holds {name!r} twice")
    parent = name.rpartition("/")[0]
    if parent and kinds.get(parent) != tarfile.DIRTYPE:
        raise SuiteError(f"the bundle holds {name!r} in no directory of its own")
    if kind not in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE):
        raise SuiteError(f"the bundle holds {name!r}, neither a file, a directory nor a link")
    if link is not None and (fault := _link_fault(name, link)):
        raise SuiteError(f"the bundle holds {name!r}, a link to {link[:200]!r}, {fault}")


def verify(content: bytes, digest: str) -> None:
    """Refuse what is no bundle of this digest. Raises SuiteError as `contents` does."""
    for _ in contents(content, digest):
        pass


def unpack(content: bytes, digest: str, into: Path) -> None:
    """Write what is in a bundle into a new directory, which is whole only if this returns.

    Raises:
        SuiteError: As `contents`.
        OSError: The directory is there, or cannot be written.
    """
    into.mkdir(mode=0o755)
    for member in contents(content, digest):
        path = into / PurePosixPath(member.name)
        if member.link is not None:
            path.symlink_to(member.link)
        elif member.content is None:
            path.mkdir(mode=0o755)
        else:
            with path.open("xb") as file:  # nothing is written through what is there already
                os.fchmod(file.fileno(), member.mode)
                for piece in member.content:
                    file.write(piece)
