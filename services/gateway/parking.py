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

All this is behind gunicorn's private door, so its version is capped; docs/architecture.md has what
it costs beside gunicorn's own workers, and why it stays.
"""

from __future__ import annotations

import gc
import heapq
import os
import re
import resource
import select
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from gunicorn import util
from gunicorn.http.parser import RequestParser
from gunicorn.http.unreader import Unreader
from gunicorn.workers.gthread import STOP_KEEPALIVE_LINGER, TConn, ThreadWorker

from services.gateway import refusals
from services.gateway.waiting import WAITER, Parked, ParkedWaiter, StreamBody
from services.settings import settings

HEAD_S = 10.0
"""Seconds from the first byte of a request to the end of its head, and of a small body."""
BODY_S, BODY_RATE = 20.0, 64 << 10
"""A large body has so many seconds, and one more for each so many bytes."""
HEAD_BYTES = 32 << 10
EARLY_BYTES = 16 << 10
"""Largest body that is collected before anybody has looked at the key."""
READ_BYTES = 1 << 20
BODIES_BYTES = 256 << 20
"""Most that large bodies may hold together while they come; beyond it the one that ends first is given up."""
LINGER_S = 2.0
"""Seconds that a client has to read its answer and to close, where the connection is not to be kept."""
ROOM = 16
"""Connections that are closed at once where all places are taken."""
_LENGTH = re.compile(rb"\r\nContent-Length:[ \t]*(\d{1,9})[ \t]*\r\n", re.IGNORECASE)
_NOT_EARLY = re.compile(rb"\r\n(?:Transfer-Encoding|Expect)[ \t]*:", re.IGNORECASE)
SEND_S = 10.0
"""Seconds that a reader may keep a thread from sending the next piece."""
STREAM_SEND_S = 2.0
"""The same of a piece of a stream, which is begun only where the reader has taken what came before."""
FULL_S = 0.25
"""Between two looks whether a stream's reader takes something again."""
SEND_RATE = 256 << 10
"""Bytes a second that a reader of an answer has to take beyond that."""
STALE_TIMERS = 256
"""Timers that count no more, kept before they are swept: each holds a connection's objects."""


class Inbox(Unreader):
    """What a connection has sent and nobody has read yet. It never waits: an empty one reads as the end."""

    def chunk(self, size_hint: int | None = None) -> bytes:
        return b""

    def add(self, data: bytes) -> None:
        self.buf.seek(0, os.SEEK_END)
        self.buf.write(data)

    def beginning(self, size: int) -> bytes:
        self.buf.seek(0)
        return self.buf.read(size)

    def __len__(self) -> int:
        return self.buf.seek(0, os.SEEK_END)


class Parser(RequestParser):
    """Parses what is in an inbox, or gives the request once more that is dispatched again."""

    def __init__(self, conn: Connection) -> None:
        super().__init__(conn.cfg, iter(()), conn.client)
        self.unreader = conn.inbox
        self.again: Any = None

    def __next__(self) -> Any:
        request, self.again = self.again, None
        return request or super().__next__()


class Connection(TConn):
    """A connection whose requests are read by the main thread and parsed by another one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inbox = Inbox()
        self.parser = Parser(self)
        self.initialized = self.data_ready = True
        self.address = self.client[0] if isinstance(self.client, tuple) else ""
        """The client's; "" for a local socket."""
        self.awaited = 0
        """Bytes of the body that are still to come."""
        self.large = False
        """Whether it is a body that counts in `BODIES_BYTES`."""
        self.deadline = 0.0
        """Monotonic time at which the main thread gives up watching it."""
        self.waiter: ParkedWaiter | None = None
        """Whose request is parked or asked for its body, until that has been answered."""
        self.goes_on = False
        """A request that was parked has a thread again."""
        self.full_since: float | None = None
        """Monotonic time since when the reader of its stream takes nothing; None = it does."""


class Watch(NamedTuple):
    """What the main thread does about a connection that has no thread."""

    on_data: Callable[[Connection, bytes], None]
    on_end: Callable[[Connection], None]
    """The client has gone."""
    on_late: Callable[[Connection], None]
    """Its deadline has passed."""
    flags: int = 0
    """Flags of `recv`."""


class ParkingWorker(ThreadWorker):
    """`worker_class = "services.gateway.parking.ParkingWorker"`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._incoming = Watch(self._take, self._drop, self._give_up)
        self._parked = Watch(
            self._ignore_early, self._hang_up, lambda conn: self._wake(conn, conn.waiter), socket.MSG_PEEK
        )
        self._lingering = Watch(lambda conn, data: None, self._drop, self._drop)
        self._watched: dict[Connection, Watch] = {}
        self._timers: list[tuple[float, int, Connection]] = []
        self._number = count()
        self._of_address: Counter[str] = Counter()
        self._most_of_address = settings().gateway_address_connections
        self._bodies = 0
        self._woken: deque[Connection] = deque()
        self._going_on = 0
        # The rest of the threads stays free for new requests when many waiters are woken at once.
        self._most_going_on = max(1, self.cfg.threads // 4)

    @classmethod
    def check_config(cls, cfg: Any, log: Any) -> None:
        """Refuse TLS of gunicorn's own, under which requests would hold threads.

        Raises:
            RuntimeError: It is configured; gunicorn shows the message and exits.
        """
        if cfg.is_ssl:
            raise RuntimeError(
                "the gateway's worker speaks no TLS: end it at a proxy before the gateway (without one, "
                "--worker-class gthread speaks it, and half-sent requests hold its threads)"
            )
        super().check_config(cfg, log)

    def init_process(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        util.write_error = refusals.write_error  # gunicorn's own writes a page of HTML
        super().init_process()

    def load_wsgi(self) -> None:
        super().load_wsgi()
        app = self.wsgi

        def offer_waiter(environ: dict[str, Any], start_response: Any) -> Any:
            response = start_response.__self__
            waiter = environ[WAITER] = response.req.waiter
            write = response.write

            def write_in_time(item: bytes) -> None:
                patience_s = SEND_S if waiter.body is None else STREAM_SEND_S
                response.sock.settimeout(patience_s + len(item) / SEND_RATE)
                write(item)

            response.write = write_in_time
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

    def handle_request(self, req: Any, conn: Connection) -> Any:
        """Answer a request, go on with a stream, or give back the waiter in which it is to be parked."""
        if not hasattr(req, "waiter"):
            req.waiter = ParkedWaiter(req, conn)
            headers = dict(req.headers)
            # Of a body without a length, at least one byte is awaited.
            length = int(headers.get("CONTENT-LENGTH", 0)) - len(conn.inbox)
            conn.awaited = 1 if "TRANSFER-ENCODING" in headers else max(0, length)
        try:
            if req.waiter.body is not None:
                return self._go_on_with_stream(conn, req.waiter)
            answered = super().handle_request(req, conn)
            req.waiter = None  # the parser keeps the request until the connection's next one
            return answered
        except Parked as parked:
            return parked.waiter
        except TimeoutError:
            self.log.info("Closing a connection whose reader takes nothing.")
            return False

    def _go_on_with_stream(self, conn: Connection, waiter: ParkedWaiter) -> bool:
        conn.sock.settimeout(SEND_S)
        try:
            for item in waiter.body:
                waiter.response.write(item)
            waiter.response.close()
        except OSError:
            raise
        except Exception:
            # Its headers are sent, so there is no room for an answer that says so.
            self.log.exception("Error in a stream")
            return False
        finally:
            waiter.body.close()
        return not waiter.response.should_close()

    def _keepalive_after(self, conn: Connection, keepalive: Any) -> Any:
        if isinstance(keepalive, ParkedWaiter):
            return keepalive
        # Where nobody wanted the body, what comes of it must not be taken for the next request.
        return not conn.awaited and super()._keepalive_after(conn, keepalive)

    # -- in the main thread ------------------------------------------------------------------

    def finish_request(self, conn: Connection, fs: Future) -> None:
        """Park what is to wait, and see to the connection of what has been answered."""
        if conn.goes_on:
            conn.goes_on = False
            self._going_on -= 1
            self._go_on()
        result = None if fs.cancelled() or fs.exception() else fs.result()
        if isinstance(result, ParkedWaiter):
            conn.waiter = result
            if conn.awaited:
                conn.large = True
                self._bodies += len(conn.inbox)
                self._await(conn, BODY_S + conn.awaited / BODY_RATE)
            else:
                self._park(conn, result)
            return
        if conn.waiter is not None:
            conn.waiter.leave()
            conn.waiter = None
        if result:
            # The next request of a connection that is kept; perhaps it is there already.
            self._await(conn, HEAD_S if conn.inbox else self.cfg.keepalive)
            if conn.inbox:
                self._look_at_head(conn)
        else:
            self._linger(conn)

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """As gunicorn's, in time for whoever's time is up next."""
        if not self.alive:
            for conn, watch in list(self._watched.items()):
                if watch is self._parked:
                    self._wake(conn, conn.waiter)
        if self.nr_conns >= self.worker_connections and self._make_room():
            timeout = 0.0  # others wait to be accepted
        elif self._timers:
            timeout = max(0.0, min(timeout, self._timers[0][0] - time.monotonic()))
        super().wait_for_and_dispatch_events(timeout)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            conn = heapq.heappop(self._timers)[-1]
            if conn in self._watched and conn.deadline <= now:
                self._watched[conn].on_late(conn)

    def _watch(self, conn: Connection, watch: Watch, deadline: float) -> None:
        """See to a connection, until it is readable or a monotonic time has come."""
        conn.sock.setblocking(False)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._on_readable, conn))
        self._watched[conn] = watch
        self._set_deadline(conn, deadline)

    def _set_deadline(self, conn: Connection, deadline: float) -> None:
        conn.deadline = deadline
        if len(self._timers) > 2 * len(self._watched) + STALE_TIMERS:
            self._timers = [(each.deadline, next(self._number), each) for each in self._watched]
            heapq.heapify(self._timers)
        heapq.heappush(self._timers, (deadline, next(self._number), conn))

    def _unwatch(self, conn: Connection) -> None:
        del self._watched[conn]
        if conn.sock.fileno() in self.poller.get_map():
            self.poller.unregister(conn.sock)
        if conn.large:
            conn.large = False
            self._bodies -= len(conn.inbox)

    def _on_readable(self, conn: Connection, sock: socket.socket) -> None:
        watch = self._watched.get(conn)
        if watch is None:  # closed, or woken, by another event of the same look at the poller
            return
        try:
            data = sock.recv(READ_BYTES, watch.flags)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            watch.on_data(conn, data)
        else:
            watch.on_end(conn)

    # -- who waits ---------------------------------------------------------------------------

    def _park(self, conn: Connection, waiter: ParkedWaiter) -> None:
        self._watch(conn, self._parked, waiter.deadline)
        if self.alive:
            waiter.on_wake(lambda: self.method_queue.defer(self._wake, conn, waiter))
        else:
            self._wake(conn, waiter)

    def _ignore_early(self, conn: Connection, data: bytes) -> None:
        """A client sends its next request before it has this answer."""
        # It stays readable: without this the loop would spin until the answer is given.
        self.poller.unregister(conn.sock)

    def _hang_up(self, conn: Connection) -> None:
        """A client that waits has gone."""
        waiter = conn.waiter
        self._drop(conn)
        waiter.leave()
        if waiter.body is not None:
            waiter.body.end()
        if waiter.on_hangup is not None and self.alive:
            # Not here, where everybody would wait for it.
            self.tpool.submit(waiter.on_hangup)

    def _wake(self, conn: Connection, waiter: ParkedWaiter) -> None:
        if conn.waiter is waiter and self._watched.get(conn) is self._parked:
            if waiter.body is not None and self.alive and not self._takes(conn):
                return
            self._unwatch(conn)
            waiter.over = not self.alive
            self._woken.append(conn)
            self._go_on()

    def _takes(self, conn: Connection) -> bool:
        """Whether the reader of a stream takes what comes. Who does not is waited for here, by no thread."""
        writable, now = select.poll(), time.monotonic()
        writable.register(conn.sock, select.POLLOUT)
        if writable.poll(0):
            conn.full_since = None
            return True
        conn.full_since = conn.full_since or now
        if now < conn.full_since + SEND_S:
            self._set_deadline(conn, now + FULL_S)
        else:
            self.log.info("Closing a stream whose reader takes nothing.")
            self._hang_up(conn)
        return False

    def _go_on(self) -> None:
        while self._woken and self._going_on < self._most_going_on:
            conn = self._woken.popleft()
            conn.goes_on = True
            self._going_on += 1
            self._dispatch(conn)

    def _dispatch(self, conn: Connection) -> None:
        """Give a thread to a request that is there, or to one that goes on."""
        if conn.waiter is not None:
            conn.parser.again = conn.waiter.request
        self.enqueue_req(conn)

    # -- connections -------------------------------------------------------------------------

    def accept(self, listener: Any) -> None:
        """Take a connection; it gets a thread when it has sent a request."""
        try:
            sock, client = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        conn = Connection(self.cfg, sock, client, listener.getsockname())
        if conn.address and self._of_address[conn.address] >= self._most_of_address:
            sock.close()
            refusals.refuse(
                refusals.ADDRESS,
                f"{conn.address} has {self._most_of_address} connections, as many as "
                "ROLLOUT_GATEWAY_ADDRESS_CONNECTIONS allows",
            )
            return
        self.nr_conns += 1
        self._of_address[conn.address] += 1
        self._await(conn, self.cfg.keepalive)
        self._on_readable(conn, sock)  # as a rule it is there already

    def _drop(self, conn: Connection) -> None:
        self._unwatch(conn)
        self._close(conn)

    def _close(self, conn: Connection) -> None:
        self.nr_conns -= 1
        self._of_address[conn.address] -= 1
        if not self._of_address[conn.address]:
            del self._of_address[conn.address]
        conn.close()
        conn.parser = conn.waiter = None  # a timer may hold the connection for a while
        conn.inbox = Inbox()

    def _make_room(self) -> bool:
        """Close whoever is half-sent or idle the longest; whether there was anybody."""
        incoming = [conn for conn, watch in self._watched.items() if watch is self._incoming]
        for conn in heapq.nsmallest(ROOM, incoming, key=lambda conn: conn.deadline):
            refusals.refuse(refusals.FULL, f"{self.nr_conns} connections are open")
            self._drop(conn)
        return bool(incoming)

    def _cap_keepalive(self, deadline: float) -> None:
        for conn, watch in self._watched.items():
            if watch is self._incoming:
                self._set_deadline(conn, min(conn.deadline, deadline))

    # -- what comes in -----------------------------------------------------------------------

    def _await(self, conn: Connection, seconds: float) -> None:
        """Have the main thread read what comes, for so many seconds."""
        if not self.alive:
            seconds = min(seconds, STOP_KEEPALIVE_LINGER)
        self._watch(conn, self._incoming, time.monotonic() + seconds)

    def _take(self, conn: Connection, data: bytes) -> None:
        if not conn.inbox and not conn.awaited:
            self._set_deadline(conn, min(conn.deadline, time.monotonic() + HEAD_S))
        conn.inbox.add(data)
        if conn.large:
            self._bodies += len(data)
        if conn.awaited:
            self._take_body(conn, len(data))
        else:
            self._look_at_head(conn)

    def _look_at_head(self, conn: Connection) -> None:
        head = conn.inbox.beginning(HEAD_BYTES + 4)
        end = head.find(b"\r\n\r\n")
        if end < 0:
            if len(head) > HEAD_BYTES:
                self._turn_away(conn, 431, refusals.HEAD, f"a head of more than {HEAD_BYTES} bytes")
            return
        head = head[: end + 4]
        lengths = _LENGTH.findall(head)
        # gunicorn reads the head strictly; whatever it refuses needs no body.
        if len(lengths) == 1 and int(lengths[0]) <= EARLY_BYTES and not _NOT_EARLY.search(head):
            conn.awaited = int(lengths[0]) - (len(conn.inbox) - end - 4)
        self._take_body(conn, 0)

    def _take_body(self, conn: Connection, count: int) -> None:
        conn.awaited = max(0, conn.awaited - count)
        if not conn.awaited:
            self._unwatch(conn)
            self._dispatch(conn)
        elif conn.large and self._bodies > BODIES_BYTES:
            first = min((conn for conn in self._watched if conn.large), key=lambda conn: conn.deadline)
            self._turn_away(first, 503, refusals.FULL, f"bodies that come hold {BODIES_BYTES >> 20} MiB")

    # -- ends --------------------------------------------------------------------------------

    def _give_up(self, conn: Connection) -> None:
        """Nothing more comes in time."""
        if conn.inbox or conn.awaited:
            self._turn_away(conn, 408, refusals.SLOW, "a request that did not come to its end in time")
        else:
            self._drop(conn)

    def _turn_away(self, conn: Connection, status: int, reason: str, what: str) -> None:
        refusals.refuse(reason, f"{what}, from {conn.address or 'a local socket'}")
        self._unwatch(conn)
        try:
            conn.sock.send(refusals.answer(status, what))
        except OSError:
            self._close(conn)
        else:
            self._linger(conn)

    def _linger(self, conn: Connection) -> None:
        """Close, but not before the client has read its answer: an early close may cut that off.

        gunicorn waits for the client here in its main thread, and everybody else with it.
        """
        try:
            conn.sock.shutdown(socket.SHUT_WR)
            self._watch(conn, self._lingering, time.monotonic() + LINGER_S)
        except OSError:
            self._close(conn)
