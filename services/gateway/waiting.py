"""Requests that wait for results: one reader of what ends for all of them, and a bounded number.

A request that waits is a `Waiter` in the `WaitingRoom`, with an `Interest`. The reader wakes those whom an
entry is about, and no others. Under `parking.ParkingWorker` it holds no thread: `Parked` unwinds it, and it
is dispatched again once woken. Under any other server its thread sleeps.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis
import structlog
from flask import request

from services.gateway.auth import holder
from services.gateway.problems import ApiProblem
from services.state import keys
from services.state.redis import is_away
from services.state.results.stream import ResultStream, matches

log = structlog.get_logger("gateway")

WAITER = "rollout.waiter"
"""Key of the `Waiter` in the WSGI environment; a server that can park requests puts one of its own there."""
BLOCK_MS = 2000
READ = 1000
STREAMS = (keys.RESULTS, keys.BATCHES_EVENTS)

T = TypeVar("T")


@dataclass(frozen=True)
class Interest:
    """What a request waits for: the end of one rollout, anything of one batch, or any result of a tenant and
    with a tag.
    """

    rollout_id: str | None = None
    batch_id: str | None = None
    tenant: str | None = None
    """None = anybody's."""
    tag: str | None = None

    @property
    def name(self) -> tuple[str, str] | None:
        """The one rollout or batch, with its kind; None = any."""
        if self.rollout_id is not None:
            return "rollout", self.rollout_id
        return None if self.batch_id is None else ("batch", self.batch_id)


@dataclass
class Places:
    """A bounded number of places, of which one tenant may have a share while there are others."""

    limit: int
    share: float
    noun: str
    """What a refusal says, as the next ones."""
    verb: str
    setting: str
    remedy: str
    retry_after_s: int
    open: int = 0
    _taken: Counter[str | None] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, tenant: str | None) -> None:
        """Take a place.

        Args:
            tenant: Whose it is; None = no matter.

        Raises:
            ApiProblem: 429; the tenant has as many as one may. 503; all are taken.
        """
        with self._lock:
            taken = self._taken[tenant]
            if tenant is not None and taken >= math.ceil(self.limit * self.share):
                detail = f"{taken} of tenant {tenant!r} {self.verb}, as many as one tenant may have"
                raise self._refusal(429, detail)
            if self.open >= self.limit:
                raise self._refusal(503, f"{self.open} {self.verb}, as many as {self.setting} allows")
            self.open += 1
            self._taken[tenant] += 1

    def _refusal(self, status: int, detail: str) -> ApiProblem:
        title = f"Too many {self.noun}"
        return ApiProblem(status, title, f"{detail}; {self.remedy}", retry_after_s=self.retry_after_s)

    def free(self, tenant: str | None) -> None:
        """Give a place back."""
        with self._lock:
            self.open -= 1
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]


class Parked(BaseException):
    """Unwinds a request that goes on waiting without its thread. Not an error: no handler may catch it."""

    def __init__(self, waiter: Waiter) -> None:
        super().__init__("the request waits; only a server that offered a Waiter may see this")
        self.waiter = waiter


class Waiter:
    """A request that may wait, from its first dispatch to its end. This one holds its thread meanwhile.

    It is woken at most once between two calls of `rearm`.
    """

    parks = False
    """Whether the server parks it: `pause` raises `Parked`, and a stream's body yields the waiter itself
    where it has nothing to send for now."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.deadline = 0.0
        """Monotonic time at which it goes on unless it is woken before."""
        self.over = False
        """The server stops: the request is to answer now with what is there."""
        self.streams = False
        """Its answer is a stream."""
        self.on_hangup: Callable[[], None] | None = None
        """Called once, from another thread, when the client has gone while the request was parked."""
        self.interest = Interest()
        self.tenant: str | None = None
        """Whose place it has; None = no matter."""
        self.room: WaitingRoom | None = None
        """The room that it has a place in."""
        self._memory: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._woken = False
        self._wake: Callable[[], None] | None = None

    def remember(self, name: str, make: Callable[[], T]) -> T:
        """What the first dispatch made, in all that follow."""
        if name not in self._memory:
            self._memory[name] = make()
        return self._memory[name]

    def need_body(self) -> None:
        """Ask for the body before it is read: a server that has not got it yet raises `Parked`."""

    def rearm(self) -> None:
        """Begin to listen, before looking: what happens from now on wakes."""
        with self._lock:
            self._woken, self._wake = False, None

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Call this once when woken, at once where that has happened already. It must not block."""
        with self._lock:
            if not self._woken:
                self._wake = wake
                return
        wake()

    def wake(self) -> None:
        """Called by the room when something happened that is of interest."""
        with self._lock:
            self._woken = True
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def pause(self) -> None:
        """Wait until woken, or until the deadline."""
        woken = threading.Event()
        self.on_wake(woken.set)
        woken.wait(max(0.0, self.deadline - time.monotonic()))

    def pauses(self, seconds: float) -> Iterator[Waiter]:
        """The same in a stream, for at most so long: yields the waiter where the server is to park it."""
        self.deadline = time.monotonic() + seconds
        if self.parks:
            yield self
        else:
            self.pause()

    def leave(self) -> None:
        """Give the place back. Twice is harmless."""
        if self.room is not None:
            self.room.leave(self)


class ParkedWaiter(Waiter):
    """A waiter whose server parks its request."""

    parks = True

    def __init__(self, request: Any, conn: Any) -> None:
        """
        Args:
            request: What the server dispatches again.
            conn: Its connection; as many bytes of the body as `awaited` says are still to come.
        """
        super().__init__()
        self.request, self._conn = request, conn
        self.response: Any = None
        """The server's own of a stream, to go on with."""
        self.body: StreamBody | None = None

    def need_body(self) -> None:
        if self._conn.awaited:
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
        self._parked = False  # also where it ends, or fails, before it yields again
        item = next(self._items)
        self._parked = item is self._waiter
        if self._parked:
            raise Parked(self._waiter)
        return item

    def close(self) -> None:
        """Called by the server also when the stream is merely parked."""
        if not self._parked:
            self.end()

    def end(self) -> None:
        if hasattr(self._inner, "close"):
            self._inner.close()


def waiter() -> Waiter:
    """That of the request under way."""
    return request.environ.setdefault(WAITER, Waiter())


class WaitingRoom:
    """All waiters of a process, and the thread that reads what ends while there are any."""

    def __init__(self, connect: Callable[[], redis.Redis], results: ResultStream, places: Places) -> None:
        self._connect = connect
        self._results = results
        self._places = places
        self._lock = threading.RLock()
        self._someone = threading.Condition(self._lock)
        self._by_name: dict[tuple[str, str] | None, set[Waiter]] = {}
        """The waiters for one rollout or batch; under None, for any."""
        self._after: dict[str, str] | None = None
        """Last entry of each stream that was read; None = nobody waits, and nothing is read."""
        self._thread: threading.Thread | None = None

    @property
    def open(self) -> int:
        """Requests that wait."""
        return self._places.open

    def enter(self, waiter: Waiter, interest: Interest) -> None:
        """Give a waiter a place; what happens from now on wakes it.

        Raises:
            ApiProblem: There is none; see `Places.take`.
            redis.RedisError: It cannot be said where the streams end.
        """
        tenant = holder()
        self._places.take(tenant)
        with self._lock:
            waiter.room, waiter.interest, waiter.tenant = self, interest, tenant
            self._by_name.setdefault(interest.name, set()).add(waiter)
        try:
            self._read_on()
        except BaseException:
            self.leave(waiter)
            raise

    def leave(self, waiter: Waiter) -> None:
        """Take a place back."""
        with self._lock:
            if waiter.room is None:
                return
            waiter.room = None
            name = waiter.interest.name
            self._by_name[name].remove(waiter)
            if not self._by_name[name]:
                del self._by_name[name]
        self._places.free(waiter.tenant)

    def wait(self, look: Callable[[], object], wait_s: float, interest: Interest) -> Any:
        """Call `look` until it answers something true or the time is up; returns its last answer.

        Raises:
            Parked: The request is to be dispatched again, and this to be called again.
            ApiProblem: As of `enter`.
        """
        mine = waiter()
        if mine.room is None:
            # Most answers are there already, and cost no place.
            answer = look()
            if answer or wait_s <= 0:
                return answer
            mine.deadline = time.monotonic() + wait_s
            self.enter(mine, interest)
        parked = False
        try:
            while True:
                mine.rearm()
                try:
                    answer = look()
                except redis.RedisError as error:
                    # Whoever waits goes on: an outage shorter than the wait does not concern the client.
                    if not is_away(error) or time.monotonic() >= mine.deadline or mine.over:
                        raise
                    answer = None
                if answer or time.monotonic() >= mine.deadline or mine.over:
                    return answer
                parked = mine.parks
                mine.pause()
        finally:
            if not parked:
                mine.leave()

    # -- the reader --------------------------------------------------------------------------

    def _read_on(self) -> None:
        """See to it that entries from now on are read; the caller's waiter is in its place."""
        with self._lock:
            if self._after is not None:
                return
        tail = {stream: self._results.tail(stream) for stream in STREAMS}
        with self._someone:
            if self._after is None:
                self._after = tail
            if self._thread is None:
                # Not at construction: gunicorn forks after that.
                self._thread = threading.Thread(target=self._run, name="results", daemon=True)
                self._thread.start()
            self._someone.notify()

    def _run(self) -> None:
        client = self._connect()
        away = False
        while True:
            with self._someone:
                if not self._by_name:
                    self._after = None
                    self._someone.wait_for(lambda: self._after is not None)
                after = dict(self._after or {})
            try:
                reply = client.xread(after, block=BLOCK_MS, count=READ)
            except redis.RedisError as error:
                if not away:
                    log.warning("the stream of results cannot be read", error=str(error))
                away = True
                time.sleep(1.0)
                continue
            with self._lock:
                if away:
                    # Perhaps another server, whose entries come before ours: they look for themselves.
                    away = False
                    for waiters in self._by_name.values():
                        for waiter in waiters:
                            waiter.wake()
                for stream, entries in reply or ():
                    after[stream] = entries[-1][0]
                    for _, entry in entries:
                        self._wake_for(stream, entry)
                self._after = after

    def _wake_for(self, stream: str, entry: dict[str, str]) -> None:
        batch = stream == keys.BATCHES_EVENTS
        name = ("batch", entry["batch"]) if batch else ("rollout", entry["id"])
        for waiter in self._by_name.get(name, ()):
            waiter.wake()
        for waiter in () if batch else self._by_name.get(None, ()):
            if matches(entry, tag=waiter.interest.tag, tenant=waiter.interest.tenant):
                waiter.wake()
