"""What changed below a directory, told without reading its files.

A file is as it was when its inode, ctime, size and mode are. Times of content can be set by anybody
(`touch`), but ctime is the kernel's: whatever changes a file, its mode, its name or its times moves it to
now, and only who sets the machine's clock could set it back.
"""

import os
import stat

from errors import RequestError

MAX_NOTED = 1000000
MAX_CHANGED = 100000
"""Entries of one answer, changed and removed together."""


class Trees:
    """Remembers directories; asked again, says what is different."""

    def __init__(self, workspace):
        self._workspace = workspace
        self.noted = {}
        """By path: what is left out, whether with directories, and identities by name (None: there is more
        that differs than can be told).
        """

    def op_note_tree(self, request, connection):
        path = os.path.join(self._workspace, request["path"])
        exclude = frozenset(request.get("exclude") or ())
        directories = bool(request.get("directories"))
        noted = {}
        for name, _, info in walk(path, exclude, directories):
            if len(noted) >= MAX_NOTED:
                raise RequestError("more than %d files below %s" % (MAX_NOTED, path))
            noted[name] = identity(info)
        self.noted[path] = (exclude, directories, noted)
        return {"entries": len(noted)}

    def op_changed_tree(self, request, connection):
        path = os.path.join(self._workspace, request["path"])
        if path not in self.noted:
            raise RequestError("%s was not noted before" % path)
        exclude, directories, noted = self.noted[path]
        if noted is None:
            _check_count(MAX_CHANGED + 1, path)
        changed, seen = [], set()
        for name, entry, info in walk(path, exclude, directories, _make_readable):
            seen.add(name)
            if noted.get(name) != identity(info):
                changed.append(_described(name, entry, info, name not in noted))
                _check_count(len(changed), path)
        removed = [name for name in noted if name not in seen]
        _check_count(len(changed) + len(removed), path)
        return {"changed": changed, "removed": removed}


def _check_count(count, path):
    if count > MAX_CHANGED:
        raise RequestError("more than %d files are not what they were below %s" % (MAX_CHANGED, path))


def walk(root, exclude, directories, open_up=None):
    """Name below the root, entry and stat of each file and link, and of each directory if they are asked for.

    `exclude`: names wherever they are, and paths below the root, with a `/` before them or without.
    `open_up(path, info, bits)`: makes readable what its owner has made unreadable.
    """
    if os.path.islink(root):
        return  # what it leads to was not noted
    pending = [("", None)]
    while pending:
        directory, info = pending.pop()
        place, prefix = os.path.join(root, directory), directory and directory + "/"
        try:
            if open_up:
                open_up(place, info or os.stat(place), stat.S_IRWXU)
            with os.scandir(place) as scan:
                entries = list(scan)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # nothing is left of it; or it is another user's, and nobody in here could change it
        for entry in entries:
            name = prefix + entry.name
            if entry.name in exclude or name in exclude or "/" + name in exclude:
                continue
            info = entry.stat(follow_symlinks=False)
            kind = stat.S_IFMT(info.st_mode)
            if kind == stat.S_IFDIR:
                pending.append((name, info))
                if directories:
                    yield name, entry, info
            elif kind == stat.S_IFREG:
                if open_up and not info.st_mode & stat.S_IRUSR:
                    open_up(entry.path, info, stat.S_IRUSR)
                yield name, entry, info
            elif kind == stat.S_IFLNK:
                yield name, entry, info


def _make_readable(path, info, bits):
    if info.st_mode & bits != bits and info.st_uid == os.geteuid() and not stat.S_ISLNK(info.st_mode):
        os.chmod(path, stat.S_IMODE(info.st_mode) | bits)


def identity(info):
    """Two of one file differ when it was changed in between."""
    if stat.S_ISDIR(info.st_mode):
        return info.st_mode  # its times and size are those of what is in it
    return info.st_dev, info.st_ino, info.st_ctime_ns, info.st_size, info.st_mode


def _described(name, entry, info, new):
    is_link, is_directory = stat.S_ISLNK(info.st_mode), stat.S_ISDIR(info.st_mode)
    return {
        "path": name,
        "kind": "link" if is_link else "directory" if is_directory else "file",
        "size": 0 if is_directory else info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "link": os.readlink(entry.path) if is_link else "",
        "new": new,
    }
