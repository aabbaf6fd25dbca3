"""Files for the client: whole ones in one frame, large ones and directories piece by piece.

A relative path starts at the workspace. `upload` and `pack` go on over several frames of their connection:
each piece is one request and one reply. When the connection breaks, what was begun is removed.
"""

import base64
import binascii
import os
import stat

import archive
import wire
from errors import RequestError

MAX_FILE_BYTES = 64 * 1024 * 1024  # content travels as base64 in one frame
MAX_PIECE_BYTES = 8 * 1024 * 1024
MAX_LISTED = 10000
KINDS = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "link"))


class Files:
    """The file system as the sandbox's user sees it."""

    def __init__(self, workspace):
        self._workspace = workspace

    def op_read_file(self, request, connection):
        path = self._path(request)
        limit = min(int(request.get("max_bytes") or MAX_FILE_BYTES), MAX_FILE_BYTES)
        with _open_regular(path) as file:
            content = file.read(limit + 1)
            size = max(os.fstat(file.fileno()).st_size, len(content))
        if len(content) > limit:
            raise RequestError("%s has %d bytes; at most %d are read" % (path, size, limit))
        return {"content": base64.b64encode(content).decode()}

    def op_write_file(self, request, connection):
        path = self._path(request)
        content = base64.b64decode(request["content"])
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
        with os.fdopen(fd, "wb") as file:
            _check_regular(fd, path)
            os.ftruncate(fd, 0)
            file.write(content)
        if request.get("mode") is not None:
            os.chmod(path, int(request["mode"]))
        return {"size": len(content)}

    def op_read_piece(self, request, connection):
        with _open_regular(self._path(request)) as file:
            file.seek(int(request["offset"]))
            content = file.read(min(int(request["size"]), MAX_PIECE_BYTES))
        return {"content": base64.b64encode(content).decode()}

    def op_stat(self, request, connection):
        path = self._path(request)
        try:
            return _described(os.stat(path) if request.get("follow", True) else os.lstat(path))
        except (FileNotFoundError, NotADirectoryError):
            return {"kind": None, "size": 0, "mode": 0, "mtime": 0.0}

    def op_list_dir(self, request, connection):
        entries = []
        with os.scandir(self._path(request)) as scan:
            for entry in scan:
                if len(entries) >= MAX_LISTED:
                    break
                described = _described(entry.stat(follow_symlinks=False))
                entries.append(dict(described, name=archive.printable(entry.name)))
        return {"entries": sorted(entries, key=lambda entry: entry["name"])}

    # -- piece by piece ----------------------------------------------

    def op_upload(self, request, connection):
        path = os.path.realpath(self._path(request))
        tally = archive.Tally(int(request["max_bytes"]))
        incoming = _Incoming(connection)
        token = ".upload-" + binascii.hexlify(os.urandom(6)).decode()
        try:
            if request["kind"] == "file":
                return self._upload_file(path, token, int(request["mode"]), incoming, tally)
            return self._upload_directory(path, token, incoming, tally)
        except _GivenUp:
            return {}
        except archive.ArchiveError as error:
            raise RequestError("cannot upload to %s: %s" % (path, error))

    def _upload_file(self, path, token, mode, incoming, tally):
        if os.path.isdir(path):
            raise RequestError("%s is a directory; name the file in it" % path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = os.path.join(os.path.dirname(path), token)
        try:
            with open(temporary, "xb") as file:
                while True:
                    piece = incoming.read(archive.PIECE_BYTES)
                    if not piece:
                        break
                    tally.add(path, len(piece))
                    tally.entries = 0
                    file.write(piece)
            tally.files = 1
            os.chmod(temporary, mode & 0o777)
            os.replace(temporary, path)
        finally:
            archive.remove(temporary)
        return tally.as_dict()

    def _upload_directory(self, path, token, incoming, tally):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise RequestError("%s is a file; a directory cannot replace it" % path)
        made = not os.path.isdir(path)
        os.makedirs(path, exist_ok=True)
        temporary = os.path.join(path, token)  # in it: the workspace is a file system of its own
        try:
            os.mkdir(temporary)
            archive.unpack(incoming, temporary, tally)
            incoming.drain()
            archive.merge(temporary, path)
            made = False
        finally:
            archive.remove(temporary)
            if made:
                archive.remove(path)
        return tally.as_dict()

    def op_pack(self, request, connection):
        """The directory, or those `entries` of it, as a tar archive; the last reply carries the sums and no
        content. Entries that had to be opened to be read are closed again.
        """
        path = self._path(request)
        if not os.path.isdir(path):
            raise RequestError("%s is not a directory" % path)
        tally = archive.Tally(int(request["max_bytes"]))
        exclude = [str(glob) for glob in request.get("exclude") or []]
        try:
            entries = request.get("entries")
            if entries is None:
                stream = archive.stream(path, exclude, tally)
            else:
                stream = archive.stream_of(path, entries, exclude, tally)
            for piece in archive.pieces(stream, bool(request.get("compress"))):
                content = base64.b64encode(piece).decode()
                wire.send(connection, {"ok": True, "result": {"content": content}})
                if wire.receive(connection) is None:
                    raise RequestError("the transfer was given up")
        except archive.ArchiveError as error:
            raise RequestError("cannot pack %s: %s" % (path, error))
        for name, mode in reversed(entries or ()):
            place = os.path.join(path, name)
            if mode is not None and not os.path.islink(place) and os.path.exists(place):
                os.chmod(place, mode)
        return tally.as_dict()

    def _path(self, request):
        return os.path.join(self._workspace, request["path"])


class _GivenUp(Exception):
    """The client cannot go on and wants to know when its upload has been removed."""


class _Incoming:
    """The pieces that a client sends, as a readable file. A piece is acknowledged when the next is wanted."""

    def __init__(self, connection):
        self._connection = connection
        self._waiting = b""
        self._ended = False

    def read(self, size):
        """Up to `size` bytes; b"" at the end. Raises RequestError when the client goes away."""
        while not self._waiting and not self._ended:
            wire.send(self._connection, {"ok": True, "result": {}})
            request = wire.receive(self._connection)
            if request is None:
                raise RequestError("the transfer was given up")
            if request.get("give_up"):
                raise _GivenUp
            self._waiting = base64.b64decode(request.get("content") or "")
            self._ended = bool(request.get("last"))
        piece, self._waiting = self._waiting[:size], self._waiting[size:]
        return piece

    def drain(self):
        """Take what a sender adds behind the end of the archive."""
        while self.read(archive.PIECE_BYTES):
            pass


def _open_regular(path):
    """Open for reading; never waits for the other end of a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = os.fdopen(fd, "rb")
    try:
        _check_regular(fd, path)
    except RequestError:
        file.close()
        raise
    return file


def _check_regular(fd, path):
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise RequestError("%s is not a regular file" % path)


def _described(info):
    kind = next((name for test, name in KINDS if test(info.st_mode)), "other")
    return {"kind": kind, "size": info.st_size, "mode": stat.S_IMODE(info.st_mode), "mtime": info.st_mtime}
