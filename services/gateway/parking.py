"""The gateway's worker: a request that has not come whole, or that waits, holds a socket and no thread.

gunicorn's thread worker waits for a request's first byte without a thread, and for all others with one: as
many half-sent requests as there are threads stop it. Here the main thread collects the head, and a small
body with it. A large body is collected when the request's key has been looked at: the view is dispatched,
asks for the body (`Waiter.need_body`), and is dispatched again when it is there. All has a time limit;
connections of one address are counted; and where all places are taken, whoever is idle or half-sent the
longest makes room.

A view that has to wait raises `Parked`, and the body of a stream yields its waiter: the thread goes back to
the pool, the socket joins the worker's poller. The request is dispatched again, or its stream gone on with,
when its waiter is woken, when its time is up, or when the worker stops. A client that hangs up makes its
socket readable, and frees its place at once.

All this is behind gunicorn's private door, so its version is capped (setup.cfg). Measured with the same
selective wake-up (`python -m benchmarks._waiting`, medians of 3 rounds on 2 busy cores), 1,000 who wait add
15 MB here (116 in all), 51 MB to gunicorn's thread worker with a thread each (128), and 74 MB to its gevent
worker (159); p99 of others (20, 20 and 25 ms) and of a wake-up (50, 43 and 44 ms) hardly differ. What
those two have no door for is the rest: half-sent requests that hold no thread, a bound on bodies that come, a
client that hangs up while its request waits, and an answer to all who wait when the worker stops.
"""

from __future__ import annotations

import errno
import gc
import heapq
import re
import resource
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

from gunicorn.http.parser import RequestParser
from gunicorn.http.unreader import Unreader
from gunicorn.http.wsgi import Response
from gunicorn.workers.gthread import STOP_KEEPALIVE_LINGER, TConn, ThreadWorker

from services.gateway import refusals
from services.gateway.waiting import WAITER, Parked, Waiter
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
_REASONS = {
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
SEND_S = 10.0
"""Longest that a reader may keep a thread from sending the next piece."""
SEND_RATE = 256 << 10
"""Bytes a second that a reader of an answer has to take beyond that."""
STALE_TIMERS = 256
"""Timers of requests that have ended since, kept before they are swept: each holds a connection's objects."""


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

    def __init__(self, worker: ParkingWorker, *args: Any) -> None:
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
        self.again: ParkedWaiter | None = None
        """Whose request asked for its body."""
        self.going_on: ParkedWaiter | None = None
        """Whose request was parked and has a thread again."""
        self._worker: ParkingWorker | None = worker

    def close(self, graceful: bool = False) -> None:
        if self._worker is not None:
            self._worker.left(self)
            self._worker = None
        super().close(graceful)


class ParkedWaiter(Waiter):
    """One whose request this worker parks."""

    parks = True

    def __init__(self, request: Any) -> None:
        super().__init__()
        self.request = request
        self.response: Response | None = None
        self.body: StreamBody | None = None

    def need_body(self) -> None:
        if self.request.conn.awaited:
            raise Parked(self)

    def pause(self) -> None:
        raise Parked(self)


class StreamBody:
    """The body of a stream: where it yields its waiter, the request is parked instead of held."""

    def __init__(self, inner: Any, waiter: ParkedWaiter) -> None:
        self._inner, self._items = inner, iter(inner)
        self._waiter = waiter
        self._parked = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self._parked = False
        item = next(self._items)
        if item is self._waiter:
            self._parked = True
            raise Parked(self._waiter)
        return item

    def close(self) -> None:
        """Called by gunicorn also when the stream is merely parked."""
        if not self._parked:
            self.end()

    def end(self) -> None:
        if hasattr(self._inner, "close"):
            self._inner.close()


class _Again:
    """Stands in for a connection's parser once, and gives the request that was parsed before."""

    def __init__(self, conn: TConn, request: Any) -> None:
        self._conn, self._request, self._parser = conn, request, conn.parser

    def __next__(self) -> Any:
        self._conn.parser = self._parser
        return self._request


def _awaited(request: Any, conn: Any) -> int:
    """Bytes of a request's body that are not here yet; of one without a length, at least one."""
    headers = dict(request.headers)
    if "TRANSFER-ENCODING" in headers:
        return 1
    return max(0, int(headers.get("CONTENT-LENGTH", 0)) - len(conn.inbox))


class ParkingWorker(ThreadWorker):
    """`worker_class = "services.gateway.parking.ParkingWorker"`. Over TLS it is gunicorn's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._incoming: dict[Connection, None] = {}
        self._lingering: dict[TConn, float] = {}
        self._of_address: Counter[str] = Counter()
        self._most_of_address = settings().gateway_address_connections
        self._bodies = 0
        self._look_at = 0.0
        self._told_at: dict[str, float] = {}
        self._parked: dict[TConn, ParkedWaiter] = {}
        self._timers: list[tuple[float, int, TConn, ParkedWaiter]] = []
        self._number = count()
        self._woken: deque[tuple[TConn, ParkedWaiter]] = deque()
        self._going_on = 0
        # The rest of the threads stays free for new requests when many waiters are woken at once.
        self._most_going_on = max(1, self.cfg.threads // 4)

    def init_process(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.cfg.worker_connections + 256
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        super().init_process()

    def load_wsgi(self) -> None:
        super().load_wsgi()
        app = self.wsgi

        def offer_waiter(environ: dict[str, Any], start_response: Any) -> Any:
            response = start_response.__self__
            if self.cfg.is_ssl or type(response) is not Response:
                return app(environ, start_response)
            request = response.req
            if not hasattr(request, "waiter"):
                request.waiter = ParkedWaiter(request)
            waiter = environ[WAITER] = request.waiter
            self._bound_sending(response, request.conn.sock)
            body = app(environ, start_response)
            if waiter.streams:
                waiter.response, waiter.body = response, StreamBody(body, waiter)
                return waiter.body
            return body

        self.wsgi = offer_waiter
        # What is there by now stays. To look at it for garbage again and again is a tenth of the gateway's
        # time while it makes large answers.
        gc.collect()
        gc.freeze()

    # -- in a thread of the pool -------------------------------------------------------------

    def handle_request(self, req: Any, conn: TConn) -> Any:
        """Answer a request, go on with a stream, or give back the waiter in which it is to be parked."""
        waiter = getattr(req, "waiter", None)
        if waiter is None:
            req.conn = conn
            conn.awaited = _awaited(req, conn)
        try:
            if waiter is not None and waiter.body is not None:
                return self._go_on_with_stream(conn, waiter)
            return super().handle_request(req, conn)
        except Parked as parked:
            return parked.waiter
        except TimeoutError:
            self.log.info("Closing a connection whose reader takes nothing.")
            return False

    def _bound_sending(self, response: Response, sock: socket.socket) -> None:
        write = response.write

        def write_in_time(item: bytes) -> None:
            sock.settimeout(SEND_S + len(item) / SEND_RATE)
            write(item)

        response.write = write_in_time

    def _go_on_with_stream(self, conn: TConn, waiter: ParkedWaiter) -> bool:
        conn.sock.settimeout(SEND_S)
        try:
            for item in waiter.body:
                waiter.response.write(item)
            waiter.response.close()
        except TimeoutError:
            self.log.info("Closing a stream whose reader takes nothing.")
            return False
        except OSError:
            raise
        except Exception:
            # Its headers are sent, so there is no room for an answer that says so.
            self.log.exception("Error in a stream")
            return False
        finally:
            waiter.body.close()
        return not waiter.response.should_close()

    def _keepalive_after(self, conn: TConn, keepalive: Any) -> Any:
        if isinstance(keepalive, ParkedWaiter):
            return keepalive
        if getattr(conn, "awaited", 0):
            # Nobody wanted the body: what comes of it must not be taken for the next request.
            return False
        return super()._keepalive_after(conn, keepalive)

    # -- in the main thread ------------------------------------------------------------------

    def finish_request(self, conn: TConn, fs: Future) -> None:
        """Park what is to wait; all else is as gunicorn has it."""
        waiter = getattr(conn, "going_on", None)
        if waiter is not None:
            conn.going_on = None
            self._going_on -= 1
            self._go_on()
        result = None if fs.cancelled() or fs.exception() else fs.result()
        if isinstance(result, ParkedWaiter):
            if conn.awaited:
                conn.again = result
                self._await_body(conn)
            else:
                self._park(conn, result)
            return
        if waiter is not None:
            waiter.leave()
        if fs.cancelled() or fs.exception() or self.cfg.is_ssl:
            super().finish_request(conn, fs)
        elif result:
            self._await_next(conn)
        else:
            self._linger(conn)

    def _park(self, conn: TConn, waiter: ParkedWaiter) -> None:
        self._parked[conn] = waiter
        conn.sock.setblocking(False)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._on_readable, conn))
        if not self.alive:
            self._wake(conn, waiter)
            return
        if len(self._timers) > 2 * len(self._parked) + STALE_TIMERS:
            live = self._parked.items()
            self._timers = [(waiter.deadline, next(self._number), conn, waiter) for conn, waiter in live]
            heapq.heapify(self._timers)
        heapq.heappush(self._timers, (waiter.deadline, next(self._number), conn, waiter))
        waiter.on_wake(lambda: self.method_queue.defer(self._wake, conn, waiter))

    def _unpark(self, conn: TConn) -> None:
        del self._parked[conn]
        if conn.sock.fileno() in self.poller.get_map():
            self.poller.unregister(conn.sock)

    def _on_readable(self, conn: TConn, sock: socket.socket) -> None:
        """The client has gone, or sends its next request before it has this answer."""
        waiter = self._parked.get(conn)
        if waiter is None:  # woken by another event of the same look at the poller
            return
        try:
            early = sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            early = b""
        if early:
            # It stays readable: without this the loop would spin until the answer is given.
            self.poller.unregister(sock)
            return
        self._unpark(conn)
        waiter.leave()
        if waiter.body is not None:
            waiter.body.end()
        if waiter.on_hangup is not None and self.alive:
            # Not here, where everybody would wait for it.
            self.tpool.submit(waiter.on_hangup)
        self._close(conn)

    def _wake(self, conn: TConn, waiter: ParkedWaiter) -> None:
        if self._parked.get(conn) is waiter:
            self._unpark(conn)
            waiter.over = not self.alive
            self._woken.append((conn, waiter))
            self._go_on()

    def _go_on(self) -> None:
        while self._woken and self._going_on < self._most_going_on:
            conn, waiter = self._woken.popleft()
            conn.going_on, conn.parser = waiter, _Again(conn, waiter.request)
            self._going_on += 1
            self.enqueue_req(conn)

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
        if now - self._told_at.get(reason, -60.0) >= 10.0:
            self._told_at[reason] = now
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
        """A request is there, or the body of one that asked for it."""
        waiter, conn.again = conn.again, None
        if waiter is not None:
            conn.parser = _Again(conn, waiter.request)
        self.enqueue_req(conn)

    # -- ends --------------------------------------------------------------------------------

    def _turn_away(self, conn: Connection, status: int, reason: str, what: str) -> None:
        self._refuse(reason, f"{what}, from {conn.client[0] if conn.client else 'a local socket'}")
        self._stop_awaiting(conn)
        head = b"HTTP/1.1 %d %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % (
            status,
            _REASONS[status],
        )
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

    # -- the main thread's turn --------------------------------------------------------------

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """As gunicorn's, in time for whoever's time is up next."""
        if not self.alive:
            for conn, waiter in list(self._parked.items()):
                self._wake(conn, waiter)
        self._make_room()
        if self._incoming or self._lingering:
            timeout = min(timeout, LOOK_S)
        if self._timers:
            timeout = max(0.0, min(timeout, self._timers[0][0] - time.monotonic()))
        super().wait_for_and_dispatch_events(timeout)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, conn, waiter = heapq.heappop(self._timers)
            if waiter.deadline <= now:
                self._wake(conn, waiter)
        # In the order in which they came, and each stays as long.
        while self._lingering and (first := next(iter(self._lingering.items())))[1] <= now:
            self._end_linger(first[0])
