"""What the editor tells a model beyond the bare fact: numbered lines, listings, what it probably meant."""

import difflib
import errno
import os
import stat

from document import split_lines

MAX_DIRECTORY_ENTRIES = 1000
MAX_HINT_LINES = 5000  # looked through for a line like the one that was not found
MAX_HINT_CHARS = 400
MAX_HINT_CHOICES = 5000
MAX_SNIPPET_CHARS = 4000


def numbered(lines, first, last, max_chars):
    """(lines with their numbers, the last one that fitted)."""
    shown, used = [], 0
    for number in range(first, last + 1):
        line = "%6d\t%s\n" % (number, lines[number - 1])
        if used + len(line) > max_chars:
            if shown:
                return "".join(shown), number - 1
            note = "\n[cut: line %d has %d characters]\n" % (number, len(lines[number - 1]))
            return line[:max_chars] + note, number
        shown.append(line)
        used += len(line)
    return "".join(shown), last


def list_directory(path):
    """What lies in a directory, two levels deep, without hidden entries."""
    shown, hidden, cut = [], 0, False
    pending = [(path, 1)]
    while pending:
        directory, depth = pending.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError:
            continue  # not ours to read: its name is listed above
        for entry in entries:
            if entry.name.startswith("."):
                hidden += 1
            elif len(shown) >= MAX_DIRECTORY_ENTRIES:
                cut = True
            elif entry.is_dir(follow_symlinks=False):
                shown.append(entry.path + "/")
                if depth < 2:
                    pending.append((entry.path, depth + 1))
            elif entry.is_symlink():
                shown.append("%s -> %s" % (entry.path, os.readlink(entry.path)))
            else:
                shown.append(entry.path)
    head = "%s holds %s%s, two levels deep%s:" % (
        path,
        "more than " if cut else "",
        counted(len(shown), "entry", "entries"),
        " (%d hidden ones not shown)" % hidden if hidden else "",
    )
    if cut:
        shown.append("[cut: list a subdirectory to see more]")
    if not shown:
        head = "%s is empty" % path
        head += " but for %s" % counted(hidden, "hidden entry", "hidden entries") if hidden else ""
    return "\n".join([head, *sorted(shown)]).encode("utf-8", "replace").decode()


def not_unique(path, plain, old, count):
    """Names the lines of all occurrences."""
    lines, position = [], -len(old)
    for _ in range(min(count, 50)):
        position = plain.index(old, position + len(old))
        lines.append(str(plain.count("\n", 0, position) + 1))
    return "old_str occurs %d times in %s, at lines %s%s; add lines around it until it is unique" % (
        count,
        path,
        ", ".join(lines),
        ", ..." if count > 50 else "",
    )


def not_found(document, old):
    """Says that the text is not there, and what is there instead as far as that can be guessed."""
    message = "old_str was not found verbatim in %s" % document.path
    lines, asked = document.lines(), split_lines(old.replace("\r\n", "\n"))
    if "\r" in old and old.replace("\r\n", "\n") in document.plain()[0]:
        return message + ": the line endings differ; write them as \\n"
    stripped = [line.strip() for line in asked]
    if any(stripped):
        here = [line.strip() for line in lines]
        for start in range(len(here) - len(stripped) + 1):
            if here[start] == stripped[0] and here[start : start + len(stripped)] == stripped:
                body = numbered(lines, start + 1, start + len(stripped), MAX_SNIPPET_CHARS)[0]
                return (
                    message
                    + ", but it is at line %d with other whitespace (indentation, tabs, spaces at a line's "
                    "end):\n%s" % (start + 1, body)
                )
    key = max(asked, key=lambda line: len(line.strip()), default="")[:MAX_HINT_CHARS]
    candidates = [line for line in lines[:MAX_HINT_LINES] if len(line) <= MAX_HINT_CHARS]
    near = difflib.get_close_matches(key, candidates, 1) if key.strip() else []
    if near:
        number = lines.index(near[0]) + 1
        return message + ". The nearest to its line %r is line %d: %r" % (key, number, near[0])
    return message + "; view the file and copy the text exactly"


def similar_path(path):
    """The end of a sentence that says a path does not exist."""
    directory, name = os.path.split(path)
    while directory != "/" and not os.path.isdir(directory):
        directory, name = os.path.split(directory)
    try:
        near = difflib.get_close_matches(name, os.listdir(directory)[:MAX_HINT_CHOICES], 1)
    except OSError:
        near = []
    if near:
        return "; maybe you mean %s" % os.path.join(directory, near[0])
    return "; view %s to see what there is" % directory


def explain(error, path):
    """An OSError as the model can act on it."""
    if error.errno in (errno.EACCES, errno.EPERM):
        try:
            mode = " (mode %s)" % oct(stat.S_IMODE(os.stat(path).st_mode))[2:]
        except OSError:
            mode = ""
        return "no permission for %s%s; change it with chmod if it is yours" % (path, mode)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: %s was not changed; remove files that are not needed" % path
    if error.errno == errno.EROFS:
        return "%s lies on a read-only file system" % path
    return "%s: %s" % (path, error.strerror or error)


def counted(number, singular, plural=None):
    """A number with its noun."""
    return "%d %s" % (number, singular if number == 1 else plural or singular + "s")
