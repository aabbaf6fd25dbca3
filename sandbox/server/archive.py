"""Directories as tar streams, for both sides of a transfer: made piece by piece, unpacked without trust.

An archive is hostile input wherever it is unpacked. It goes into a fresh directory; only plain files,
directories and symbolic links are made, links last, so nothing is ever written through one.
"""

import fnmatch
import os
import shutil
import stat
import tarfile
import zlib

PIECE_BYTES = 1024 * 1024
BLOCK_BYTES = 512
MAX_ENTRIES = 200000
MAX_EXTENDED_HEADER_BYTES = 1024 * 1024  # names and attributes of one entry; tarfile reads it into memory
GZIP_WBITS = 31
FORMAT = tarfile.PAX_FORMAT
EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class ArchiveError(Exception):
    """The archive is not acceptable, or there is more than may be transferred; the message says which."""


class Tally:
    """What a transfer has moved so far."""

    def __init__(self, max_bytes):
        """`max_bytes`: of file content in all."""
        self.max_bytes = max_bytes
        self.bytes = 0
        self.files = 0
        self.entries = 0
        self.skipped = []
        """Entries that cannot be transferred: sockets, devices, links that lead out."""

    def add(self, name, size):
        """Count an entry. Raises ArchiveError beyond the limits."""
        self.entries += 1
        self.bytes += size
        if self.entries > MAX_ENTRIES:
            raise ArchiveError("more than %d entries at %s; transfer less at a time" % (MAX_ENTRIES, name))
        if self.bytes > self.max_bytes:
            raise ArchiveError(
                "more than max_bytes=%d bytes at %s; exclude something or allow more" % (self.max_bytes, name)
            )

    def as_dict(self):
        """For the reply."""
        return {"bytes": self.bytes, "files": self.files, "skipped": self.skipped[:1000]}


# -- making ------------------------------------------------------------------------------------------


def stream(root, exclude, tally):
    """Pieces of a tar archive of the directory `root`, with names relative to it. `exclude`: glob patterns of
    names or relative paths. Raises ArchiveError and OSError.
    """
    yield from _tree(root, "", exclude, tally)
    yield b"\0" * (2 * BLOCK_BYTES)


def stream_of(root, entries, exclude, tally):
    """The same of some paths below `root`: each with the mode that it gets, or None for a directory or file
    as it is, with all that is in it. What is not there is left away.
    """
    for name, mode in entries:
        path = os.path.join(root, name)
        try:
            info = os.lstat(path)
        except OSError:
            continue
        header = _header(name, info)
        if mode is not None:
            header.mode = mode
        yield from _entry(path, header, info, tally)
        if mode is None and stat.S_ISDIR(info.st_mode):
            yield from _tree(root, name, exclude, tally)
    yield b"\0" * (2 * BLOCK_BYTES)


def _tree(root, below, exclude, tally):
    pending = [below]
    while pending:
        directory = pending.pop()
        with os.scandir(os.path.join(root, directory)) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            name = os.path.join(directory, entry.name)
            if any(fnmatch.fnmatchcase(form, glob) for glob in exclude for form in (name, entry.name)):
                continue
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                pending.append(name)
            yield from _entry(entry.path, _header(name, info), info, tally)


def _entry(path, header, info, tally):
    if stat.S_ISREG(info.st_mode):
        yield from _file(path, header, tally)
    elif stat.S_ISDIR(info.st_mode) or stat.S_ISLNK(info.st_mode):
        tally.add(header.name, 0)
        header.type = tarfile.DIRTYPE
        if stat.S_ISLNK(info.st_mode):
            header.type, header.linkname = tarfile.SYMTYPE, os.readlink(path)
        yield _encoded(header)
    else:
        tally.skipped.append(printable(header.name))


def _file(path, header, tally):
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        unsent = header.size = os.fstat(fd).st_size
        tally.add(header.name, unsent)
        tally.files += 1
        yield _encoded(header)
        while unsent:  # exactly as much as the header says, whatever becomes of the file meanwhile
            piece = file.read(min(unsent, PIECE_BYTES)) or b"\0" * min(unsent, PIECE_BYTES)
            unsent -= len(piece)
            yield piece
    yield b"\0" * (-header.size % BLOCK_BYTES)


def _header(name, info):
    header = tarfile.TarInfo(name)
    header.mode = stat.S_IMODE(info.st_mode) & 0o777
    header.mtime = int(info.st_mtime)
    return header


def _encoded(header):
    return header.tobuf(FORMAT, "utf-8", "surrogateescape")


def pieces(parts, compress=False):
    """The same bytes in pieces of about PIECE_BYTES, as gzip if asked for."""
    zipper = zlib.compressobj(6, zlib.DEFLATED, GZIP_WBITS) if compress else None
    waiting = bytearray()
    for part in parts:
        waiting += zipper.compress(part) if zipper else part
        if len(waiting) >= PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if zipper:
        waiting += zipper.flush()
    if waiting:
        yield bytes(waiting)


# -- unpacking ---------------------------------------------------------------------------------------


class _Entry(tarfile.TarInfo):
    def _proc_member(self, archive):
        if self.type in EXTENDED and self.size > MAX_EXTENDED_HEADER_BYTES:
            raise tarfile.HeaderError("an extended header of %d bytes" % self.size)
        return super()._proc_member(archive)


def unpack(file, target, tally):
    """Unpack the tar archive in the readable `file` into the empty directory `target`.

    Raises ArchiveError for a name that leads out of it, for anything but files, directories and symbolic
    links, and beyond the limits of `tally`. Links that lead out are left away.
    """
    links, modes = [], []
    try:
        with tarfile.open(
            fileobj=file, mode="r|", tarinfo=_Entry, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            for entry in archive:
                name = _checked_name(entry.name)
                path = os.path.join(target, name)
                if entry.isreg() and not entry.issparse():
                    tally.add(name, entry.size)
                    _make_parents(target, name)
                    _write_file(archive.extractfile(entry), path, entry.size)
                    os.chmod(path, entry.mode & 0o777 | 0o600)
                    tally.files += 1
                elif entry.isdir():
                    tally.add(name, 0)
                    _make_parents(target, os.path.join(name, "x"))
                    modes.append((path, entry.mode & 0o777 | 0o700))
                elif entry.issym():
                    tally.add(name, 0)
                    links.append((name, entry.linkname))
                else:
                    raise ArchiveError("%r is neither a file, a directory nor a symbolic link" % name)
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise ArchiveError("not a whole tar archive: %s" % error)
    for name, link in links:
        if leads_out(name, link):
            tally.skipped.append(printable(name))
            continue
        # From where that leads, `link` would climb further than was counted.
        _check_no_link_above(target, name)
        _make_parents(target, name)
        os.symlink(link, os.path.join(target, name))
    for path, mode in modes:
        os.chmod(path, mode)


def leads_out(name, link):
    """Whether a symbolic link called `name` (relative to the root) may lead out of the root.

    `..` is accepted at the start only, where it climbs real directories: behind another link it would climb
    from wherever that leads.
    """
    parts = [part for part in link.split("/") if part not in ("", ".")]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    return link.startswith("/") or not link or ".." in parts[climbs:] or climbs > name.count("/")


def merge(source, target):
    """Move what is in the directory `source` into the directory `target`, replacing files and links, never
    following a link. Raises ArchiveError, with nothing moved, when a file would have to replace a directory.
    """
    _merge(source, target, move=False)
    _merge(source, target, move=True)


def _merge(source, target, move):
    with os.scandir(source) as scan:
        entries = list(scan)
    for entry in entries:
        place = os.path.join(target, entry.name)
        is_directory = entry.is_dir(follow_symlinks=False)
        if os.path.isdir(place) and not os.path.islink(place):
            if not is_directory:
                raise ArchiveError("%s is a directory; the file of that name cannot replace it" % place)
            _merge(entry.path, place, move)
        elif move:
            if is_directory and os.path.lexists(place):
                os.unlink(place)  # a directory cannot be renamed over a file or link
            os.rename(entry.path, place)


def remove(path):
    """Remove a file or a directory with all that is in it, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def printable(name):
    """A name that travels as JSON whatever bytes it has."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _checked_name(name):
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts or "\0" in name:
        raise ArchiveError("the archive holds %r, which lies outside of it" % name)
    return "/".join(parts)


def _make_parents(target, name):
    """The directories above `name`; real ones, because links are made last."""
    os.makedirs(os.path.dirname(os.path.join(target, name)), mode=0o755, exist_ok=True)


def _check_no_link_above(target, name):
    above = os.path.dirname(name)
    while above:
        if os.path.islink(os.path.join(target, above)):
            raise ArchiveError("the archive holds %r below the link %r" % (name, above))
        above = os.path.dirname(above)


def _write_file(content, path, size):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        while size:
            piece = content.read(min(size, PIECE_BYTES))
            if not piece:
                raise EOFError("it ends within a file")
            size -= len(piece)
            file.write(piece)
