"""Many clients that wait at a gateway at once: plain sockets, for HTTP clients would be the load."""

from __future__ import annotations

import re
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from tests.helpers.keys import HEADER

CONNECT_S = 60.0


def allow_open_files(most: int) -> None:
    """Raise this process's soft limit of open files, as far as the hard one lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class Waiters:
    """Connections on each of which one GET has been sent; what came back is kept by connection.

    Used by one thread. `paths` may repeat.
    """

    def __init__(self, host: str, port: int, paths: Iterable[str]) -> None:
        paths = list(paths)
        allow_open_files(len(paths) + 512)
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self.received: list[bytes] = []
        self.closed: list[bool] = []
        self.answered_at: list[float | None] = []
        """Monotonic time of the last byte of each; None = nothing came yet."""
        for number, path in enumerate(paths):
            connection = socket.create_connection((host, port), CONNECT_S)
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{HEADER}\r\n".encode())
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, number)
            self._sockets.append(connection)
            self.received.append(b"")
            self.closed.append(False)
            self.answered_at.append(None)

    def __len__(self) -> int:
        return len(self._sockets)

    def read(self, timeout_s: float = 0.0) -> None:
        """Take what has come, waiting for something at most so long."""
        for key, _ in self._selector.select(timeout_s):
            number = key.data
            try:
                data = key.fileobj.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if data:
                self.received[number] += data
                self.answered_at[number] = time.monotonic()
            else:
                self.closed[number] = True
                self._selector.unregister(key.fileobj)

    def read_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Read until `done`, or until the time is up: then False."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                return False
            self.read(0.05)
        return True

    def answered(self, numbers: Iterable[int] | None = None) -> bool:
        """Whether each of these, or of all, has a whole answer; of a stream, its beginning."""
        return all(_whole(self.received[k]) for k in (range(len(self)) if numbers is None else numbers))

    def read_answers(self, timeout_s: float, numbers: Iterable[int] | None = None) -> bool:
        """Read until they are there, or until the time is up: then False."""
        numbers = None if numbers is None else list(numbers)
        return self.read_until(lambda: self.answered(numbers), timeout_s)

    def statuses(self) -> list[int | None]:
        """Status of each answer; None = none yet."""
        return [int(data.split(b" ", 2)[1]) if data else None for data in self.received]

    def leave(self, numbers: Iterable[int] | None = None) -> None:
        """Close some of the connections, or all, as a client does that has lost its patience."""
        for number in range(len(self._sockets)) if numbers is None else numbers:
            with suppress(KeyError, ValueError):
                self._selector.unregister(self._sockets[number])
            self._sockets[number].close()
            self.closed[number] = True

    def close(self) -> None:
        self.leave()
        self._selector.close()

    def __enter__(self) -> Waiters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole(data: bytes) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
    return bool(end) and (length is None or len(body) >= int(length[1]))
