"""Runs in the fresh sandbox, by the server's own Python: puts the agent's files in place, but for those that
would run the verifier.

Standard input says what: `archive`, `removed` (paths, with all below), `replaced` (directories of which only
what is in the archive is left), `workdir`, `roots` (further directories that tests
work in), `env` (of the verifier), `trust`, `directories` (to be there) and `stale` (files not to be there).
Standard output says what was withheld.
"""

import json
import os
import posixpath
import shutil
import stat
import sys
import tarfile

MOST_TOLD = 200


class Placing:
    """Puts files in place; what cannot be is withheld."""

    def __init__(self, rules):
        self._rules, self.withheld, self.placed = rules, [], 0
        self._modes, self._links, self._real = [], [], set()

    def run(self, archive, removed, replaced):
        """Take away, then make directories, files and links."""
        entries = archive.getmembers()
        gone, kept = set(removed), {"/" + entry.name for entry in entries}
        for path in removed:
            gone.update(_below(path))
        for path in replaced:
            gone.update(set(_below(path)) - kept)
        for path in sorted(gone, reverse=True):
            self._try(path, "removed", lambda: b"", self._remove)
        for kind, of_kind in (("directory", tarfile.TarInfo.isdir), ("file", tarfile.TarInfo.isreg)):
            for entry in filter(of_kind, entries):
                self._place(archive, entry, kind)
        for entry in filter(tarfile.TarInfo.issym, entries):
            self._place(archive, entry, "link")
        for path in self._links:  # only now, for one may lead over another
            why = self._rules.objection_to_link(path)
            if why is not None:
                os.unlink(path)
                self.withheld.append((path, why))

    def close(self):
        """Give directories the modes that they had, after which some may be closed to us."""
        for path, mode in reversed(self._modes):
            os.chmod(path, mode)

    def _place(self, archive, entry, kind):
        def read():
            return archive.extractfile(entry).read(self._rules.most_read)

        make = {"directory": self._directory, "file": self._file, "link": self._link}[kind]
        self._try("/" + entry.name, kind, read, lambda path: make(path, entry, archive))

    def _try(self, path, kind, read, make):
        why = self._rules.objection(path, kind, read)
        if why is None and not self._is_real(posixpath.dirname(path)):
            why = "lies below a link of the image"
        if why is None:
            try:
                make(path)
                self.placed += 1
                self._rules.image.made.add(path)
            except (OSError, OverflowError, ValueError) as error:
                why = f"cannot be put there: {error}"
        if why and kind != "directory":  # of those, what is in them is told
            self.withheld.append((path, why))

    def _is_real(self, directory):
        """Whether no link leads there; links are made last, so that what was none stays none."""
        if directory not in self._real and os.path.realpath(directory) == directory:
            self._real.add(directory)
        return directory in self._real

    def _remove(self, path):
        if os.path.isdir(path) and not os.path.islink(path):
            if not os.listdir(path):
                os.rmdir(path)  # else something in it stays
        elif os.path.lexists(path):
            os.unlink(path)

    def _clear(self, path, keep_directory=False):
        os.makedirs(posixpath.dirname(path), exist_ok=True)
        if os.path.isdir(path) and not os.path.islink(path):
            if not keep_directory:
                shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)

    def _directory(self, path, entry, archive):
        self._clear(path, keep_directory=True)
        os.makedirs(path, exist_ok=True)
        os.chmod(path, entry.mode | stat.S_IRWXU)
        self._modes.append((path, entry.mode))

    def _file(self, path, entry, archive):
        try:
            self._clear(path)
            flags = os.O_CREAT | os.O_EXCL
        except OSError:  # a mount, such as /etc/passwd
            flags = os.O_TRUNC
        with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o600), "wb") as file:
            shutil.copyfileobj(archive.extractfile(entry), file, 1 << 20)
        os.chmod(path, entry.mode)
        os.utime(path, (entry.mtime, entry.mtime))

    def _link(self, path, entry, archive):
        self._clear(path)
        os.symlink(entry.linkname, path)
        self._links.append(path)


def _below(directory):
    """What is in it, at any depth; nothing where it is no directory."""
    if not os.path.islink(directory):
        for place, directories, files in os.walk(directory):
            for name in directories + files:
                yield posixpath.join(place, name)


def main():
    sys.path.insert(0, posixpath.dirname(__file__))
    from rules import Image, Rules

    order = json.load(sys.stdin)
    for path in order["directories"]:
        os.makedirs(path, exist_ok=True)
    for path in order["stale"]:
        if os.path.lexists(path):
            os.unlink(path)
    image = Image(order["workdir"], order["roots"], {**os.environ, **order["env"]})
    placing = Placing(Rules(image, order["trust"]))
    with tarfile.open(order["archive"], "r:", encoding="utf-8", errors="surrogateescape") as archive:
        placing.run(archive, order["removed"], order["replaced"])
    shutil.rmtree(posixpath.dirname(order["archive"]))
    placing.close()
    told = placing.withheld[:MOST_TOLD]
    print(json.dumps({"placed": placing.placed, "withheld": told, "count": len(placing.withheld)}))


if __name__ == "__main__":
    main()
