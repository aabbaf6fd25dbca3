"""What a cell printed and displayed, as the text a reader sees in the end: no escape sequences, progress bars
in their last state, displays that were updated shown once. Memory is bounded whatever a cell does.
"""

import json
import re
import select

from output import SEPARATOR, Capture, Scanner

ESCAPES = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,2000}(?:\x07|\x1b\\)|[()][0-9A-Za-z]|[=>@-Z\\^_7-8])"
)
OVERWRITTEN = re.compile(rb"[^\n]*\r")
MAX_LINE_BYTES = 8192  # a longer line is no progress bar and is passed on before its end
MAX_PIECES = 4096  # of an event; the kernel belongs to the agent and could send anything
MAX_SLOTS = 50  # displays that may be updated in place; each holds up to the whole allowance of text


class EventScanner(Scanner):
    """What a kernel prints, and its events (`kernel.Events`)."""

    def __init__(self, nonce):
        super().__init__(nonce, SEPARATOR, select.PIPE_BUF)
        self._number = None
        self._pieces = []

    def parse(self, body):
        """("event", its fields), or ("event", None) where pieces are yet to come. Raises ValueError."""
        parts = body.split(b";", 2)
        if len(parts) < 3:
            return None
        number, left, piece = parts
        if number != self._number:
            self._number, self._pieces = number, []
        self._pieces.append(piece)
        if len(self._pieces) > MAX_PIECES:
            raise ValueError("an event without an end")
        return "event", json.loads(b"".join(self._pieces)) if left == b"0" else None


class LineFilter:
    """Strips escape sequences and what a carriage return overwrote from a byte stream."""

    def __init__(self, sink):
        """`sink`: function that takes the clean bytes, whole lines where they are not very long."""
        self._sink = sink
        self._line = b""

    def feed(self, data):
        """Take bytes; what follows the last newline is held back, because it may still be overwritten."""
        data = self._line + data
        if b"\x1b" in data:
            data = ESCAPES.sub(b"", data)
        end = data.rfind(b"\n") + 1
        whole, line = data[:end], data[end:]
        if b"\r" in whole:
            whole = OVERWRITTEN.sub(b"", re.sub(rb"\r+\n", b"\n", whole))
        if b"\r" in line:
            shown = line.rstrip(b"\r")
            line = OVERWRITTEN.sub(b"", shown) + (b"\r" if len(shown) < len(line) else b"")
        if whole:
            self._sink(whole)
        if len(line) > MAX_LINE_BYTES:
            self._sink(line)
            line = b""
        self._line = line

    def flush(self):
        """Pass on the unfinished line."""
        line, self._line = self._line.rstrip(b"\r"), b""
        if line:
            self._sink(line)


class CellOutput:
    """Streams and displays of one cell in the order they came."""

    def __init__(self, max_chars):
        """`max_chars`: characters of text to return at most."""
        self._max_chars = max_chars
        self._clear_at_next = False
        self._reset()

    def _reset(self):
        self._parts = []  # Captures; a part named in _slots is one display
        self._slots = {}
        self._filter = LineFilter(self._append)
        self._last_byte = b"\n"

    def stream(self, data):
        """Bytes of standard output or error."""
        if data:
            self._clear_if_due()
            self._filter.feed(data)

    def show(self, text, display_id=None, update=False):
        """A display, a result or a traceback, on lines of its own. An update replaces the display of that id,
        if this cell made it and it is still kept apart.
        """
        self._clear_if_due()
        data = ESCAPES.sub(b"", text.encode("utf-8", "replace"))
        data = data if data.endswith(b"\n") or not data else data + b"\n"
        if update and display_id in self._slots:
            index = self._slots[display_id]
            self._parts[index] = self._new_part(data)
            return
        self._filter.flush()
        if self._last_byte != b"\n":
            self._append(b"\n")
        if display_id is None or len(self._slots) >= MAX_SLOTS:
            self._append(data)
            return
        self._slots[display_id] = len(self._parts)
        self._parts += [self._new_part(data), Capture(self._max_chars)]
        self._last_byte = b"\n"

    def clear(self, wait):
        """Forget everything so far, at once or (`wait`) when the next output comes."""
        self._clear_at_next = wait
        if not wait:
            self._reset()

    def text(self):
        """(text, whether something was left out)."""
        self._filter.flush()
        if len(self._parts) == 1:
            return self._parts[0].text()
        whole, truncated = Capture(self._max_chars), False
        for part in self._parts:
            text, cut = part.text()
            truncated = truncated or cut
            whole.add(text.encode("utf-8"))
        text, cut = whole.text()
        return text, truncated or cut

    def _clear_if_due(self):
        if self._clear_at_next:
            self.clear(wait=False)

    def _new_part(self, data):
        part = Capture(self._max_chars)
        part.add(data)
        return part

    def _append(self, data):
        if not data:
            return
        if not self._parts:
            self._parts.append(Capture(self._max_chars))
        self._parts[-1].add(data)
        self._last_byte = data[-1:]
