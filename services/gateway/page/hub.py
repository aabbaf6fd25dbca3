"""What happens, read once for all who look at it: one thread, and only while somebody does.

The thread reads the streams of changes and what else has news, tells the viewers concerned and wakes them. A
viewer takes what it was told when it comes to it, of most things the newest; one that is slow costs nobody
anything.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import redis
import structlog

from rollout.schema import Rollout, State
from services.gateway.page.watched import Watched, event
from services.gateway.waiting import Waiter
from services.state import keys
from services.state.redis import connect
from services.state.turns import store as turns
from services.state.turns.entries import decode

if TYPE_CHECKING:
    from services.gateway.context import Gateway

log = structlog.get_logger("gateway")

TICK_S = 0.15
"""Between two looks for what is new; what sandboxes print comes without one."""
OVERVIEW_S = 1.0
ASK_S, WATCHED_S = 5.0, 12
"""How often workers are told that somebody looks, and how long that holds."""
MOST_PIECES, MOST_BYTES = 64, 1 << 20
"""Pieces of turns, or of output, that wait for one viewer; who is further behind is told to begin anew."""
READ = 1000
STATE = {"state", "attempt", "reward", "updated_at", "drop"}
"""Fields of a rollout in `states`."""
AWAY_S = 1.0
"""The pause before a Redis that does not answer is tried again."""

Overview = Callable[[Iterable[str | None]], dict[str | None, bytes]]
"""Makes the event `overview` for each of these tenants; None = for who sees all."""


@dataclass(eq=False)
class Viewer:
    """One stream: what it looks at, and what it has not been told yet."""

    waiter: Waiter
    tenant: str | None
    """Whose; None = everybody's."""
    topics: frozenset[str] = frozenset()
    rollout: str | None = None
    """One of that tenant."""
    ids: frozenset[str] = frozenset()
    """Rollouts whose states are of interest, whosever they are."""
    _news: dict[Hashable, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _number: count = field(default_factory=count)

    def tell(self, what: Hashable, said: bytes) -> None:
        """Give it an event, in the place of the last about the same that it has not got yet."""
        with self._lock:
            self._news[what] = said
        self.waiter.wake()

    def add(self, kind: str, said: bytes, anew: bytes) -> None:
        """Give it a piece behind the others of its kind; where too many wait `anew`, which stands for all."""
        with self._lock:
            waiting = [what for what in self._news if isinstance(what, tuple) and what[0] == kind]
            if len(waiting) >= MOST_PIECES or sum(len(self._news[what]) for what in waiting) > MOST_BYTES:
                for what in waiting:
                    del self._news[what]
                said = anew
            self._news[kind, next(self._number)] = said
        self.waiter.wake()

    def take(self) -> bytes:
        """What is new; empty: nothing."""
        with self._lock:
            news, self._news = self._news, {}
        return b"".join(news.values())


class Hub:
    """The viewers of a gateway process."""

    def __init__(self, gate: Gateway) -> None:
        self._gate = gate
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._viewers: set[Viewer] = set()
        self._overview: Overview | None = None
        self._forget()

    def _forget(self) -> None:
        """Nothing is known: nobody looks, or Redis was away and may be another one."""
        self._after: dict[str, str] = {}
        self._watched: dict[str, Watched] = {}
        self._states: dict[str, tuple[str, bytes]] = {}
        """By id the tenant, and the event `states`."""
        self._unread: set[str] = set().union(*map(_names, self._viewers))
        self._asked_at = self._overview_at = float("-inf")

    @property
    def open(self) -> int:
        """Viewers that look."""
        return len(self._viewers)

    def enter(self, viewer: Viewer, overview: Overview) -> None:
        """Tell a viewer how it is now, and what is new from now on."""
        with self._lock:
            self._viewers.add(viewer)
            self._overview = overview
            if "overview" in viewer.topics:
                self._overview_at = float("-inf")
            watched = self._watched.get(viewer.rollout or "")
            self._unread |= {name for name in viewer.ids if not self._say_state(name, [viewer])}
            if watched is None or viewer not in self._of(watched.rollout):
                self._unread |= {viewer.rollout} - {None}
            else:
                viewer.tell("rollout", watched.summary)
                if watched.screen:
                    viewer.tell("output", watched.screen)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="live", daemon=True)
                self._thread.start()

    def leave(self, viewer: Viewer) -> None:
        """It looks no more. Twice is harmless."""
        with self._lock:
            self._viewers.discard(viewer)

    def _of(self, rollout: Rollout) -> list[Viewer]:
        """Who follows it; not whoever did when the id was another tenant's."""
        its = [viewer for viewer in self._viewers if viewer.rollout == rollout.id]
        return [viewer for viewer in its if viewer.tenant in (None, rollout.tenant)]

    def _say_state(self, name: str, viewers: Iterable[Viewer]) -> bool:
        """Say the state of a rollout to those of its tenant; whether it is known."""
        tenant, said = self._states.get(name, ("", None))
        for viewer in viewers if said else ():
            if viewer.tenant in (None, tenant):
                viewer.tell(f"state {name}", said)
        return said is not None

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        client = connect(self._gate.settings.redis_url, max_connections=1)
        while True:
            try:
                with client.pubsub(ignore_subscribe_messages=True) as channel:
                    while not self._over():
                        ends = time.monotonic() + TICK_S
                        self._look(channel)
                        while (rest := ends - time.monotonic()) > 0:
                            if message := channel.get_message(timeout=rest):
                                self._hear(message["channel"], message["data"])
                client.close()
                return
            except redis.RedisError as error:
                log.warning("what happens cannot be read for those who look", error=str(error))
            except Exception:
                log.exception("a look at what happens broke off")
            with self._lock:
                self._forget()
                for viewer in self._viewers:
                    viewer.tell("away", b": Redis is away\n\n")
            time.sleep(AWAY_S)

    def _over(self) -> bool:
        """Whether nobody looks; then the thread is to end, for the next viewer begins another one."""
        with self._lock:
            if not self._viewers:
                self._thread = None
                self._forget()
            return not self._viewers

    def _look(self, channel: Any) -> None:
        self._read_streams()
        self._read_rollouts()
        self._read_turns()
        self._say_overview()
        running = self._running()
        with self._lock:
            wanted = {keys.REPORTS_CHANNEL, *map(keys.live, self._watched)}
        if new := wanted - set(channel.channels):
            channel.subscribe(*new)
        if old := set(channel.channels) - wanted:
            channel.unsubscribe(*old)
        if running and time.monotonic() > self._asked_at + ASK_S:
            self._asked_at = time.monotonic()
            with self._gate.redis.pipeline(transaction=False) as pipe:
                for watched in running:
                    pipe.set(keys.watched(watched.rollout.id), 1, ex=WATCHED_S)
                pipe.publish(keys.WATCH_CHANNEL, len(running))
                pipe.execute()

    def _running(self) -> list[Watched]:
        with self._lock:
            return [known for known in self._watched.values() if known.rollout.state is State.RUNNING]

    def _read_streams(self) -> None:
        """Note what changed since the last look."""
        with self._lock:
            names = set().union(*map(_names, self._viewers))
            followed = {viewer.rollout for viewer in self._viewers}
            # What nobody looks at any more. Not where one leaves: thousands may at once.
            self._watched = {name: known for name, known in self._watched.items() if name in followed}
            self._states = {name: said for name, said in self._states.items() if name in names}
            wanted = [keys.EVENTS] * bool(names)
            wanted += [keys.BATCHES_EVENTS] * any("batches" in viewer.topics for viewer in self._viewers)
        self._after = {name: self._after.get(name) or self._gate.result_stream.tail(name) for name in wanted}
        batches: set[str] = set()
        more = bool(wanted)
        while more:
            reply = self._gate.redis.xread(self._after, count=READ) or []
            more = any(len(entries) == READ for _, entries in reply)
            for stream, entries in reply:
                self._after[stream] = entries[-1][0]
                batches |= {entry["batch"] for _, entry in entries if stream == keys.BATCHES_EVENTS}
                with self._lock:
                    self._unread |= names & {entry.get("id") for _, entry in entries}
        for name in batches:
            self._say_changed("batch", name, self._gate.redis.hget(keys.batch(name), "tenant"))

    def _read_rollouts(self) -> None:
        with self._lock:
            names, self._unread = list(self._unread), set()
        for rollout in self._gate.rollouts.get_many(names, trajectory=False) if names else ():
            with self._lock:
                now = rollout.model_dump_json(include=STATE)
                said = event("states", f"{{{json.dumps(rollout.id)}:{now}}}")
                self._states[rollout.id] = rollout.tenant, said
                self._say_state(rollout.id, [viewer for viewer in self._viewers if rollout.id in viewer.ids])
                if viewers := self._of(rollout):
                    self._say_rollout(rollout, viewers)

    def _say_rollout(self, rollout: Rollout, viewers: list[Viewer]) -> None:
        watched = self._watched.get(rollout.id)
        if watched is None:
            watched = self._watched[rollout.id] = Watched(rollout)
        anew = rollout.attempt != watched.rollout.attempt
        watched.read(rollout)
        if anew:
            watched.length = 0
            watched.begin()
        for viewer in viewers:
            viewer.tell("rollout", watched.summary)
            if anew:
                viewer.tell("turns", watched.refetch)
        self._asked_at = float("-inf")

    def _read_turns(self) -> None:
        """Read on in the turn logs of what is in RUN, and count the calls of programs."""
        running, client = self._running(), self._gate.redis
        with client.pipeline(transaction=False) as pipe:
            for watched in running:
                key = keys.turns if watched.rollout.request.agent is None else keys.capture_nodes
                pipe.llen(key(watched.rollout.id, watched.rollout.attempt))
            lengths = pipe.execute() if running else []
        for watched, length in zip(running, lengths, strict=True):
            name, attempt, before = watched.rollout.id, watched.rollout.attempt, watched.length
            if length in (0, before):
                continue
            # A Redis that was killed may have lost the last ones.
            known, entries = max(0, before) if length > before else 0, []
            if watched.rollout.request.agent is None:
                # Damaged, or a newer release wrote it: the others are shown all the same.
                with suppress(ValueError):
                    entries = decode(turns.read(client, name, attempt, known))
                    length = known + len(entries)
            with self._lock:
                if not known:
                    watched.begin()
                watched.length, said = length, watched.turns(entries)
                said = said if entries and length > before else watched.refetch
                for viewer in self._of(watched.rollout) if before >= 0 else ():
                    viewer.add("turns", said, watched.refetch)

    def _say_changed(self, what: str, name: str, tenant: str | None) -> None:
        topic = {"batch": "batches", "report": "reports"}[what]
        said = event("changed", json.dumps({"what": what, "id": name}))
        with self._lock:
            for viewer in self._viewers:
                if topic in viewer.topics and viewer.tenant in (None, tenant):
                    viewer.tell(f"{what} {name}", said)

    def _say_overview(self) -> None:
        now = time.monotonic()
        with self._lock:
            its = [viewer for viewer in self._viewers if "overview" in viewer.topics]
            make = self._overview
        if its and make and now >= self._overview_at + OVERVIEW_S:
            self._overview_at = now
            made = make({viewer.tenant for viewer in its})
            for viewer in its:
                viewer.tell("overview", made[viewer.tenant])

    def _hear(self, channel: str, text: str) -> None:
        if channel == keys.REPORTS_CHANNEL:
            tenant, _, run = text.partition(" ")
            return self._say_changed("report", run, tenant)
        name = channel.removeprefix(keys.live(""))
        with self._lock, suppress(ValueError, TypeError, KeyError):  # of a worker of another release
            if watched := self._watched.get(name):
                said = watched.printed(json.loads(text))
                anew = watched.screen or said
                for viewer in self._of(watched.rollout):
                    viewer.add("output", said, anew)
        return None


def _names(viewer: Viewer) -> set[str]:
    return viewer.ids | ({viewer.rollout} - {None})
