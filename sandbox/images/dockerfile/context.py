"""What COPY and ADD take: of the directory beside a Dockerfile, or of the root of another image."""

from __future__ import annotations

import bz2
import contextlib
import fnmatch
import gzip
import hashlib
import json
import lzma
import os
import posixpath
import re
import stat
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MOST_ENTRIES = 200_000
MOST_HEADER = 256 << 10
"""Bytes of all that an archive says of one file: its name, a map of its holes."""
MOST_RULES, MOST_RULE_BYTES = 1000, 64 << 10
"""Of a `.dockerignore`: each is tried with each file."""
CHUNK = 1 << 20
WILDCARD = re.compile(r"[*?\[\\]")
ZSTANDARD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Entry:
    """A file, directory or link to copy."""

    source: int
    """Which of the instruction's sources it is, or lies in."""
    name: str
    """Below the source; "" is the source itself."""
    path: Path
    mode: int


@dataclass(frozen=True)
class Found:
    """The sources of an instruction, wildcards resolved, and all that is in them."""

    bases: tuple[tuple[str, bool], ...]
    """Name, and whether it is a directory, of each source."""
    entries: tuple[Entry, ...]


class Ignored:
    """The patterns of a `.dockerignore`: the last that matches a path, or a directory above it, decides."""

    def __init__(self, text: str = ""):
        rows = [line.strip() for line in text.splitlines()]
        rows = [row for row in rows if row and not row.startswith("#")]
        if len(rows) > MOST_RULES:
            raise ValueError(f".dockerignore has more than {MOST_RULES} patterns")
        self.rules = [_rule(row) for row in rows]
        self.has_exceptions = any(keep for keep, _ in self.rules)

    @classmethod
    def of(cls, context: Path, dockerfile: Path) -> Ignored:
        """`DOCKERFILE.dockerignore` goes before `.dockerignore`. Raises ValueError where it is too long."""
        for place in (dockerfile.with_name(dockerfile.name + ".dockerignore"), context / ".dockerignore"):
            with contextlib.suppress(OSError):
                if place.stat().st_size > MOST_RULE_BYTES:
                    raise ValueError(f"{place.name} is larger than {MOST_RULE_BYTES >> 10} KiB")
                return cls(place.read_text(errors="replace"))
        return cls()

    def __call__(self, path: str) -> bool:
        """Whether the path, relative to the context, is left out."""
        ignored = False
        for keep, segments in self.rules:
            if ignored == keep and _matches_above(segments, path.split("/")):
                ignored = not keep
        return ignored


Segments = list[re.Pattern[str] | None]
"""Of a pattern, what the names of a path have to match; None is `**`, any number of names."""


def _rule(row: str) -> tuple[bool, Segments]:
    segments: Segments = []
    for part in posixpath.normpath("/" + row.removeprefix("!").strip()).strip("/").split("/"):
        before, deep, after = part.partition("**")
        if not deep:
            segments.append(wildcard(part))
            continue
        segments += [wildcard(before + "*")] if before else []
        segments.append(None)
        segments += [wildcard("*" + after)] if after else []
    if segments[-1] is None:
        segments.append(wildcard("*"))
    return row.startswith("!"), segments


def _matches_above(segments: Segments, names: list[str]) -> bool:
    """Whether the path or a directory above it matches. All ways at once, for patterns are a tenant's."""
    places = _onward(segments, {0})
    for name in names:
        staying = {place for place in places if segments[place] is None}
        further = {place + 1 for place in places - staying if segments[place].match(name)}  # type: ignore
        places = _onward(segments, staying | further)
        if len(segments) in places:
            return True
    return False


def _onward(segments: Segments, places: set[int]) -> set[int]:
    """And behind each `**`, which may stand for nothing."""
    for place, segment in enumerate(segments):
        if segment is None and place in places:
            places.add(place + 1)
    return places


def wildcard(pattern: str) -> re.Pattern[str]:
    """For one name, a pattern of Go's `filepath.Match`; `fnmatch` never tries the same twice."""
    pattern = re.sub(r"\\(.)", lambda quoted: f"[{quoted[1]}]" if quoted[1] in "*?[" else quoted[1], pattern)
    return re.compile(fnmatch.translate(pattern.replace("[^", "[!")))


def find(root: Path, sources: Sequence[str], ignored: Ignored | None = None, unpack: bool = False) -> Found:
    """All that the sources are, in an order of their own. `unpack`: tar archives count as directories.

    A pattern may stand for none. Raises ValueError for a source that is not there, or leads out of the root.
    """
    ignored = ignored or Ignored()
    real = root.resolve()
    bases: list[tuple[str, bool]] = []
    entries: list[Entry] = []
    for source in sources:
        matches = _matches(real, posixpath.normpath("/" + source).lstrip("/"), ignored)
        if not matches and not WILDCARD.search(source):
            left_out = " (or .dockerignore leaves it out)" if ignored.rules else ""
            raise ValueError(f"there is no {source!r} in {root}{left_out}")
        for match in matches:
            path = (real / match).resolve()
            if not path.is_relative_to(real):
                raise ValueError(f"{source!r} leads out of {root}")
            number = len(bases)
            as_directory = path.is_dir() or (unpack and _is_archive(path))
            bases.append((posixpath.basename(match), as_directory))
            entries += [Entry(number, *entry) for entry in _walk(real, path, ignored)]
            if len(entries) > MOST_ENTRIES:
                raise ValueError(f"more than {MOST_ENTRIES} files")
    return Found(tuple(bases), tuple(entries))


def _matches(root: Path, pattern: str, ignored: Ignored) -> list[str]:
    """Paths that a source stands for."""
    paths = [""]
    for part in pattern.split("/"):
        if not WILDCARD.search(part):
            paths = [posixpath.join(path, part) for path in paths]
            continue
        matcher, below = wildcard(part), []
        for path in paths:
            with contextlib.suppress(NotADirectoryError, FileNotFoundError):
                names = sorted(child.name for child in (root / path).iterdir())
                below += [posixpath.join(path, name) for name in names if matcher.match(name)]
        paths = below
    return [
        path for path in paths if os.path.lexists(root / path) and not _is_out(root / path, path, ignored)
    ]


def _is_out(place: Path, path: str, ignored: Ignored) -> bool:
    """A directory may hold exceptions."""
    return bool(path) and ignored(path) and not (ignored.has_exceptions and place.is_dir())


def _walk(root: Path, top: Path, ignored: Ignored) -> Iterator[tuple[str, Path, int]]:
    """(name below the source, path, mode) of the source and all in it."""
    pending = [top]
    while pending:
        place = pending.pop()
        mode, inside = place.lstat().st_mode, str(place.relative_to(root))
        name = "" if place == top else str(place.relative_to(top))
        out = inside != "." and bool(ignored.rules) and ignored(inside)
        if stat.S_ISDIR(mode):
            if not out or ignored.has_exceptions:
                pending += sorted(place.iterdir(), reverse=True)
            if out and name:
                continue
        elif out or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            continue
        yield name, place, mode


def _is_archive(path: Path) -> bool:
    if not path.is_file():
        return False
    broken = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError)
    with _opened(path) as file, contextlib.suppress(*broken):
        # Its first block alone, whatever that says of what follows.
        return bool(tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape"))
    return False


def _opened(path: Path) -> BinaryIO:
    """What is in a file, decompressed. Raises ValueError for zstd."""
    with path.open("rb") as file:
        begin = file.read(6)
    if begin.startswith(ZSTANDARD):
        raise ValueError(f"{path} is compressed with zstd, which ADD does not unpack here; use gzip")
    compressed = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))
    unpack = next((unpack for magic, unpack in compressed if begin.startswith(magic)), open)
    return unpack(path, "rb")  # type: ignore[operator, no-any-return]


class _Metered:
    """A file of which no more is read than is `left`: a header of an archive may ask for all memory."""

    def __init__(self, file: BinaryIO):
        self._file, self.left = file, MOST_HEADER
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        """Raises ValueError."""
        if not 0 <= size <= self.left:
            raise ValueError(f"an archive has a header of more than {MOST_HEADER >> 10} KiB")
        data = self._file.read(size)
        self.left -= len(data)
        return data


def digest(found: Found, contents: dict[Path, str] | None = None) -> str:
    """Of names, contents and what can be run; neither times nor owners, nor modes beyond that, count.

    `contents`: of files that were read already; filled with those that are read now.
    """
    contents = {} if contents is None else contents
    total = hashlib.sha256(repr(found.bases).encode())
    for entry in found.entries:
        content = ""
        if stat.S_ISREG(entry.mode):
            if entry.path not in contents:
                with entry.path.open("rb") as file:
                    contents[entry.path] = hashlib.file_digest(file, "sha256").hexdigest()
            content = contents[entry.path]
        elif stat.S_ISLNK(entry.mode):
            content = str(entry.path.readlink())
        kind = (stat.S_IFMT(entry.mode), plain_mode(entry.mode))
        total.update(repr((entry.source, entry.name, kind, content)).encode())
    return total.hexdigest()


def plain_mode(mode: int) -> int:
    """As git and bundles keep it: whether it can be run."""
    return 0o755 if mode & stat.S_IXUSR or stat.S_ISDIR(mode) else 0o644


def send(found: Found, stream: BinaryIO, exact: bool) -> None:
    """Write a line of JSON with the sources, then a tar archive, in which the source's number is the first
    part of each name; of a source that is an archive, what is in it. `exact`: modes as they are.
    """
    stream.write(json.dumps(found.bases).encode() + b"\n")
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for entry in found.entries:
            if not entry.name and stat.S_ISREG(entry.mode) and found.bases[entry.source][1]:
                _send_archive(entry, archive)
                continue
            member = archive.gettarinfo(entry.path, posixpath.join(str(entry.source), entry.name))
            if member.islnk():  # its first name may lie outside of what is copied
                member.type, member.size = tarfile.REGTYPE, entry.path.lstat().st_size
            member.mode = stat.S_IMODE(entry.mode) if exact else plain_mode(entry.mode)
            with entry.path.open("rb") if member.isreg() else contextlib.nullcontext() as file:
                archive.addfile(member, file)


def _send_archive(entry: Entry, archive: tarfile.TarFile) -> None:
    with _opened(entry.path) as file:
        metered = _Metered(file)
        with tarfile.open(fileobj=metered, mode="r:") as inner:  # type: ignore[call-overload]
            for number, member in enumerate(iter(inner.next, None)):
                if number == MOST_ENTRIES:
                    raise ValueError(f"an archive holds more than {MOST_ENTRIES} files")
                metered.left = member.size
                if member.isreg() or member.isdir() or member.issym() or member.islnk():
                    member.name = _below(entry.source, member.name)
                    if member.islnk():
                        member.linkname = _below(entry.source, member.linkname)
                    member.pax_headers = {}
                    archive.addfile(member, inner.extractfile(member) if member.isreg() else None)
                metered.left = MOST_HEADER


def _below(source: int, name: str) -> str:
    return f"{source}{posixpath.normpath('/' + name)}".rstrip("/")
