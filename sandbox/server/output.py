"""Output of a command: cut in the middle when long, and freed of the shell's end-of-command markers."""

import collections

SEPARATOR = b"\x1e"  # ASCII record separator; only together with the shell's nonce does it mean anything
MAX_MARKER_BYTES = 8192  # nonce, numbers and a path of PATH_MAX


class Capture:
    """Keeps the first and the last part of a byte stream in bounded memory."""

    def __init__(self, max_chars):
        """`max_chars`: characters of text to return at most, half of them head and half tail."""
        self.max_chars = max(2, max_chars)
        self._part_bytes = 4 * (self.max_chars // 2)  # a UTF-8 character has at most four bytes
        self._head = bytearray()
        self._tail = collections.deque()
        self._tail_bytes = 0
        self.total_bytes = 0

    def add(self, data):
        """Append output."""
        self.total_bytes += len(data)
        room = self._part_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_bytes += len(data)
            while self._tail_bytes - len(self._tail[0]) >= self._part_bytes:
                self._tail_bytes -= len(self._tail.popleft())

    def text(self):
        """(text, whether something was left out). Only here do bytes that are not UTF-8 become U+FFFD."""
        tail = b"".join(self._tail)
        kept_all = len(self._head) + len(tail) == self.total_bytes
        if kept_all:
            text = (bytes(self._head) + tail).decode("utf-8", "replace")
            if len(text) <= self.max_chars:
                return text, False
            first, last = text, text
        else:
            first = self._head.decode("utf-8", "replace")
            last = tail.decode("utf-8", "replace")
        half = self.max_chars // 2
        first, last = first[:half], last[-half:]
        shown = len(first.encode("utf-8")) + len(last.encode("utf-8"))
        left_out = max(1, self.total_bytes - shown)
        return "%s\n[... %d of %d bytes left out ...]\n%s" % (first, left_out, self.total_bytes, last), True


class MarkerScanner:
    """Splits a shell's byte stream into output and markers `RS nonce ; number ; exit code ; cwd RS`."""

    def __init__(self, nonce):
        self._start = SEPARATOR + nonce.encode() + b";"
        self._pending = b""

    def feed(self, data):
        """List of ("output", bytes) and ("marker", (number, exit_code, cwd)) in order of appearance."""
        found = []
        data = self._pending + data
        self._pending = b""
        while True:
            start = data.find(self._start)
            if start < 0:
                keep = self._partial_start(data)
                self._output(found, data[: len(data) - keep])
                self._pending = data[len(data) - keep :]
                return found
            self._output(found, data[:start])
            end = data.find(SEPARATOR, start + len(self._start))
            if end < 0:
                if len(data) - start > MAX_MARKER_BYTES:
                    self._output(found, data[start:])
                else:
                    self._pending = data[start:]
                return found
            marker = self._parse(data[start + len(self._start) : end])
            if marker is None:
                self._output(found, data[start : end + 1])
            else:
                found.append(("marker", marker))
            data = data[end + 1 :]

    def flush(self):
        """What was held back because a marker might have begun there."""
        rest, self._pending = self._pending, b""
        return rest

    def _partial_start(self, data):
        for length in range(min(len(self._start) - 1, len(data)), 0, -1):
            if self._start.startswith(data[-length:]):
                return length
        return 0

    @staticmethod
    def _parse(body):
        try:
            number, code, cwd = body.split(b";", 2)
            return int(number), int(code), cwd.decode("utf-8", "surrogateescape")
        except ValueError:
            return None

    @staticmethod
    def _output(found, data):
        if data:
            found.append(("output", data))
