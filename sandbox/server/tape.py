"""What the latest operations have printed, for who looks on while they run; their results are made elsewhere.

To print costs an operation no more for it than to keep a reference, and who looks never waits for one.
"""

import collections
import threading
import time

from output import partial_character_bytes

MOST_BYTES = 64 << 10
"""Of an operation's output: the newest part."""
MOST_OPERATIONS = 4


class Reel:
    """What one operation prints."""

    def __init__(self, kind, operation):
        self.kind, self.operation = kind, operation
        self._pieces = collections.deque()
        self._kept = self._end = 0
        self._running = True
        self._lock = threading.Lock()

    def add(self, data):
        """It has printed this."""
        with self._lock:
            self._pieces.append(data)
            self._kept += len(data)
            self._end += len(data)
            while self._kept - len(self._pieces[0]) >= MOST_BYTES:
                self._kept -= len(self._pieces.popleft())

    def end(self):
        """It has ended."""
        self._running = False

    def since(self, offset, running):
        """What was printed from byte `offset` on, as far as it is kept; None: nothing, and it runs or has
        ended as the caller knows.
        """
        with self._lock:
            data, end, runs = b"".join(self._pieces)[-MOST_BYTES:], self._end, self._running
        start = max(min(offset, end), end - len(data))
        data = data[len(data) - (end - start) :]
        if runs:  # the rest of a character may be yet to come
            data = data[: len(data) - partial_character_bytes(data[-3:])]
        if not data and runs == running:
            return None
        return {
            "operation": self.operation,
            "kind": self.kind,
            "offset": start,
            "end": start + len(data),
            "text": data.decode("utf-8", "replace"),
            "running": runs,
        }


class Tape:
    """The reels of a sandbox; also answers `peek`."""

    def __init__(self):
        self._reels = collections.deque(maxlen=MOST_OPERATIONS)

    def begin(self, kind):
        """The reel of an operation that begins. Its number is of a clock: those of a rollout's next sandbox
        are higher.
        """
        last = self._reels[-1].operation if self._reels else 0
        reel = Reel(kind, max(last + 1, int(time.time() * 1000)))
        self._reels.append(reel)
        return reel

    def op_peek(self, request, connection):
        """What comes next behind byte `offset` of an `operation`, of which the caller knows whether it is
        `running`; without one, what the latest has printed. Empty: nothing.
        """
        reels, known = list(self._reels), request.get("operation")
        if known is None:
            reels, known = reels[-1:], 0
        for reel in reels:
            if reel.operation >= known:
                same = reel.operation == known
                piece = reel.since(int(request["offset"]) if same else 0, same and request["running"])
                if piece is not None:
                    return piece
        return {}


TAPE = Tape()
"""Of the sandbox that this process serves."""
