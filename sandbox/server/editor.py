"""The operation `editor`: view, create, str_replace, insert and undo_edit, as models know them.

What a model does wrong is answered as text that tells it what to do instead (`ok` false); it is no failure of
the sandbox.
"""

import os
import threading

from document import MAX_EDIT_BYTES, Document, EditError, create, overwrite, read_regular, split_lines
from errors import RequestError
from hints import counted, explain, list_directory, not_found, not_unique, numbered, similar_path
from output import max_chars

CONTEXT_LINES = 4
MAX_SNIPPET_LINES = 60
UNDO_EDITS = 20  # of one file
UNDO_BYTES = 50 * 1024 * 1024  # of all files
COMMANDS = ("view", "create", "str_replace", "insert", "undo_edit")


class Editor:
    """Edits files and remembers how to undo that."""

    def __init__(self, workspace):
        """`workspace`: where a relative path was probably meant to start."""
        self._workspace = workspace
        self._history = History()
        self._lock = threading.Lock()

    def op_editor(self, request, connection):
        command = request["command"]
        if command not in COMMANDS:
            raise RequestError("unknown editor command %r; known are %s" % (command, ", ".join(COMMANDS)))
        with self._lock:
            self._max_chars = max_chars(request)
            path = request.get("path")
            try:
                path = self._checked(_text(request, "path", command), command)
                return {"ok": True, "output": getattr(self, "_" + command)(path, request)}
            except EditError as error:
                return {"ok": False, "output": str(error)}
            except UnicodeEncodeError as error:
                return {"ok": False, "output": "the text is not valid Unicode: %s" % error}
            except OSError as error:
                return {"ok": False, "output": explain(error, path)}

    # -- commands ----------------------------------------------

    def _view(self, path, request):
        view_range = request.get("view_range")
        if os.path.isdir(path):
            if view_range is not None:
                raise EditError("view_range does not apply to a directory; %s is one" % path)
            return list_directory(path)
        raw, size = read_regular(path, MAX_EDIT_BYTES)
        if size > len(raw):  # a character may be cut in two at the end
            lines = split_lines(raw.decode("utf-8", "replace").replace("\r\n", "\n"))
            note = (
                "[%s has %d bytes; only its first %d can be viewed here, lines 1 to %d. Use a shell command "
                "such as `sed -n` for the rest.]\n" % (path, size, len(raw), len(lines))
            )
        else:
            lines, note = Document(path, raw).lines(), ""
        first, last = _checked_range(view_range, len(lines), path)
        if not lines:
            return note + "%s is empty" % path
        body, shown = numbered(lines, first, last, self._max_chars)
        if shown < last:
            there = (first, shown, len(lines))
            note += "[cut: lines %d to %d of %d are shown; use view_range to see others]\n" % there
        return note + body

    def _create(self, path, request):
        text = _text(request, "file_text", "create")
        if os.path.lexists(path):
            if os.path.isdir(path):
                raise EditError("%s is a directory; name a file in it" % path)
            raise EditError(
                "%s exists already and is not overwritten; change it with str_replace or insert, or remove "
                "it with the shell first" % path
            )
        raw = text.encode("utf-8")
        if len(raw) > MAX_EDIT_BYTES:
            raise EditError("file_text has %d bytes; at most %d can be written" % (len(raw), MAX_EDIT_BYTES))
        create(path, raw)
        self._history.add(path, None, raw)
        return "Created %s with %s." % (path, counted(len(split_lines(text)), "line"))

    def _str_replace(self, path, request):
        old, new = _text(request, "old_str", "str_replace"), request.get("new_str") or ""
        if old == "":
            raise EditError("old_str is empty; name the text to replace, or use insert to add lines")
        if old == new:
            raise EditError("old_str and new_str are the same; nothing was changed")
        document = self._open(path)
        plain, offset_in_text = document.plain()
        if "\r" in old:  # asked for as it is in the file
            plain, offset_in_text = document.text, lambda offset: offset
        count = plain.count(old)
        if count == 0:
            raise EditError(not_found(document, old))
        start = plain.index(old)
        if count > 1:
            raise EditError(not_unique(path, plain, old, count))
        text = document.text
        first, last = offset_in_text(start), offset_in_text(start + len(old))
        self._write(document, text[:first] + document.with_newlines(new) + text[last:])
        line = plain.count("\n", 0, start) + 1
        return self._report(path, line, line + new.count("\n"))

    def _insert(self, path, request):
        line, new = request.get("insert_line"), _text(request, "new_str", "insert")
        document = self._open(path)
        plain, offset_in_text = document.plain()
        count = len(split_lines(plain))
        if not isinstance(line, int) or isinstance(line, bool) or not 0 <= line <= count:
            raise EditError(
                "insert_line is %r, but must be a number from 0 (before the first line) to %d (after the "
                "last line of %s)" % (line, count, path)
            )
        position = 0
        for _ in range(line):
            position = plain.find("\n", position) + 1 or len(plain)
        added = new if new.endswith("\n") else new + "\n"
        if position == len(plain) and plain and not plain.endswith("\n"):
            added = "\n" + added[:-1]  # the file goes on without a newline at its end
        at = offset_in_text(position)
        text = document.text
        self._write(document, text[:at] + document.with_newlines(added) + text[at:])
        return self._report(path, line + 1, line + max(1, len(split_lines(new))))

    def _undo_edit(self, path, request):
        before, after = self._history.last(path)
        current = read_regular(path, MAX_EDIT_BYTES + 1)[0] if os.path.exists(path) else None
        if current is None or _digest(current) != after:
            raise EditError(
                "%s was changed by something else since the last edit; undoing it would lose that. Change it "
                "back with str_replace" % path
            )
        if before is None:
            os.unlink(path)
        else:
            overwrite(os.path.realpath(path), before, current)
        self._history.drop_last(path)
        if before is None:
            return "Undid the creation of %s: the file is removed." % path
        left = counted(self._history.edits(path), "edit")
        return "Undid the last edit of %s; %s can still be undone." % (path, left)

    # -- inside ----------------------------------------------

    def _checked(self, path, command):
        if not path.startswith("/"):
            if path.startswith("~"):
                meant = os.path.expanduser(path)
            else:
                meant = os.path.normpath(os.path.join(self._workspace, path))
            raise EditError("the path %r is not absolute; maybe you mean %s" % (path, meant))
        if "\0" in path:
            raise EditError("the path %r contains a NUL character" % path)
        path = os.path.normpath(path)
        if command == "create" or (command == "undo_edit" and self._history.edits(path)):
            return path
        if not os.path.exists(path):
            if os.path.islink(path):
                raise EditError(
                    "%s is a symbolic link to %s, which does not exist" % (path, os.readlink(path))
                )
            raise EditError("%s does not exist%s" % (path, similar_path(path)))
        if command != "view" and os.path.isdir(path):
            raise EditError("%s is a directory; only view works on one" % path)
        return path

    def _open(self, path):
        raw, size = read_regular(path, MAX_EDIT_BYTES + 1)
        if size > MAX_EDIT_BYTES:
            raise EditError(
                "%s has %d bytes; at most %d can be edited here. Use a shell command such as sed"
                % (path, size, MAX_EDIT_BYTES)
            )
        return Document(path, raw)

    def _write(self, document, text):
        old, new = document.raw, document.encode(text)
        if len(new) > MAX_EDIT_BYTES:
            raise EditError(
                "the file would have %d bytes; at most %d are allowed" % (len(new), MAX_EDIT_BYTES)
            )
        overwrite(os.path.realpath(document.path), new, old)
        self._history.add(document.path, old, new)

    def _report(self, path, first, last):
        """The edited lines, with a few around them."""
        lines = self._open(path).lines()
        last = min(last, first + MAX_SNIPPET_LINES)
        first, last = max(1, first - CONTEXT_LINES), min(len(lines), last + CONTEXT_LINES)
        if not lines:
            return "Edited %s; it is empty now." % path
        body, shown = numbered(lines, first, last, self._max_chars)
        return "Edited %s. Lines %d to %d are now:\n%s" % (path, first, shown, body)


class History:
    """What files held before their last edits, in bounded memory."""

    def __init__(self):
        self._edits = []  # (file, bytes before or None, digest of the bytes after), the oldest first
        self._bytes = 0

    def add(self, path, before, after):
        """`before`: the old bytes, None where there was no file."""
        path = os.path.realpath(path)
        self._edits.append((path, before, _digest(after)))
        self._bytes += len(before or b"")
        own = self._of(path)
        if len(own) > UNDO_EDITS:
            self._forget(own[0])
        while self._bytes > UNDO_BYTES:
            self._forget(0)

    def edits(self, path):
        """How many edits of the file can be undone."""
        return len(self._of(path))

    def last(self, path):
        """(bytes before, digest after) of the last edit. Raises EditError when there is none."""
        own = self._of(path)
        if not own:
            raise EditError("there is no edit of %s to undo" % path)
        return self._edits[own[-1]][1:]

    def drop_last(self, path):
        """Forget the last edit."""
        self._forget(self._of(path)[-1])

    def _of(self, path):
        path = os.path.realpath(path)
        return [number for number, edit in enumerate(self._edits) if edit[0] == path]

    def _forget(self, number):
        self._bytes -= len(self._edits.pop(number)[1] or b"")


def _digest(content):
    import hashlib  # it brings libcrypto, whose pages each clone of the template would have to map

    return hashlib.sha256(content).digest()


def _text(request, name, command):
    value = request.get(name)
    if value is None:
        raise EditError("%s needs the parameter %s" % (command, name))
    if not isinstance(value, str):
        raise EditError("%s must be a string, not %r" % (name, value))
    return value


def _checked_range(view_range, count, path):
    if view_range is None:
        return 1, count
    if (
        not isinstance(view_range, list)
        or len(view_range) != 2
        or not all(isinstance(number, int) and not isinstance(number, bool) for number in view_range)
    ):
        raise EditError("view_range is %r, but must be two line numbers, for example [1, 20]" % (view_range,))
    first, last = view_range
    if last == -1:
        last = count
    if not 1 <= first <= max(count, 1) or last > count or last < first - (count == 0):
        raise EditError(
            "view_range %r does not fit: %s has %s. Use [first, last] within them, or -1 as last for the end"
            % (view_range, path, counted(count, "line"))
        )
    return first, last
