"""A text file as an editor needs it: decoded for reading, and written back so that only the edit changes.

A file is written in place and not replaced by a new one, so hard links, symbolic links, owner and permission
bits stay. The room for the new content is reserved first and the old content put back when writing fails, so
a full disk costs nothing; only a kill in the middle of the write could.
"""

import bisect
import codecs
import errno
import os
import re
import stat

MAX_EDIT_BYTES = 10 * 1024 * 1024  # a larger file is no source text, and its old content is kept for undo
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Control characters that no text in an eight-bit encoding has.
NOT_TEXT = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")


class EditError(Exception):
    """The model's mistake; the message tells it what to do instead."""


class Document:
    """Content of a text file, its encoding and its line endings."""

    def __init__(self, path, raw):
        """`raw`: the bytes. Raises EditError when they are no text."""
        self.path, self.raw = path, raw
        self.mark, self.encoding = b"", "utf-8"
        for mark, encoding in BYTE_ORDER_MARKS:
            if raw.startswith(mark):
                self.mark, self.encoding = mark, encoding
                break
        body = raw[len(self.mark) :]
        if b"\0" in body and not self.encoding.startswith("utf-16"):
            raise EditError("%s is a binary file (it contains NUL bytes); use a shell command on it" % path)
        try:
            self.text = body.decode(self.encoding)
        except UnicodeDecodeError:
            if self.mark or NOT_TEXT.search(body):
                raise EditError(
                    "%s is a binary file (no known text encoding fits); use a shell command on it" % path
                )
            self.encoding = "latin-1"
            self.text = body.decode(self.encoding)
        self.newline = _dominant_newline(self.text)

    def encode(self, text):
        """Bytes of the whole file with `text` in it. Raises EditError when the encoding lacks a character."""
        try:
            return self.mark + text.encode(self.encoding)
        except UnicodeEncodeError as error:
            character = text[error.start]
            raise EditError(
                "%s is encoded in %s, which cannot hold %r; convert the file first, for example with iconv, "
                "or use another character" % (self.path, self.encoding, character)
            )

    def plain(self):
        """The text with every line ending a `\\n`, and a function from its offsets to those of `text`."""
        if self.newline == "\r":
            return self.text.replace("\r", "\n"), lambda offset: offset
        if "\r\n" not in self.text:
            return self.text, lambda offset: offset
        plain = self.text.replace("\r\n", "\n")
        pairs = []  # offsets in `plain` of newlines that are two characters in `text`
        for match in re.finditer("\r\n", self.text):
            pairs.append(match.start() - len(pairs))
        return plain, lambda offset: offset + bisect.bisect_left(pairs, offset)

    def with_newlines(self, text):
        """`text` with the file's dominant line ending in place of bare `\\n`."""
        if self.newline == "\n":
            return text
        return re.sub("(?<!\r)\n", self.newline, text)

    def lines(self):
        """The lines without their endings; a missing newline at the end makes no difference."""
        return split_lines(self.plain()[0])


def split_lines(text):
    """Lines of a text whose endings are `\\n`."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def read_regular(path, limit):
    """(first `limit` bytes, size) of a regular file; never waits on a pipe or a device. Raises EditError and
    OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise EditError("%s is neither a regular file nor a directory" % path)
        content = file.read(limit)
        return content, max(info.st_size, len(content))


def create(path, raw):
    """Write a new file and the directories it needs. Leaves nothing of the file behind when that fails."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(raw)
    except BaseException:
        os.unlink(path)
        raise


def overwrite(path, raw, old):
    """Replace the content `old` of an existing file by `raw`; after an OSError the old one is in place."""
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        try:
            if len(raw) > len(old):
                _reserve(fd, len(raw))
            _write_at_start(fd, raw)
        except BaseException:
            _write_at_start(fd, old)
            raise
    finally:
        os.close(fd)


def _reserve(fd, size):
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write_at_start(fd, raw):
    os.lseek(fd, 0, os.SEEK_SET)
    view = memoryview(raw)
    while view:
        view = view[os.write(fd, view) :]
    os.ftruncate(fd, len(raw))


def _dominant_newline(text):
    pairs = text.count("\r\n")
    singles = text.count("\n") - pairs
    if not pairs and not singles and "\r" in text:
        return "\r"
    return "\r\n" if pairs > singles else "\n"
