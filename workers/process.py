"""What a worker process has once: event loop, leases it holds, connections, and its side threads.

A Celery thread holds the slot of a rollout; the coroutine on the one event loop does the work. So
time limits are `asyncio.timeout`, a cancel is `task.cancel()`, and 500 waiting rollouts cost little.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import redis
import structlog
from celery import Celery

from rollout.schema import Stage
from sandbox.errors import SandboxError
from sandbox.host_client import HostClient, SyncHostClient
from services import logs
from services.dispatch import Dispatcher
from services.settings import Settings, SettingsError
from services.state import keys
from services.state.backends import BackendStore, PlacementPolicy
from services.state.batches import BatchStore
from services.state.fleet import ANNOUNCE_EVERY_S, FleetStore
from services.state.policy import PolicyStore
from services.state.redis import connect
from services.state.rollouts import Claim, RolloutStore
from services.state.startup import prepare
from services.state.tenants import TenantStore
from workers import renewal
from workers.admission import Admission
from workers.agent.codec import preload
from workers.agent.llm import session
from workers.agent.placement import Placements, PromptSizes
from workers.archive import Archiver
from workers.batches import Batcher
from workers.handlers.registry import Registry
from workers.keeper import Keeper
from workers.metrics import WorkerMetrics
from workers.reaper import Reaper
from workers.updates import LEASE_S, Updater
from workers.webhooks import Deliverer, webhook_secrets

log = structlog.get_logger("worker")

START_PATIENCE_S = 60.0
"""For Redis to answer when a worker starts; then it ends, and who started it hears of it."""
OVERDUE_SLACK_S = 2.0
"""Between our clock and Redis'."""
BEAT_AGAIN_S = 0.5
"""After a heartbeat that Redis did not answer: leases are extended before any reaper judges them."""
CANCEL, LOST, OVERDUE, SHUTDOWN = "cancel", "lost", "overdue", "shutdown"
"""Why a stage is interrupted from outside."""


@dataclass(eq=False)
class Held:
    """A rollout this process works on."""

    rollout_id: str
    stage: Stage
    fence: int = 0
    ends_at: float = float("-inf")
    """Monotonic time of its deadline."""
    task: asyncio.Task[Any] | None = None
    reason: str | None = None
    """Set once it is to be interrupted."""
    decided: bool = False
    """Whether its outcome is known: what is left is to clean up, and nothing may throw the outcome away."""


class WorkerProcess:
    """Created when the worker is ready; `stop` ends its threads and hands rollouts back."""

    def __init__(self, app: Celery, settings: Settings, name: str, stages: list[str], slots: int) -> None:
        """
        Args:
            name: The worker's, as Celery knows it.
            slots: How many rollouts it carries at once.
        """
        self.settings = settings
        self.name = name
        self.stages = stages
        self.slots = slots
        """Rollouts it carries at once now; `set_slots` changes it."""
        self.most_slots = slots
        self.redis: redis.Redis = connect(settings.redis_url)
        self.store = RolloutStore(self.redis, settings)
        self.tenants = TenantStore(self.redis)
        self.backends = BackendStore(self.redis, PlacementPolicy(weigh=settings.backend_load))
        self.placements = Placements(self.backends)
        self.prompts = PromptSizes()
        self.fleet = FleetStore(self.redis)
        self.dispatcher = Dispatcher(app, self.store)
        self.handlers = Registry(settings)
        self.host = HostClient()
        owner = f"{name}/{os.getpid()}"
        self.reaper = Reaper(self.redis, self.store, self.dispatcher, settings, owner=owner)
        self.stopping = threading.Event()
        self._held: dict[tuple[str, int], Held] = {}
        self._claims: list[set[str]] = []
        self._hands_back = False
        self.consumer: Any = None
        """Celery's, once it is ready; its events reach monitors in order."""
        self.metrics = WorkerMetrics(lambda: self._held.values())
        self._lock = threading.Lock()
        self._http: aiohttp.ClientSession | None = None
        self.loop = asyncio.new_event_loop()
        policy = PolicyStore(self.redis)
        self.batcher = Batcher(
            BatchStore(self.redis, settings), self.store, TenantStore(self.redis), policy, self.dispatcher
        )
        self._threads = [
            threading.Thread(target=self._run_loop, name="loop", daemon=True),
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
            threading.Thread(target=self._announce, name="announce", daemon=True),
            threading.Thread(target=self._pass_on_sandboxes, name="sandboxes", daemon=True),
            threading.Thread(target=self._listen, name="cancel", daemon=True),
            threading.Thread(target=self.reaper.run, args=(self.stopping,), name="reaper", daemon=True),
            threading.Thread(
                target=renewal.watch,
                args=(settings.worker_max_memory_mb, self.stopping),
                name="memory",
                daemon=True,
            ),
            threading.Thread(target=self.batcher.run, args=(self.stopping,), name="batches", daemon=True),
        ]
        if webhook_secrets(settings):
            webhooks = Deliverer(self.redis, self.store, settings, owner)
            self._threads.append(
                threading.Thread(target=webhooks.run, args=(self.stopping,), name="webhooks", daemon=True)
            )
        elif settings.webhook_url:
            raise SettingsError("ROLLOUT_WEBHOOK_URL is set, but no ROLLOUT_WEBHOOK_SECRET to sign with")
        if settings.archive_dir:
            archiver = Archiver(self.redis, self.store, settings, owner)
            self._threads.append(
                threading.Thread(target=archiver.run, args=(self.stopping,), name="archive", daemon=True)
            )
        self.admission = Admission(app, self.store, self.fleet, settings, name, self.host.state)
        """Kept up to date where INIT is served from the start."""
        if Stage.INIT in stages:
            self._threads.append(
                threading.Thread(
                    target=self.admission.run, args=(self.stopping,), name="admission", daemon=True
                )
            )
        if Stage.RUN in stages:
            # These workers, and perhaps no others, reach the backends.
            updater = Updater(policy, self.backends, owner, lease_s=min(LEASE_S, settings.lease_s))
            keeper = Keeper(self.redis, self.backends, settings, owner, updater.catch_up)
            self._threads += [
                threading.Thread(target=one.run, args=(self.stopping,), name=name, daemon=True)
                for one, name in ((updater, "updates"), (keeper, "keeper"))
            ]

    # -- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Announce the handlers and start the side threads."""
        self.fleet.put_handlers(handler.info() for handler in self.handlers.all())
        self.fleet.put_filters(self.batcher.filters.names())
        for thread in self._threads:
            thread.start()
        self.metrics.serve(self.settings, self.loop, self.stopping)
        if Stage.RUN in self.stages and self.settings.preload_tokenizers:
            threading.Thread(target=preload, name="preload", daemon=True).start()
        log.info("worker ready", worker=self.name, stages=self.stages, node=self.settings.node)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def stop(self) -> None:
        """Wait for the rollouts in hand, then hand the rest back; called once, when Celery warms down."""
        if self.stopping.is_set():
            return
        deadline = time.monotonic() + self.settings.shutdown_grace_s
        while self._busy() and time.monotonic() < deadline:
            time.sleep(0.05)
        with self._lock:
            self._hands_back = True
            in_hand = list(self._held.values())
        for held in in_hand:
            self.interrupt(held, SHUTDOWN)
        # Their threads still write the hand-back; leases must be kept alive until they have.
        deadline = time.monotonic() + self.settings.lease_s
        while self._busy() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.stopping.set()
        try:
            self.fleet.leave(self.name)
        except redis.RedisError as error:
            log.warning("could not take the worker off the list", error=str(error))
        if self._http is not None:
            asyncio.run_coroutine_threadsafe(self._http.close(), self.loop).result(5)

    def http(self) -> aiohttp.ClientSession:
        """The HTTP session to the engines; call it on the event loop."""
        if self._http is None:
            self._http = session()
        return self._http

    # -- rollouts in hand --------------------------------------------------------------------

    def _busy(self) -> bool:
        return bool(self._held or self._claims)

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
                self._claims = [one for one in self._claims if one is not cancelled]

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
        with self._lock:
            self._held.pop((held.rollout_id, held.fence), None)

    def run(self, held: Held, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop and wait for it; `interrupt` cancels it."""

        async def supervised() -> Any:
            held.task = asyncio.current_task()
            if held.reason is not None:
                work.close()
                raise asyncio.CancelledError
            return await work

        return asyncio.run_coroutine_threadsafe(supervised(), self.loop).result()

    def interrupt(self, held: Held, reason: str) -> None:
        """Cancel the work on a rollout; the first reason counts."""
        if held.reason is None:
            held.reason = reason
            if held.task is not None:
                self.loop.call_soon_threadsafe(lambda: None if held.decided else held.task.cancel())

    # -- side threads ------------------------------------------------------------------------

    def _beat(self) -> None:
        """Extend the leases of everything in hand, a third of the lease apart; at once when Redis is back."""
        pause = every = self.settings.lease_s / 3
        while not self.stopping.wait(pause):
            pause = every
            held = list(self._held.values())
            if not held:
                continue
            try:
                words = self.store.heartbeat((one.rollout_id, one.fence) for one in held)
            except redis.RedisError as error:
                pause = min(BEAT_AGAIN_S, every)
                self.metrics.heartbeats_failed.inc()
                log.warning("heartbeat failed", error=str(error), held=len(held))
                continue
            for one, word in zip(held, words, strict=True):
                if word == OVERDUE and time.monotonic() < one.ends_at - OVERDUE_SLACK_S:
                    continue  # Redis' clock has jumped, and the reaper has yet to move the deadline
                if word != "ok":
                    self.interrupt(one, word)

    def announce(self) -> None:
        """Say that the worker lives, and what it carries.

        Raises:
            redis.RedisError: Redis is away.
        """
        self.fleet.announce(
            self.name,
            self.stages,
            self.settings.node,
            self.slots,
            most_slots=self.most_slots,
            held=len(self._held),
        )

    def _announce(self) -> None:
        while True:
            try:
                self.announce()
            except redis.RedisError as error:
                log.warning("announcement failed", error=str(error))
            if self.stopping.wait(ANNOUNCE_EVERY_S):
                return

    def _pass_on_sandboxes(self) -> None:
        """What the node's sandbox host says of itself. Asking also replaces a host that was killed.

        In a thread of its own: a host that is slow to answer must not make the worker look dead.
        """
        while True:
            try:
                if sandboxes := SyncHostClient(self.host.state).stats():
                    self.fleet.put_node(self.settings.node, sandboxes)
            except SandboxError as error:
                log.warning("the sandbox host does not answer", error=str(error))
            except redis.RedisError as error:
                log.warning("what the sandbox host says is not passed on", error=str(error))
            if self.stopping.wait(ANNOUNCE_EVERY_S):
                return

    def _listen(self) -> None:
        """Hear at once of cancels, of room on the backends and of their failures.

        A message may be lost: the heartbeat, those who wait, and the call's own limit find what this misses.
        """
        while not self.stopping.is_set():
            try:
                with self.redis.pubsub(ignore_subscribe_messages=True) as channel:
                    channel.subscribe(
                        keys.CANCEL_CHANNEL,
                        keys.BACKEND_ROOM_CHANNEL,
                        keys.BACKEND_DOWN_CHANNEL,
                        keys.BATCHES_BELL,
                    )
                    while not self.stopping.is_set():
                        if message := channel.get_message(timeout=1.0):
                            self._heard(message["channel"], message["data"])
            except redis.RedisError as error:
                log.warning("channels lost", error=str(error))
                self.stopping.wait(1.0)

    def _heard(self, channel: str, what: str) -> None:
        if channel == keys.BACKEND_ROOM_CHANNEL:
            self.loop.call_soon_threadsafe(self.placements.wake)
        elif channel == keys.BATCHES_BELL:
            self.batcher.ring()
        elif channel == keys.BACKEND_DOWN_CHANNEL:
            self.loop.call_soon_threadsafe(self.placements.down, what)
        else:
            ids = set(what.split())
            with self._lock:
                for cancelled in self._claims:
                    cancelled.update(ids)
                found = [held for held in self._held.values() if held.rollout_id in ids]
            for held in found:
                self.interrupt(held, CANCEL)


_process: WorkerProcess | None = None


def start(app: Celery, settings: Settings, name: str, stages: list[str], slots: int) -> WorkerProcess:
    """Make the process object of this worker, which carries `slots` rollouts at once.

    Raises:
        UnfitRedis, SchemaError: It must not work on this Redis; the message says why.
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
