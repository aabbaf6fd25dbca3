"""A gunicorn worker that gives a thread to requests that are there, and to no others.

gunicorn's thread worker waits for a request's first byte without a thread, and for all others with one: as
many half-sent requests as there are threads stop it. Here the main thread collects the head, and a small
body with it. A large body is collected when the request's key has been looked at: the view is dispatched,
asks for the body (`Waiter.need_body`), and is dispatched again when it is there. All has a time limit;
connections of one address are counted; and where all places are taken, whoever is idle or half-sent the
longest makes room.
"""

from __future__ import annotations

import errno
import heapq
import re
import selectors
import socket
import time
from collections import Counter
from functools import partial
from typing import Any

from gunicorn.http.parser import RequestParser
from gunicorn.http.unreader import Unreader
from gunicorn.workers.gthread import STOP_KEEPALIVE_LINGER, TConn, ThreadWorker

from services.gateway import refusals
from services.settings import settings

HEAD_S = 10.0
"""From the first byte of a request to the end of its head, and of a small body."""
BODY_S, BODY_RATE = 20.0, 64 << 10
"""For a large body: so many seconds, and one more for each so many bytes."""
HEAD_BYTES = 32 << 10
EARLY_BYTES = 16 << 10
"""Largest body that is collected before anybody has looked at the key."""
READ_BYTES = 1 << 20
BODIES_BYTES = 256 << 20
"""Most that large bodies may hold together while they come; beyond it the one that ends first is given up."""
LINGER_S = 2.0
"""For a client to read its answer and to close, where the connection is not to be kept."""
LOOK_S = 0.5
"""Between two looks for those whose time is up."""
ROOM = 16
"""Connections that are closed at once where all places are taken."""
_LENGTH = re.compile(rb"\r\nContent-Length:[ \t]*(\d{1,9})[ \t]*\r\n", re.IGNORECASE)
_NOT_EARLY = re.compile(rb"\r\n(?:Transfer-Encoding|Expect)[ \t]*:", re.IGNORECASE)
_SAID = {
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class Inbox(Unreader):
    """What a connection has sent and nobody has read yet. It never waits: an empty one reads as the end."""

    def __init__(self) -> None:
        super().__init__()
        self.received = bytearray()
        self.searched = 0
        """So many bytes of it hold no end of a head."""

    def chunk(self, size_hint: int | None = None) -> bytes:
        data, self.received, self.searched = bytes(self.received), bytearray(), 0
        return data

    def __len__(self) -> int:
        return len(self.received) + self.buf.getbuffer().nbytes

    def put_back(self) -> None:
        """What was read ahead is part of the next request."""
        self.received[:0], self.searched = self.take_buffered(), 0


class Connection(TConn):
    """A connection whose requests are read by the main thread and parsed by another one."""

    def __init__(self, worker: IntakeWorker, *args: Any) -> None:
        super().__init__(*args)
        self.inbox = Inbox()
        self.parser = RequestParser(self.cfg, iter(()), self.client)
        self.parser.unreader = self.inbox
        self.initialized = self.data_ready = True
        self.awaited = 0
        """Bytes of the body that are still to come."""
        self.large = False
        """Whether it is a body that counts in `BODIES_BYTES`."""
        self.deadline = 0.0
        """Monotonic time at which what is awaited must be there."""
        self._worker: IntakeWorker | None = worker

    def close(self, graceful: bool = False) -> None:
        if self._worker is not None:
            self._worker.left(self)
            self._worker = None
        super().close(graceful)


class IntakeWorker(ThreadWorker):
    """The half of the gateway's worker that takes requests in. Over TLS it is gunicorn's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._incoming: dict[Connection, None] = {}
        self._lingering: dict[TConn, float] = {}
        self._of_address: Counter[str] = Counter()
        self._most_of_address = settings().gateway_address_connections
        self._bodies = 0
        self._look_at = 0.0
        self._said_at: dict[str, float] = {}

    # -- connections -------------------------------------------------------------------------

    def accept(self, listener: Any) -> None:
        """Take a connection; it gets a thread when it has sent a request."""
        if self.cfg.is_ssl:
            super().accept(listener)
            return
        try:
            sock, client = listener.accept()
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK, errno.ECONNABORTED):
                return
            raise
        address = client[0] if isinstance(client, tuple) else ""
        if address and self._of_address[address] >= self._most_of_address:
            sock.close()
            self._refuse(
                refusals.ADDRESS,
                f"{address} has {self._most_of_address} connections, as many as "
                "ROLLOUT_GATEWAY_ADDRESS_CONNECTIONS allows",
            )
            return
        self.nr_conns += 1
        self._of_address[address] += 1
        conn = Connection(self, self.cfg, sock, client, listener.getsockname())
        self._await(conn, self.cfg.keepalive)
        self._on_incoming(conn, sock)  # as a rule it is there already

    def left(self, conn: Connection) -> None:
        """A connection is closed."""
        address = conn.client[0] if isinstance(conn.client, tuple) else ""
        self._of_address[address] -= 1
        if self._of_address[address] <= 0:
            del self._of_address[address]

    def _close(self, conn: TConn) -> None:
        self.nr_conns -= 1
        conn.close()

    def _refuse(self, reason: str, what: str) -> None:
        """Count it, and say it once in a while: who attacks must not fill the log."""
        refusals.REFUSED.labels(reason).inc()
        now = time.monotonic()
        if now - self._said_at.get(reason, -60.0) >= 10.0:
            self._said_at[reason] = now
            self.log.warning(f"Refused ({reason}): {what}")

    # -- what comes in -----------------------------------------------------------------------

    def _await(self, conn: Connection, seconds: float) -> None:
        """Have the main thread read what comes, for so many seconds."""
        if not self.alive:
            seconds = min(seconds, STOP_KEEPALIVE_LINGER)
        conn.deadline = time.monotonic() + seconds
        conn.sock.setblocking(False)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._on_incoming, conn))
        self._incoming[conn] = None

    def _await_body(self, conn: Connection) -> None:
        conn.large = True
        self._bodies += len(conn.inbox)
        self._await(conn, BODY_S + conn.awaited / BODY_RATE)

    def _await_next(self, conn: Connection) -> None:
        """The next request of a connection that is kept; perhaps it is there already."""
        conn.inbox.put_back()
        self._await(conn, HEAD_S if conn.inbox else self.cfg.keepalive)
        if conn.inbox:
            self._look_at_head(conn)

    def _stop_awaiting(self, conn: Connection) -> None:
        del self._incoming[conn]
        self.poller.unregister(conn.sock)
        if conn.large:
            conn.large = False
            self._bodies -= len(conn.inbox)

    def _on_incoming(self, conn: Connection, sock: socket.socket) -> None:
        if conn not in self._incoming:  # closed by another event of the same look at the poller
            return
        try:
            data = sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._stop_awaiting(conn)
            self._close(conn)
            return
        if not conn.inbox and not conn.awaited:
            conn.deadline = min(conn.deadline, time.monotonic() + HEAD_S)
        conn.inbox.received += data
        if conn.large:
            self._bodies += len(data)
        if conn.awaited:
            self._take_body(conn, len(data))
        else:
            self._look_at_head(conn)

    def _look_at_head(self, conn: Connection) -> None:
        inbox = conn.inbox
        end = inbox.received.find(b"\r\n\r\n", max(0, inbox.searched - 3))
        if (end if end >= 0 else len(inbox.received)) > HEAD_BYTES:
            self._turn_away(conn, 431, refusals.HEAD, f"a head of more than {HEAD_BYTES} bytes")
        elif end < 0:
            inbox.searched = len(inbox.received)
        else:
            head = bytes(inbox.received[: end + 4])
            lengths = _LENGTH.findall(head)
            # gunicorn reads the head strictly; whatever it refuses needs no body.
            if len(lengths) == 1 and int(lengths[0]) <= EARLY_BYTES and not _NOT_EARLY.search(head):
                conn.awaited = int(lengths[0]) - (len(inbox.received) - end - 4)
            self._take_body(conn, 0)

    def _take_body(self, conn: Connection, count: int) -> None:
        conn.awaited = max(0, conn.awaited - count)
        if not conn.awaited:
            self._stop_awaiting(conn)
            self._dispatch(conn)
        elif conn.large and self._bodies > BODIES_BYTES:
            first = min((one for one in self._incoming if one.large), key=lambda one: one.deadline)
            self._turn_away(first, 503, refusals.FULL, f"bodies that come hold {BODIES_BYTES >> 20} MiB")

    def _dispatch(self, conn: Connection) -> None:
        """A request is there, or the body of one."""
        self.enqueue_req(conn)

    # -- ends --------------------------------------------------------------------------------

    def _turn_away(self, conn: Connection, status: int, reason: str, what: str) -> None:
        self._refuse(reason, f"{what}, from {conn.client[0] if conn.client else 'a local socket'}")
        self._stop_awaiting(conn)
        head = b"HTTP/1.1 %d %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % (status, _SAID[status])
        try:
            conn.sock.send(head)
        except OSError:
            self._close(conn)
        else:
            self._linger(conn)

    def _linger(self, conn: TConn) -> None:
        """Close, but not before the client has read its answer: an early close may cut that off.

        gunicorn waits for the client here in its main thread, and everybody else with it.
        """
        try:
            conn.sock.shutdown(socket.SHUT_WR)
            conn.sock.setblocking(False)
            self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._on_lingering, conn))
        except OSError:
            self._close(conn)
            return
        self._lingering[conn] = time.monotonic() + LINGER_S

    def _on_lingering(self, conn: TConn, sock: socket.socket) -> None:
        if conn not in self._lingering:
            return
        try:
            more = sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            more = b""
        if not more:
            self._end_linger(conn)

    def _end_linger(self, conn: TConn) -> None:
        del self._lingering[conn]
        self.poller.unregister(conn.sock)
        self._close(conn)

    def _idle(self, conn: Connection) -> bool:
        return not conn.inbox and not conn.awaited

    def murder_keepalived(self, force: bool = False) -> None:
        """Close those whose time is up (or all if forced); gunicorn calls it once a turn."""
        super().murder_keepalived(force)
        now = time.monotonic()
        if not force and now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for conn in [one for one in self._incoming if force or one.deadline <= now]:
            if force or self._idle(conn):
                self._stop_awaiting(conn)
                self._close(conn)
            else:
                self._turn_away(conn, 408, refusals.SLOW, "a request that did not come to its end in time")

    def _cap_keepalive(self, deadline: float) -> None:
        super()._cap_keepalive(deadline)
        for conn in self._incoming:
            conn.deadline = min(conn.deadline, deadline)

    def _make_room(self) -> None:
        """Close whoever is half-sent or idle the longest, when all places are taken."""
        if self.nr_conns < self.worker_connections:
            return
        for conn in heapq.nsmallest(ROOM, self._incoming, key=lambda one: one.deadline):
            self._refuse(refusals.FULL, f"{self.nr_conns} connections are open")
            self._stop_awaiting(conn)
            self._close(conn)

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """As gunicorn's, in time for whoever's time is up next."""
        self._make_room()
        if self._incoming or self._lingering:
            timeout = min(timeout, LOOK_S)
        super().wait_for_and_dispatch_events(timeout)
        now = time.monotonic()
        # In the order in which they came, and each stays as long.
        while self._lingering and (first := next(iter(self._lingering.items())))[1] <= now:
            self._end_linger(first[0])
