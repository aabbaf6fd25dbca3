"""Runs in the agent's sandbox, by the server's own Python: puts what is to be verified into one archive.

Standard input says what: `entries` (path, mode), or `sources` (path, patterns to leave out) whose trees are
walked; `out` is the archive, `most` how many bytes it may hold. Standard output says what came of it.
"""

import fnmatch
import json
import os
import shutil
import stat
import sys
import tarfile


class TooMuch(Exception):
    """More was changed than may travel."""


class Packing:
    """An archive that is being made; nobody else runs in the sandbox meanwhile."""

    def __init__(self, archive, most):
        self._archive, self._most = archive, most
        self.files = self.bytes = 0

    def add(self, path, mode=None):
        """Put in what is there now; `mode`: what the agent made of its permissions."""
        try:
            info = os.lstat(path)
        except OSError:
            return
        header = tarfile.TarInfo(path.lstrip("/"))
        header.mode, header.mtime = stat.S_IMODE(info.st_mode) if mode is None else mode, info.st_mtime
        if stat.S_ISLNK(info.st_mode):
            header.type, header.linkname = tarfile.SYMTYPE, os.readlink(path)
            self._archive.addfile(header)
        elif stat.S_ISDIR(info.st_mode):
            header.type = tarfile.DIRTYPE
            self._archive.addfile(header)
        elif stat.S_ISREG(info.st_mode):
            self._add_file(path, header)
        self.files += 1

    def _add_file(self, path, header):
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            header.size = os.fstat(file.fileno()).st_size
            self.bytes += header.size
            if self.bytes > self._most:
                raise TooMuch("the files have more than %d MiB in all" % (self._most >> 20))
            self._archive.addfile(header, file)

    def add_tree(self, source, exclude):
        """Put in a file, or a directory with all below it; links are followed nowhere."""
        if any(fnmatch.fnmatchcase(os.path.basename(source), glob) for glob in exclude):
            return
        self.add(source)
        if not os.path.isdir(source) or os.path.islink(source):
            return
        pending = [source]
        while pending:
            directory = pending.pop()
            for name in sorted(os.listdir(directory)):
                path = os.path.join(directory, name)
                below = os.path.relpath(path, source)
                if any(fnmatch.fnmatchcase(form, glob) for glob in exclude for form in (name, below)):
                    continue
                self.add(path)
                if os.path.isdir(path) and not os.path.islink(path):
                    pending.append(path)


def main():
    order = json.load(sys.stdin)
    directory = os.path.dirname(order["out"])
    room = os.path.dirname(directory)
    was = stat.S_IMODE(os.stat(room).st_mode)
    if was & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(room, was | stat.S_IRWXU)
    if os.path.isdir(directory) and not os.path.islink(directory):
        shutil.rmtree(directory)  # of an earlier step
    elif os.path.lexists(directory):
        os.unlink(directory)
    os.mkdir(directory)
    with tarfile.open(order["out"], "w", format=tarfile.PAX_FORMAT) as archive:
        packing = Packing(archive, order["most"])
        try:
            for path, mode in order.get("entries", ()):
                packing.add(path, mode)
            for source, exclude in order.get("sources", ()):
                packing.add_tree(source, exclude)
        except TooMuch as error:
            print(json.dumps({"error": str(error)}))
            return
    for path, mode in reversed(order.get("entries", ())):  # those that had to be opened are closed again
        if not os.path.islink(path) and os.path.exists(path):
            os.chmod(path, mode)
    print(json.dumps({"files": packing.files, "bytes": packing.bytes}))


if __name__ == "__main__":
    main()
