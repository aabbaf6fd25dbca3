"""What a worker process has once: an event loop, the rollouts in hand with their leases, and its chores.

A Celery thread holds the slot of a rollout; the coroutine on the one event loop does the work. So
time limits are `asyncio.timeout`, a cancel is `task.cancel()`, and 500 waiting rollouts cost little.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import redis
import structlog
from celery import Celery

from rollout.schema import Stage
from services import logs
from services.settings import Settings
from services.state import keys
from services.state.redis import connect
from services.state.rollouts.store import Claim
from services.state.startup import prepare
from workers.agent.codec import preload
from workers.chores import CHORES, Admission, Chore
from workers.held import CANCEL, OVERDUE, SHUTDOWN, Held
from workers.services import WorkerServices

log = structlog.get_logger("worker")

START_PATIENCE_S = 60.0
"""How long Redis may take to answer when a worker starts; then it ends, and who started it hears of it."""
OVERDUE_SLACK_S = 2.0
"""The slack between our clock and Redis'."""
LEAVE_LOOK_S = 0.5
"""Between two looks of a stopping worker for one that goes on with its rollouts."""
LEAVE_BEFORE_S = 5.0
"""So long before the end of the grace RUN leaves a stopping worker at its next turn, whoever comes for it."""
CLOSE_S = 2.0
"""How long a stopping worker takes to let go of its connections."""
BEAT_AGAIN_S = 0.5
"""The pause after a heartbeat without an answer: leases are extended before any reaper judges them."""
FREED_S = 0.005
"""From the end of a task's function until Celery counts its slot as free, if it is not starved."""


class WorkerProcess:
    """Created when the worker is ready; `stop` ends its threads and hands rollouts back."""

    def __init__(self, app: Celery, settings: Settings, name: str, stages: list[Stage], slots: int) -> None:
        """See `WorkerServices`."""
        self.services = WorkerServices(app, settings, name, stages, slots)
        self.settings = settings
        self.store = self.services.store
        self.loop = self.services.loop
        self.grace_s = settings.shutdown_grace_s
        """For rollouts once it stops; whoever has little time himself makes it less, also meanwhile."""
        self.stopping = threading.Event()
        self.consumer: Any = None
        """Celery's, once it is ready; its events reach monitors in order."""
        self.chores: list[Chore] = [kind(self.services) for kind in CHORES if kind.is_for(self.services)]
        admissions = (chore for chore in self.chores if isinstance(chore, Admission))
        # A worker may be told to serve INIT later on; it takes rollouts then as one whose node has room.
        self.admission = next(admissions, None) or Admission(self.services)
        self._held = self.services.held
        self._claims: list[set[str]] = []
        self._hands_back = False
        self.tasks = 0
        """Of Celery's, each in a slot."""
        self._turns_at = 0.0
        """When Celery's loop turns because we asked it to."""
        self._lock = threading.Lock()

    # -- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the chores and the other side threads."""
        for chore in self.chores:
            chore.begin()
        for target in (self.loop.run_forever, self._beat, self._listen):
            threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True).start()
        for chore in self.chores:
            chore.start()
        if self.services.serves(Stage.RUN) and self.settings.preload_tokenizers:
            threading.Thread(target=preload, name="preload", daemon=True).start()
        stages = [stage.value for stage in self.services.stages]
        log.info("worker ready", worker=self.services.name, stages=stages, node=self.settings.node)

    def stop(self) -> None:
        """Wait for the rollouts in hand, then hand the rest over; called once, when Celery warms down.

        RUN leaves at its next turn where another worker of the node can go on with it, else shortly before
        the grace is over: so no model call is cut off.
        """
        if self.stopping.is_set():
            return
        self.services.slots = 0  # in what it announces: others need not count on this one
        with suppress(redis.RedisError):
            self.services.announce()
        begun = time.monotonic()
        while not self._wait_until_idle(min(LEAVE_LOOK_S, begun + self.grace_s - time.monotonic())):
            rest_s = begun + self.grace_s - time.monotonic()
            if rest_s <= 0:
                break
            if rest_s < min(LEAVE_BEFORE_S, self.grace_s / 2) or self._has_successor():
                for held in list(self._held.values()):
                    held.leaving = True
        with self._lock:
            self._hands_back = True
            in_hand = list(self._held.values())
        for held in in_hand:
            held.interrupt(SHUTDOWN)
        # Their threads still write the hand-back; leases must be kept alive until they have.
        self._wait_until_idle(self.settings.lease_s)
        self.stopping.set()
        for held in list(self._held.values()):
            if held.decided:  # it waits for Redis, on the loop
                self.loop.call_soon_threadsafe(held.task.cancel)
        for chore in self.chores:
            chore.stop()
        try:
            self.services.fleet.leave(self.services.name)
        except redis.RedisError as error:
            log.warning("could not take the worker off the list", error=str(error))
        if self.loop.is_running():
            with suppress(TimeoutError):  # a handler blocks the loop
                asyncio.run_coroutine_threadsafe(self.services.close(), self.loop).result(CLOSE_S)

    def _has_successor(self) -> bool:
        """Whether another worker takes RUN of this node."""
        with suppress(redis.RedisError):
            node = self.settings.node
            return any(
                worker.node == node and worker.slots and Stage.RUN in worker.stages
                for worker in self.services.fleet.workers()
            )
        return False

    def _wait_until_idle(self, seconds: float) -> bool:
        """Whether nothing is in hand, at the latest after so long."""
        deadline = time.monotonic() + seconds
        while (self._held or self._claims) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not (self._held or self._claims)

    # -- rollouts in hand --------------------------------------------------------------------

    @contextmanager
    def claiming(self) -> Iterator[set[str]]:
        """Around a claim, and the `hold` of what it took: the ids of which a cancel is heard meanwhile.

        Which rollout a claim of INIT takes is known only afterwards, and its cancel may come before.
        """
        cancelled: set[str] = set()
        with self._lock:
            self._claims.append(cancelled)
        try:
            yield cancelled
        finally:
            with self._lock:
                self._claims = [ids for ids in self._claims if ids is not cancelled]

    def hold(self, claim: Claim, cancelled: set[str]) -> Held:
        """Enter what was claimed. Work under an old fence, which has yet to hear of it, may be here too."""
        ends_at = time.monotonic() + claim.deadline_in_s
        held = Held(claim.rollout_id, claim.stage, claim.fence, ends_at)
        with self._lock:
            self._held[claim.rollout_id, claim.fence] = held
            if claim.rollout_id in cancelled:
                held.reason = CANCEL
            elif self._hands_back:
                held.reason = SHUTDOWN
        return held

    def let_go(self, held: Held) -> None:
        """Take out what has its outcome."""
        with self._lock:
            self._held.pop((held.rollout_id, held.fence), None)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Around all that a task does: at its end Celery asks for the next message soon, if no slot was free.

        A worker whose slots are all taken asks for none, and notices a free one only when its loop turns:
        with nothing else to do, for the events that it sends every 0.1 s.
        """
        with self._lock:
            self.tasks += 1
        try:
            yield
        finally:
            with self._lock:
                was_full = self.tasks >= self.services.slots
                self.tasks -= 1
            hub = getattr(self.consumer, "hub", None)
            if was_full and hub is not None:
                hub.call_soon(self._turn_soon, hub)

    def _turn_soon(self, hub: Any) -> None:
        """In Celery's loop. One turn serves all tasks that end before it."""
        now = time.monotonic()
        if now >= self._turns_at:
            self._turns_at = now + FREED_S
            # To do nothing: before the loop waits again it asks for messages if slots are free.
            hub.call_later(FREED_S, lambda: None)

    # -- leases and cancels ------------------------------------------------------------------

    def _beat(self) -> None:
        """Extend the leases of everything in hand, a third of the lease apart; at once when Redis is back."""
        pause = every = self.settings.lease_s / 3
        while not self.stopping.wait(pause):
            pause = every
            in_hand = list(self._held.values())
            if not in_hand:
                continue
            try:
                words = self.store.heartbeat((held.rollout_id, held.fence) for held in in_hand)
            except redis.RedisError as error:
                pause = min(BEAT_AGAIN_S, every)
                self.services.metrics.heartbeats_failed.inc()
                log.warning("heartbeat failed", error=str(error), held=len(in_hand))
                continue
            for held, word in zip(in_hand, words, strict=True):
                if word == OVERDUE and time.monotonic() < held.ends_at - OVERDUE_SLACK_S:
                    continue  # Redis' clock has jumped, and the reaper has yet to move the deadline
                if word != "ok":
                    held.interrupt(word)

    def _listen(self) -> None:
        """Hear at once of cancels, of room on the backends and of their failures.

        A message may be lost: the heartbeat, those who wait, and the call's own limit find what this misses.
        """
        placements, soon = self.services.placements, self.loop.call_soon_threadsafe
        bells = {chore.channel: lambda _, chore=chore: chore.ring() for chore in self.chores if chore.channel}
        hear = bells | {
            keys.CANCEL_CHANNEL: self._cancel,
            keys.BACKEND_ROOM_CHANNEL: partial(soon, placements.wake),
            keys.room_of(placements.process): partial(soon, placements.wake),
            keys.BACKEND_DOWN_CHANNEL: partial(soon, placements.down),
        }
        while not self.stopping.is_set():
            try:
                with self.services.redis.pubsub(ignore_subscribe_messages=True) as channel:
                    channel.subscribe(*hear)
                    while not self.stopping.is_set():
                        if message := channel.get_message(timeout=1.0):
                            hear[message["channel"]](message["data"])
            except redis.RedisError as error:
                log.warning("channels lost", error=str(error))
                self.stopping.wait(1.0)

    def _cancel(self, text: str) -> None:
        ids = set(text.split())
        with self._lock:
            for cancelled in self._claims:
                cancelled.update(ids)
            in_hand = [held for held in self._held.values() if held.rollout_id in ids]
        for held in in_hand:
            held.interrupt(CANCEL)


_process: WorkerProcess | None = None


def start(app: Celery, settings: Settings, name: str, stages: list[Stage], slots: int) -> WorkerProcess:
    """Make the process object of this worker, which carries `slots` rollouts at once.

    Raises:
        UnfitRedis: It must not work on this Redis; the message says why.
        redis.RedisError: Redis has not answered for a minute.
    """
    global _process
    logs.identify(worker=name, node=settings.node)
    _check_redis(settings)
    _process = WorkerProcess(app, settings, name, stages, slots)
    _process.start()
    return _process


def _check_redis(settings: Settings) -> None:
    """Celery has just reached it, but it may be in the middle of a failover."""
    deadline = time.monotonic() + START_PATIENCE_S
    while True:
        try:
            with connect(settings.redis_url, max_connections=1) as client:
                return prepare(client, settings)
        except redis.RedisError as error:
            if time.monotonic() > deadline:
                raise
            log.warning("Redis does not answer; the worker waits for it", error=str(error))
            time.sleep(1.0)


def current() -> WorkerProcess:
    """The process object.

    Raises:
        RuntimeError: Not inside a worker that is ready.
    """
    if _process is None:
        raise RuntimeError("no worker process: stages run inside `celery -A workers.app worker -P threads`")
    return _process
