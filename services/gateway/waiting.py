"""Requests that wait for completions: one reader of the stream for all of them, and a bounded number.

A request that waits takes a `Ticket` that names what it waits for. The reader wakes those that an entry of
the stream is about, and no others. Under `parking.ParkingWorker` a waiting request holds no thread: `Parked`
unwinds it, and it is dispatched again once woken. Under any other server its thread waits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis
import structlog

from services.gateway.problems import ApiProblem
from services.gateway.streams import most_each
from services.state import keys
from services.state.redis import is_away
from services.state.results import CompletionStore, matches

log = structlog.get_logger("gateway")

WAITER = "rollout.waiter"
"""Key of the `Waiter` in the WSGI environment of a server that can park requests."""
BLOCK_MS = 2000
READ = 1000
STREAMS = (keys.COMPLETIONS, keys.BATCHES_EVENTS)
FULL_RETRY_S = 5

T = TypeVar("T")


@dataclass(frozen=True)
class Interest:
    """What a request waits for: the end of one rollout, anything of one batch, or any completion of a tenant
    and with a tag.
    """

    rollout_id: str | None = None
    batch_id: str | None = None
    tenant: str | None = None
    """None = anybody's."""
    tag: str | None = None


class Parked(BaseException):
    """Unwinds a request that goes on waiting without its thread. Not an error: no handler may catch it."""

    def __init__(self, waiter: Waiter) -> None:
        super().__init__("the request waits; only a server that offered a Waiter may see this")
        self.waiter = waiter


class Ticket:
    """A place among those who wait. Woken at most once between two calls of `rearm`."""

    def __init__(self, room: WaitingRoom, interest: Interest, holder: str | None = None) -> None:
        self._room = room
        self.interest = interest
        self.holder = holder
        """The tenant whose request it is; None = no matter."""
        self._woken = False
        self._wake: Callable[[], None] | None = None

    def rearm(self) -> None:
        """To be called before looking: what happens after it wakes."""
        with self._room.lock:
            self._woken, self._wake = False, None

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Call this once when woken, at once where that has happened already. It must not block."""
        with self._room.lock:
            if not self._woken:
                self._wake = wake
                return
        wake()

    def fire(self) -> None:
        """Wake. Called by the room with its lock held."""
        self._woken = True
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def sleep(self, timeout_s: float) -> bool:
        """Hold the thread until woken; False when the time was up first."""
        woken = threading.Event()
        self.on_wake(woken.set)
        return woken.wait(max(0.0, timeout_s))

    def close(self) -> None:
        """Give the place back. Twice is harmless."""
        self._room.leave(self)


@dataclass
class Waiter:
    """A request that a server can park, from its first dispatch to its end."""

    began: float = field(default_factory=time.perf_counter)
    ticket: Ticket | None = None
    deadline: float = 0.0
    """Monotonic time at which it is dispatched again unless it is woken before."""
    over: bool = False
    """The server stops: the request is to answer now with what is there."""
    streams: bool = False
    """Its answer is a stream, whose body yields the waiter itself where it has nothing to send for now."""
    memory: dict[str, Any] = field(default_factory=dict)
    on_hangup: Callable[[], None] | None = None
    """Called once, from another thread, when the client has gone while the request was parked."""

    def remember(self, name: str, make: Callable[[], T]) -> T:
        """What the first dispatch made, in all that follow."""
        if name not in self.memory:
            self.memory[name] = make()
        return self.memory[name]

    def need_body(self) -> None:
        """To be called before the body is read: a server that has not got it yet raises `Parked`."""

    def leave(self) -> None:
        """The request has ended, however it did."""
        if self.ticket is not None:
            self.ticket.close()


class WaitingRoom:
    """All tickets of a process, and the thread that reads the stream of completions while there are any."""

    def __init__(
        self,
        connect: Callable[[], redis.Redis],
        completions: CompletionStore,
        most: int,
        share: float = 1.0,
    ) -> None:
        """
        Args:
            most: Tickets at once.
            share: Of them that one tenant may have.
        """
        self._connect = connect
        self._completions = completions
        self._most = most
        self._most_each = most_each(most, share)
        self._of: Counter[str | None] = Counter()
        self.lock = threading.RLock()
        self._someone = threading.Condition(self.lock)
        self._by_name: dict[tuple[str, str], set[Ticket]] = {}
        """Those who wait for one rollout or batch."""
        self._feeds: set[Ticket] = set()
        self._after: dict[str, str] | None = None
        """Last entry of each stream that was read; None = nobody waits, and nothing is read."""
        self._thread: threading.Thread | None = None
        self.open = 0

    def take(self, interest: Interest, holder: str | None) -> Ticket:
        """A ticket for what ends from now on.

        Args:
            holder: The tenant whose request waits, of which not all places may be; None = no matter.

        Raises:
            ApiProblem: 503; as many wait as may. 429; as many of the tenant's.
            redis.RedisError: It cannot be said where the stream of completions ends.
        """
        ticket = Ticket(self, interest, holder)
        with self.lock:
            if holder is not None and self._of[holder] >= self._most_each:
                raise ApiProblem(
                    429,
                    "Too many waiting requests",
                    f"{self._of[holder]} of tenant {holder!r} wait here, as many as one tenant may have; one "
                    "client with GET /v1/completions?cursor=…&wait=… can wait for all of its rollouts",
                    retry_after_s=FULL_RETRY_S,
                )
            if self.open >= self._most:
                raise ApiProblem(
                    503,
                    "Too many waiting requests",
                    f"{self.open} wait here, as many as ROLLOUT_GATEWAY_WAITERS allows; one client "
                    "with GET /v1/completions?cursor=…&wait=… can wait for all of its rollouts",
                    retry_after_s=FULL_RETRY_S,
                )
            self.open += 1
            self._of[holder] += 1
            name = _name(interest)
            if name is None:
                self._feeds.add(ticket)
            else:
                self._by_name.setdefault(name, set()).add(ticket)
        try:
            self._read_on()
        except BaseException:
            ticket.close()
            raise
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Take a ticket back."""
        with self.lock:
            name = _name(ticket.interest)
            place = self._feeds if name is None else self._by_name.get(name, set())
            if ticket in place:
                place.remove(ticket)
                self.open -= 1
                self._of[ticket.holder] -= 1
                if not self._of[ticket.holder]:
                    del self._of[ticket.holder]
                if not place and name is not None:
                    self._by_name.pop(name, None)

    def wait(
        self,
        look: Callable[[], object],
        wait_s: float,
        interest: Interest,
        waiter: Waiter | None,
        holder: str | None,
    ) -> Any:
        """Call `look` until it answers something true or the time is up; returns its last answer.

        Args:
            waiter: Of a server that parks requests; None: this thread waits.
            holder: As of `take`.

        Raises:
            Parked: The request is to be dispatched again, and this to be called again.
            ApiProblem: As of `take`.
        """
        ticket, deadline = waiter and waiter.ticket, time.monotonic() + wait_s
        if ticket is None:
            # Most answers are there already, and cost no place.
            answer = look()
            if answer or wait_s <= 0:
                return answer
            ticket = self.take(interest, holder)
        else:
            deadline = waiter.deadline
        parked = False
        try:
            while True:
                ticket.rearm()
                try:
                    answer = look()
                except redis.RedisError as error:
                    # Whoever waits goes on: an outage shorter than the wait does not concern the client.
                    if not is_away(error) or time.monotonic() >= deadline or (waiter and waiter.over):
                        raise
                    answer = None
                if answer or time.monotonic() >= deadline or (waiter and waiter.over):
                    return answer
                if waiter is not None:
                    waiter.ticket, waiter.deadline, parked = ticket, deadline, True
                    raise Parked(waiter)
                ticket.sleep(deadline - time.monotonic())
        finally:
            if not parked:
                ticket.close()

    # -- the reader --------------------------------------------------------------------------

    def _read_on(self) -> None:
        """See to it that entries from now on are read; the caller's ticket is in its place."""
        with self.lock:
            if self._after is not None:
                return
        tail = {stream: self._completions.tail(stream) for stream in STREAMS}
        with self._someone:
            if self._after is None:
                self._after = tail
            if self._thread is None:
                # Not at construction: gunicorn forks after that.
                self._thread = threading.Thread(target=self._run, name="completions", daemon=True)
                self._thread.start()
            self._someone.notify()

    def _run(self) -> None:
        client = self._connect()
        away = False
        while True:
            with self._someone:
                if not self.open:
                    self._after = None
                    self._someone.wait_for(lambda: self._after is not None)
                after = dict(self._after or {})
            try:
                reply = client.xread(after, block=BLOCK_MS, count=READ)
            except redis.RedisError as error:
                if not away:
                    log.warning("the stream of completions cannot be read", error=str(error))
                away = True
                time.sleep(1.0)
                continue
            if away:
                # Perhaps another server, whose entries come before ours: they look for themselves.
                away = False
                self._wake_all()
            with self.lock:
                for stream, entries in reply or ():
                    after[stream] = entries[-1][0]
                    for _, entry in entries:
                        self._wake_for(stream, entry)
                self._after = after

    def _wake_for(self, stream: str, entry: dict[str, str]) -> None:
        if stream == keys.BATCHES_EVENTS:
            for ticket in self._by_name.get(("batch", entry["batch"]), ()):
                ticket.fire()
            return
        for ticket in self._by_name.get(("rollout", entry["id"]), ()):
            ticket.fire()
        for ticket in self._feeds:
            if matches(entry, tag=ticket.interest.tag, tenant=ticket.interest.tenant):
                ticket.fire()

    def _wake_all(self) -> None:
        with self.lock:
            for place in (*self._by_name.values(), self._feeds):
                for ticket in place:
                    ticket.fire()


def _name(interest: Interest) -> tuple[str, str] | None:
    if interest.rollout_id is not None:
        return "rollout", interest.rollout_id
    return None if interest.batch_id is None else ("batch", interest.batch_id)
