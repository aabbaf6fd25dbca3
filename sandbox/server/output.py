"""Output of a command: cut in the middle when long, and freed of the shell's markers."""

import collections

SEPARATOR = b"\x1e"  # ASCII record separator; only together with the shell's nonce does it mean anything
DEFAULT_MAX_CHARS = 30000
MAX_MARKER_BYTES = 8192  # nonce, numbers and a path of PATH_MAX


def max_chars(request):
    """Characters of output that a request wants at most."""
    return int(request.get("max_chars") or DEFAULT_MAX_CHARS)


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
        """(text, whether something was left out). Only here do bytes that are not UTF-8 become U+FFFD, as
        `bytes.decode("utf-8", "replace")` has it; head and tail are decoded each by itself.
        """
        tail = b"".join(self._tail)
        head = bytes(self._head)
        if len(head) + len(tail) == self.total_bytes:
            text = (head + tail).decode("utf-8", "replace")
            if len(text) <= self.max_chars:
                return text, False
            head = tail = head + tail
        half = self.max_chars // 2
        # Cut where each byte that is no UTF-8 counts as one character, so that the count of bytes is exact.
        head = _encode(_decode(head)[:half])
        tail = _encode(_decode(tail)[-half:])
        note = "\n[... %d of %d bytes left out ...]\n" % (
            self.total_bytes - len(head) - len(tail),
            self.total_bytes,
        )
        return head.decode("utf-8", "replace") + note + tail.decode("utf-8", "replace"), True

    def take_partial_character(self):
        """Remove and return the beginning of a UTF-8 character at the very end, whose rest is yet to come."""
        if not self.total_bytes:
            return b""
        # All that may begin a character lies in the last piece, or pieces of a byte or two make no difference
        # but a replacement character.
        last = self._tail[-1] if self._tail else bytes(self._head[-4:])
        size = partial_character_bytes(last[-3:])
        if size == 0:
            return b""
        if self._tail:
            self._tail[-1] = last[:-size]
            self._tail_bytes -= size
        else:
            del self._head[-size:]
        self.total_bytes -= size
        return last[-size:]


def _decode(data):
    return data.decode("utf-8", "surrogateescape")


def _encode(text):
    return text.encode("utf-8", "surrogateescape")


def partial_character_bytes(data):
    """Bytes at the end of `data` that begin a UTF-8 character whose rest is yet to come."""
    for size in range(1, len(data) + 1):
        first = data[-size]
        if first >= 0xC0:
            size_of_all = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return size if size < size_of_all and first < 0xF8 else 0
        if first < 0x80:
            return 0
    return 0


class Scanner:
    """Splits a byte stream into output and markers: `RS nonce ; body END`."""

    def __init__(self, nonce, end, most_bytes):
        """`nonce`: what nobody else prints; `end`: of a marker; of one longer than `most_bytes` no end is
        waited for. A subclass has `parse(body)`: the marker, or None where it is only output.
        """
        self._start = SEPARATOR + nonce.encode() + b";"
        self._end = end
        self._most_bytes = most_bytes
        self._pending = b""

    def feed(self, data):
        """List of ("output", bytes) and markers as they came."""
        items = []
        data = self._pending + data
        self._pending = b""
        position = 0  # what lies before it has been dealt with
        while True:
            start = data.find(self._start, position)
            if start < 0:
                keep = self._partial_start(data[position:])
                self._output(items, data[position : len(data) - keep])
                self._pending = data[len(data) - keep :]
                return items
            end = data.find(self._end, start + len(self._start))
            # A start that is followed by another one was only text that looks like it.
            later = data.find(self._start, start + 1, end if end >= 0 else len(data))
            if later >= 0:
                self._output(items, data[position:later])
                position = later
            elif end < 0 and len(data) - start <= self._most_bytes:
                self._output(items, data[position:start])
                self._pending = data[start:]
                return items
            else:
                marker = self.parse(data[start + len(self._start) : end]) if end >= 0 else None
                if marker is None:
                    self._output(items, data[position : start + 1])
                    position = start + 1
                else:
                    self._output(items, data[position:start])
                    items.append(marker)
                    position = end + len(self._end)

    def flush(self):
        """What was held back because a marker might have begun there."""
        rest, self._pending = self._pending, b""
        return rest

    def _partial_start(self, data):
        at = data.rfind(SEPARATOR, max(0, len(data) - len(self._start) + 1))
        return len(data) - at if at >= 0 and self._start.startswith(data[at:]) else 0

    @staticmethod
    def _output(items, data):
        if data:
            items.append(("output", data))


class MarkerScanner(Scanner):
    """Those of a shell: `RS nonce ; body ; nonce RS`. A body is `b;NUMBER` where a command begins and
    `e;NUMBER;CODE;PWD` where it ends.
    """

    def __init__(self, nonce):
        super().__init__(nonce, b";" + nonce.encode() + SEPARATOR, MAX_MARKER_BYTES)

    def parse(self, body):
        """("begin", (number,)) or ("end", (number, code, pwd))."""
        try:
            kind, rest = body.split(b";", 1)
            if kind == b"b":
                return "begin", (int(rest),)
            if kind == b"e":
                number, code, pwd = rest.split(b";", 2)
                return "end", (int(number), int(code), pwd)
        except ValueError:
            pass
        return None
