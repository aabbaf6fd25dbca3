"""A gunicorn worker whose waiting requests hold a socket and no thread.

It is the thread worker of `intake` with a car park. A view that has to wait raises `Parked`, and the body
of a stream yields its waiter: the thread goes back to the pool, the socket joins the worker's poller. The
request is dispatched again, or its stream gone on with, when its ticket is woken, when its time is up, or
when the worker stops. A client that hangs up makes its socket readable, and frees its place at once.
"""

from __future__ import annotations

import gc
import heapq
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

from gunicorn.http.wsgi import Response
from gunicorn.workers.gthread import TConn

from services.gateway.intake import IntakeWorker
from services.gateway.waiting import WAITER, Parked, Waiter

SEND_S = 10.0
"""Longest that a reader may keep a thread from sending the next piece."""
SEND_RATE = 256 << 10
"""Bytes a second that a reader of an answer has to take beyond that."""
STALE_TIMERS = 256
"""Timers of requests that have ended since, kept before they are swept: each holds a connection's objects."""


class Spot(Waiter):
    """A parkable request."""

    def __init__(self, request: Any) -> None:
        super().__init__()
        self.request = request
        self.response: Response | None = None
        self.body: StreamBody | None = None

    def need_body(self) -> None:
        if self.request.conn.awaited:
            raise Parked(self)


class StreamBody:
    """The body of a stream: where it yields its waiter, the request is parked instead of held."""

    def __init__(self, inner: Any, spot: Spot) -> None:
        self._inner, self._items = inner, iter(inner)
        self._spot = spot
        self._parked = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self._parked = False
        item = next(self._items)
        if item is self._spot:
            self._parked = True
            raise Parked(self._spot)
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


class ParkingWorker(IntakeWorker):
    """`worker_class = "services.gateway.parking.ParkingWorker"`. Over TLS or HTTP/2 nothing is parked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parked: dict[TConn, Spot] = {}
        self._timers: list[tuple[float, int, TConn, Spot]] = []
        self._number = count()
        self._woken: deque[tuple[TConn, Spot]] = deque()
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
            if not hasattr(request, "spot"):
                request.spot = Spot(request)
            spot = environ[WAITER] = request.spot
            self._bound_sending(response, request.conn.sock)
            body = app(environ, start_response)
            if spot.streams:
                spot.response, spot.body = response, StreamBody(body, spot)
                return spot.body
            return body

        self.wsgi = offer_waiter
        # What is there by now stays. To look at it for garbage again and again is a tenth of the gateway's
        # time while it makes large answers.
        gc.collect()
        gc.freeze()

    # -- in a thread of the pool -------------------------------------------------------------

    def handle_request(self, req: Any, conn: TConn) -> Any:
        """Answer a request, go on with a stream, or give back the spot in which it is to be parked."""
        spot = getattr(req, "spot", None)
        if spot is None:
            req.conn = conn
            conn.awaited = _awaited(req, conn)
        try:
            if spot is not None and spot.body is not None:
                return self._go_on_with_stream(conn, spot)
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

    def _go_on_with_stream(self, conn: TConn, spot: Spot) -> bool:
        conn.sock.settimeout(SEND_S)
        try:
            for item in spot.body:
                spot.response.write(item)
            spot.response.close()
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
            spot.body.close()
        return not spot.response.should_close()

    def _keepalive_after(self, conn: TConn, keepalive: Any) -> Any:
        if isinstance(keepalive, Spot):
            return keepalive
        if getattr(conn, "awaited", 0):
            # Nobody wanted the body: what comes of it must not be taken for the next request.
            return False
        return super()._keepalive_after(conn, keepalive)

    # -- in the main thread ------------------------------------------------------------------

    def finish_request(self, conn: TConn, fs: Future) -> None:
        """Park what is to wait; all else is as gunicorn has it."""
        spot = getattr(conn, "spot", None)
        if spot is not None:
            conn.spot = None
            self._going_on -= 1
            self._go_on()
        result = None if fs.cancelled() or fs.exception() else fs.result()
        if isinstance(result, Spot):
            if conn.awaited:
                conn.again = result
                self._await_body(conn)
            else:
                self._park(conn, result)
            return
        if spot is not None:
            spot.leave()
        if fs.cancelled() or fs.exception() or self.cfg.is_ssl:
            super().finish_request(conn, fs)
        elif result:
            self._await_next(conn)
        else:
            self._linger(conn)

    def _dispatch(self, conn: Any) -> None:
        spot, conn.again = getattr(conn, "again", None), None
        if spot is not None:
            conn.parser = _Again(conn, spot.request)
        super()._dispatch(conn)

    def _park(self, conn: TConn, spot: Spot) -> None:
        self._parked[conn] = spot
        conn.sock.setblocking(False)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._on_readable, conn))
        if not self.alive:
            self._wake(conn, spot)
            return
        if len(self._timers) > 2 * len(self._parked) + STALE_TIMERS:
            live = self._parked.items()
            self._timers = [(spot.deadline, next(self._number), conn, spot) for conn, spot in live]
            heapq.heapify(self._timers)
        heapq.heappush(self._timers, (spot.deadline, next(self._number), conn, spot))
        spot.ticket.on_wake(lambda: self.method_queue.defer(self._wake, conn, spot))

    def _unpark(self, conn: TConn) -> None:
        del self._parked[conn]
        if conn.sock.fileno() in self.poller.get_map():
            self.poller.unregister(conn.sock)

    def _on_readable(self, conn: TConn, sock: socket.socket) -> None:
        """The client has gone, or sends its next request before it has this answer."""
        spot = self._parked.get(conn)
        if spot is None:  # woken by another event of the same look at the poller
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
        spot.leave()
        if spot.body is not None:
            spot.body.end()
        if spot.on_hangup is not None and self.alive:
            # Not here, where everybody would wait for it.
            self.tpool.submit(spot.on_hangup)
        self._close(conn)

    def _wake(self, conn: TConn, spot: Spot) -> None:
        if self._parked.get(conn) is spot:
            self._unpark(conn)
            spot.over = not self.alive
            self._woken.append((conn, spot))
            self._go_on()

    def _go_on(self) -> None:
        while self._woken and self._going_on < self._most_going_on:
            conn, spot = self._woken.popleft()
            conn.spot, conn.parser = spot, _Again(conn, spot.request)
            self._going_on += 1
            self.enqueue_req(conn)

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """As gunicorn's, and in time for whoever's time is up next."""
        if not self.alive:
            for conn, spot in list(self._parked.items()):
                self._wake(conn, spot)
        if self._timers:
            timeout = max(0.0, min(timeout, self._timers[0][0] - time.monotonic()))
        super().wait_for_and_dispatch_events(timeout)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, conn, spot = heapq.heappop(self._timers)
            if spot.deadline <= now:
                self._wake(conn, spot)
