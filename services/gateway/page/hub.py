"""What happens, read once for all who look at it: one thread, and only while somebody does.

The thread reads the streams of changes and what else has news, marks the viewers concerned and wakes them. A
viewer takes what is newest when it comes to it: nothing is queued, so a slow one costs nobody anything.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import redis
import structlog

from rollout.schema import State
from services.gateway.page.watched import Watched, event
from services.gateway.waiting import Waiter
from services.state import keys
from services.state.redis import connect
from services.state.turns import store as turns
from services.state.turns.entries import Entry, decode

if TYPE_CHECKING:
    from services.gateway.context import Gateway

log = structlog.get_logger("gateway")

TICK_S = 0.15
"""Between two looks for what is new; what sandboxes print comes without one."""
SLOW_TICKS = 3
"""Looks between two for changes of many rollouts or batches, of which there may be thousands a second."""
OVERVIEW_S = 1.0
CALLS_S = 1.0
"""Least time between two words that a program's session has more calls: each has the whole read again."""
ASK_S, WATCHED_S = 5.0, 12
"""How often workers are told that somebody looks, and how long that holds."""
READ = 1000
AWAY_S = 1.0
"""The pause before a Redis that does not answer is tried again."""
FIELDS = ("state", "attempt", "reward", "updated", "drop", "tenant")
"""Of a record, for `states`."""


@dataclass(frozen=True)
class Interest:
    """What a viewer looks at."""

    tenant: str | None
    """Whose; None = everybody's."""
    topics: frozenset[str] = frozenset()
    """Of `overview`, `batches`, `reports`."""
    rollout: str | None = None
    """A rollout of that tenant."""
    ids: frozenset[str] = frozenset()
    """Rollouts of which the states are of interest, whosever they are."""


@dataclass(eq=False)
class Viewer:
    """One stream, and what it has not been told yet."""

    waiter: Waiter
    interest: Interest
    news: dict[str, bytes] = field(default_factory=dict)
    """The newest event of a name."""
    ids: set[str] = field(default_factory=set)
    """Rollouts whose states are news."""
    away: bool = False
    """Whether Redis went away."""
    resets: int | None = None
    """Of its rollout's turns, that it knows of; None = it has just come."""
    turns: int = 0
    """Pieces that it has."""
    seen: tuple[int, int, bool] = (0, 0, False)
    """What it has of its rollout's screen."""


class Hub:
    """The viewers of a gateway process."""

    def __init__(self, gate: Gateway) -> None:
        self._gate = gate
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._viewers: set[Viewer] = set()
        self._of_rollout: defaultdict[str, set[Viewer]] = defaultdict(set)
        self._of_id: defaultdict[str, set[Viewer]] = defaultdict(set)
        self._forget()

    def _forget(self) -> None:
        """Nothing is known: nobody looks, or Redis was away and may be another one."""
        self._after: dict[str, str] = {}
        self._watched: dict[str, Watched] = {}
        self._states: dict[str, tuple[str, str]] = {}
        """By id the tenant, and the JSON of `states`."""
        self._unread: set[str] = set(self._of_rollout)
        """Rollouts to be read, and ids of which the state is."""
        self._changed: set[str] = set(self._of_id)
        self._batches: set[str] = set()
        self._asked_at = self._overview_at = float("-inf")

    @property
    def open(self) -> int:
        """Viewers that look."""
        return len(self._viewers)

    def enter(self, viewer: Viewer) -> None:
        """What is new from now on wakes the viewer; what there is by now is new to it."""
        its = viewer.interest
        with self._lock:
            self._viewers.add(viewer)
            for name in its.ids:
                self._of_id[name].add(viewer)
            viewer.ids = {name for name in its.ids if name in self._states}
            self._changed |= its.ids - viewer.ids
            if its.rollout is not None:
                self._of_rollout[its.rollout].add(viewer)
                if watched := self._watched.get(its.rollout):
                    viewer.news["rollout"] = watched.summary
                else:
                    self._unread.add(its.rollout)
            if "overview" in its.topics:
                self._overview_at = float("-inf")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="live", daemon=True)
                self._thread.start()

    def leave(self, viewer: Viewer) -> None:
        """It looks no more. Twice is harmless."""
        with self._lock:
            self._viewers.discard(viewer)
            its = viewer.interest
            for name in its.ids:
                _drop(self._of_id, name, viewer, self._states)
            if its.rollout is not None:
                _drop(self._of_rollout, its.rollout, viewer, self._watched)

    def take(self, viewer: Viewer) -> bytes:
        """What is new to a viewer, as server-sent events; empty: nothing."""
        with self._lock:
            parts = [b": Redis is away\n\n"] if viewer.away else []
            parts += viewer.news.values()
            fits = viewer.interest.tenant
            states = [self._states[name] for name in viewer.ids if name in self._states]
            said = ",".join(text for owner, text in states if fits in (None, owner))
            if said:
                parts.append(event("states", f"{{{said}}}"))
            viewer.away, viewer.news, viewer.ids = False, {}, set()
            if watched := self._watched.get(viewer.interest.rollout or ""):
                parts += _turns(viewer, watched)
                if watched.screen.seen != viewer.seen:
                    parts.append(watched.screen.since(*viewer.seen[:2]))
                    viewer.seen = watched.screen.seen
        return b"".join(parts)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        from services.gateway.page.overview import overview  # not at the top: it imports the gateway

        client = connect(self._gate.settings.redis_url, max_connections=1)
        tick = 0
        while True:
            try:
                with client.pubsub(ignore_subscribe_messages=True) as channel:
                    while not self._over():
                        ends = time.monotonic() + TICK_S
                        self._look(channel, slow=tick % SLOW_TICKS == 0)
                        self._overview(overview)
                        tick += 1
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
                    viewer.away = True
                    viewer.waiter.wake()
            time.sleep(AWAY_S)

    def _over(self) -> bool:
        """Whether nobody looks; then the thread is to end, for the next viewer begins another one."""
        with self._lock:
            if self._viewers:
                return False
            self._thread = None
            self._forget()
            return True

    def _look(self, channel: Any, *, slow: bool) -> None:
        with self._lock:
            topics = frozenset().union(*(viewer.interest.topics for viewer in self._viewers))
            streams = [keys.EVENTS] if self._of_rollout or self._of_id else []
            streams += [keys.BATCHES_EVENTS] if "batches" in topics else []
            wanted = {keys.live(name) for name in self._watched}
            wanted |= {keys.REPORTS_CHANNEL} if "reports" in topics else set()
        self._read(streams)
        self._read_rollouts()
        self._look_at_turns()
        there = {name if isinstance(name, str) else name.decode() for name in channel.channels}
        if new := wanted - there:
            channel.subscribe(*new)
        if old := there - wanted:
            channel.unsubscribe(*old)
        self._ask()
        if slow:
            self._read_states()
            self._tell_batches()

    def _read(self, streams: Iterable[str]) -> None:
        """Note what the streams say since the last look."""
        after = {name: self._after.get(name) or self._gate.result_stream.tail(name) for name in streams}
        self._after = after
        more = bool(after)
        while more:
            reply = self._gate.redis.xread(after, count=READ) or []
            more = any(len(entries) == READ for _, entries in reply)
            for stream, entries in reply:
                after[stream] = entries[-1][0]
                with self._lock:
                    if stream == keys.BATCHES_EVENTS:
                        self._batches |= {entry["batch"] for _, entry in entries}
                        continue
                    names = {entry["id"] for _, entry in entries}
                    self._unread |= names & self._of_rollout.keys()
                    self._changed |= names & self._of_id.keys()

    def _read_rollouts(self) -> None:
        with self._lock:
            names, self._unread = list(self._unread), set()
        for rollout in self._gate.rollouts.get_many(names, trajectory=False) if names else ():
            with self._lock:
                viewers = self._of_rollout.get(rollout.id)
                if not viewers:
                    continue
                watched = self._watched.get(rollout.id)
                if watched is None:
                    watched = self._watched[rollout.id] = Watched(rollout)
                else:
                    watched.read(rollout)
                _tell(viewers, "rollout", watched.summary)
            self._asked_at = float("-inf")

    def _look_at_turns(self) -> None:
        """Read on in the turn logs of what is in RUN, and count the calls of programs."""
        running = self._running()
        if not running:
            return
        with self._gate.redis.pipeline(transaction=False) as pipe:
            for watched in running:
                pipe.llen(watched.log)
            lengths = pipe.execute()
        now = time.monotonic()
        for watched, length in zip(running, lengths, strict=True):
            if length == watched.length or (watched.counted and now < watched.looked_at + CALLS_S):
                continue
            entries: list[Entry] = []
            if not watched.counted and length > watched.length:
                rollout, known = watched.rollout, max(0, watched.length)
                try:
                    entries = decode(turns.read(self._gate.redis, rollout.id, rollout.attempt, known))
                except ValueError:  # damaged, or a newer release wrote it: the others are shown all the same
                    watched.counted = True
            with self._lock:
                if length < watched.length or (watched.counted and watched.length >= 0):
                    watched.reset()
                watched.turns.take(entries)
                watched.length = length if watched.counted else max(0, watched.length) + len(entries)
                watched.looked_at = now
                _wake(self._of_rollout.get(watched.rollout.id, ()))

    def _running(self) -> list[Watched]:
        with self._lock:
            return [watched for watched in self._watched.values() if watched.rollout.state is State.RUNNING]

    def _ask(self) -> None:
        """Have the workers show what the watched rollouts' sandboxes print."""
        now = time.monotonic()
        if now < self._asked_at + ASK_S:
            return
        self._asked_at = now
        if running := self._running():
            with self._gate.redis.pipeline(transaction=False) as pipe:
                for watched in running:
                    pipe.set(keys.watched(watched.rollout.id), 1, ex=WATCHED_S)
                pipe.publish(keys.WATCH_CHANNEL, len(running))
                pipe.execute()

    def _read_states(self) -> None:
        with self._lock:
            names, self._changed = list(self._changed), set()
        if not names:
            return
        with self._gate.redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(keys.record(name), FIELDS)
            replies = pipe.execute()
        with self._lock:
            for name, values in zip(names, replies, strict=True):
                if name in self._of_id and (said := _state(*values[:-1])) is not None:
                    self._states[name] = values[-1], f"{json.dumps(name)}:{said}"
                    for viewer in self._of_id[name]:
                        viewer.ids.add(name)
                    _wake(self._of_id[name])

    def _tell_batches(self) -> None:
        with self._lock:
            names, self._batches = self._batches, set()
        if not names:
            return
        with self._gate.redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hget(keys.batch(name), "tenant")
            owners = pipe.execute()
        for name, owner in zip(names, owners, strict=True):
            self._tell_changed("batch", name, owner)

    def _tell_changed(self, what: str, name: str, tenant: str | None) -> None:
        topic = {"batch": "batches", "report": "reports"}[what]
        with self._lock:
            its = [
                viewer
                for viewer in self._viewers
                if topic in viewer.interest.topics and viewer.interest.tenant in (None, tenant)
            ]
            said = event("changed", json.dumps({"what": what, "id": name}))
            _tell(its, f"{what} {name}", said)

    def _overview(self, make: Callable[[Gateway, Iterable[str | None]], dict[str | None, bytes]]) -> None:
        now = time.monotonic()
        with self._lock:
            its = [viewer for viewer in self._viewers if "overview" in viewer.interest.topics]
            if not its or now < self._overview_at + OVERVIEW_S:
                return
            self._overview_at = now
        made = make(self._gate, {viewer.interest.tenant for viewer in its})
        with self._lock:
            for viewer in its:
                _tell([viewer], "overview", made[viewer.interest.tenant])

    def _hear(self, channel: str, text: str) -> None:
        if channel == keys.REPORTS_CHANNEL:
            tenant, _, name = text.partition(" ")
            self._tell_changed("report", name, tenant)
            return
        name = channel.removeprefix(keys.live(""))
        with self._lock, suppress(ValueError, TypeError, KeyError):  # of a worker of another release
            if watched := self._watched.get(name):
                watched.screen.take(json.loads(text))
                _wake(self._of_rollout[name])


def _turns(viewer: Viewer, watched: Watched) -> list[bytes]:
    """What a viewer has not got of the turns: pieces, or that they are to be read as a whole."""
    if viewer.resets is None:
        if watched.length < 0:
            return []
        # It reads what there is by itself.
        viewer.resets, viewer.turns = watched.resets, watched.turns.count
    has = viewer.resets, viewer.turns
    viewer.resets, viewer.turns = now = watched.resets, watched.turns.count
    if has == now:
        return []
    said = watched.turns.since(has[1]) if has[0] == now[0] else '"refetch":true'
    return [event("turns", f'{{"attempt":{watched.rollout.attempt},{said}}}')]


def _state(state: str | None, attempt: str, reward: str, updated: str, drop: str) -> str | None:
    """What `states` says of a rollout, as JSON; None: it is not there, or its record is damaged."""
    if state is None:
        return None
    try:
        said = {
            "state": state,
            "attempt": int(attempt),
            "reward": float(reward) if reward else None,
            "updated_at": int(updated) / 1000,
            "drop": drop == "1",
        }
        return json.dumps(said, allow_nan=False)
    except (TypeError, ValueError):
        return None


def _wake(viewers: Iterable[Viewer]) -> None:
    for viewer in viewers:
        viewer.waiter.wake()


def _tell(viewers: Iterable[Viewer], name: str, said: bytes) -> None:
    """Give them an event in the place of the last of that name, if they have not got that yet."""
    for viewer in viewers:
        viewer.news[name] = said
        viewer.waiter.wake()


def _drop(index: dict[str, set[Viewer]], name: str, viewer: Viewer, known: dict[str, Any]) -> None:
    """Take a viewer out of an index; what was known of that name goes with the last one."""
    if name in index:
        index[name].discard(viewer)
        if not index[name]:
            del index[name]
            known.pop(name, None)
