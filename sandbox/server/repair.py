"""Undoing what would keep the server from its work.

In a container all files are the agent's own, system files of the image included, so it may break its shell by
accident, or to escape being scored.
"""

import os
import stat

PRELOAD = "/etc/ld.so.preload"  # the dynamic loader reads it for every program, the server's own included

MOST_PRELOAD_BYTES = 1 << 16


def write_private(path, text):
    """Write a file that only its owner reads, in place of whatever is there."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        _write_over(path, data)
    except OSError:  # something else is there (a pipe without reader would block without the flag), or closed
        from archive import remove  # slow to import, and of rare use

        directory = os.path.dirname(path)  # of ours; to be one that we can work in
        if not os.path.isdir(directory):
            os.makedirs(directory, mode=0o700)
        os.chmod(directory, 0o700)
        remove(path)
        _write_over(path, data)


def _write_over(path, data):
    # Not emptied first: of what was, ext4 brings the new content to the disk before `close` returns.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        size, info = len(data), os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError("another kind of file")
        while data:
            data = data[os.write(fd, data) :]
        if info.st_size > size:  # to write its size anew takes longer than to look
            os.ftruncate(fd, size)
    finally:
        os.close(fd)


def open_root():
    """Let the root be entered again where the agent has closed it: nothing could be opened or started."""
    if not os.access("/", os.X_OK):
        try:
            os.chmod("/", 0o755)
        except OSError:
            pass  # what then cannot be done says so itself


def usable_directory(places):
    """The first of these directories (bytes) that can be entered; the root else."""
    for path in places:
        if os.path.isdir(path) and os.access(path, os.X_OK):
            return path
    return b"/"


class Loader:
    """What the dynamic loader puts into every program, as it was before the agent came."""

    def __init__(self, ours):
        """`ours`: whether the root directory is the sandbox's own, and not the machine's."""
        self._ours = ours
        self._content = content(PRELOAD)

    def restore(self):
        """Take back what the agent changed. Raises OSError."""
        if not self._ours or content(PRELOAD) == self._content:
            return
        from archive import remove

        directory = os.path.dirname(PRELOAD)
        if os.path.isdir(directory):
            os.chmod(directory, 0o755)
        remove(PRELOAD)
        if isinstance(self._content, bytes):
            with open(PRELOAD, "xb") as file:
                file.write(self._content)


def content(path, most_bytes=MOST_PRELOAD_BYTES):
    """What is in the file; None without one, and what equals nothing for what no image has there.

    The path may be the agent's: a pipe would block, a link lead to what has no end.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:
        return object()  # something is there that cannot be read
    try:
        return os.read(fd, most_bytes) if stat.S_ISREG(os.fstat(fd).st_mode) else object()
    except OSError:
        return object()
    finally:
        os.close(fd)
