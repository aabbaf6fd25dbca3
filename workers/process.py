"""What a worker process has once: event loop, leases it holds, connections, and its side threads.

A Celery thread holds the slot of a rollout; the coroutine on the one event loop does the work. So
time limits are `asyncio.timeout`, a cancel is `task.cancel()`, and 500 waiting rollouts cost little.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
import redis
import structlog
from celery import Celery

from rollout.schema import Stage
from sandbox.errors import SandboxError
from sandbox.host_client import HostClient, SyncHostClient
from services.dispatch import Dispatcher
from services.settings import Settings
from services.state import keys
from services.state.backends import BackendStore
from services.state.fleet import ANNOUNCE_EVERY_S, FleetStore
from services.state.redis import connect
from services.state.rollouts import RolloutStore
from workers.agent.codec import preload
from workers.agent.llm import session
from workers.handlers.registry import Registry
from workers.reaper import Reaper

log = structlog.get_logger("worker")

CANCEL, LOST, OVERDUE, SHUTDOWN = "cancel", "lost", "overdue", "shutdown"
"""Why a stage is interrupted from outside."""


@dataclass
class Held:
    """A rollout this process works on."""

    rollout_id: str
    stage: Stage
    fence: int | None = None
    """None while the claim is under way."""
    task: asyncio.Task[Any] | None = None
    reason: str | None = None
    """Set once it is to be interrupted."""


class WorkerProcess:
    """Created when the worker is ready; `stop` ends its threads and hands rollouts back."""

    def __init__(self, app: Celery, settings: Settings, name: str, stages: list[str]) -> None:
        self.settings = settings
        self.name = name
        self.stages = stages
        self.redis: redis.Redis = connect(settings.redis_url)
        self.store = RolloutStore(self.redis, settings)
        self.backends = BackendStore(self.redis)
        self.fleet = FleetStore(self.redis)
        self.dispatcher = Dispatcher(app, self.store)
        self.handlers = Registry(settings)
        self.host = HostClient()
        self.reaper = Reaper(self.redis, self.store, self.dispatcher, settings, owner=f"{name}/{os.getpid()}")
        self.stopping = threading.Event()
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()
        self._http: aiohttp.ClientSession | None = None
        self.loop = asyncio.new_event_loop()
        self._threads = [
            threading.Thread(target=self._run_loop, name="loop", daemon=True),
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
            threading.Thread(target=self._announce, name="announce", daemon=True),
            threading.Thread(target=self._listen, name="cancel", daemon=True),
            threading.Thread(target=self.reaper.run, args=(self.stopping,), name="reaper", daemon=True),
        ]

    # -- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Announce the handlers and start the side threads."""
        self.fleet.put_handlers(handler.info() for handler in self.handlers.all())
        for thread in self._threads:
            thread.start()
        if Stage.RUN in self.stages:
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
        while self._held and time.monotonic() < deadline:
            time.sleep(0.05)
        for held in list(self._held.values()):
            self.interrupt(held, SHUTDOWN)
        # Their threads still write the hand-back; leases must be kept alive until they have.
        deadline = time.monotonic() + self.settings.lease_s
        while self._held and time.monotonic() < deadline:
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

    def hold(self, rollout_id: str, stage: Stage) -> Held | None:
        """Enter a rollout before it is claimed, so that a cancel in between is not missed.

        None: this process works on it already (a message was sent twice).
        """
        with self._lock:
            if rollout_id in self._held:
                return None
            held = self._held[rollout_id] = Held(rollout_id, stage)
            return held

    def let_go(self, held: Held) -> None:
        with self._lock:
            self._held.pop(held.rollout_id, None)

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
                self.loop.call_soon_threadsafe(held.task.cancel)

    # -- side threads ------------------------------------------------------------------------

    def _beat(self) -> None:
        """Extend the leases of everything in hand, a third of the lease apart."""
        while not self.stopping.wait(self.settings.lease_s / 3):
            held = [one for one in list(self._held.values()) if one.fence is not None]
            if not held:
                continue
            try:
                words = self.store.heartbeat((one.rollout_id, one.fence) for one in held)
            except redis.RedisError as error:
                log.warning("heartbeat failed", error=str(error), held=len(held))
                continue
            for one, word in zip(held, words, strict=True):
                if word != "ok":
                    self.interrupt(one, word)

    def _announce(self) -> None:
        while True:
            try:
                self.fleet.announce(self.name, self.stages)
                self._pass_on_sandboxes()
            except redis.RedisError as error:
                log.warning("announcement failed", error=str(error))
            if self.stopping.wait(ANNOUNCE_EVERY_S):
                return

    def _pass_on_sandboxes(self) -> None:
        """What the node's sandbox host says of itself. Asking also replaces a host that was killed."""
        try:
            if sandboxes := SyncHostClient(self.host.state).stats():
                self.fleet.put_node(self.settings.node, sandboxes)
        except SandboxError as error:
            log.warning("the sandbox host does not answer", error=str(error))

    def _listen(self) -> None:
        """Cancel at once what a cancel message names; the heartbeat finds what this misses."""
        while not self.stopping.is_set():
            try:
                with self.redis.pubsub(ignore_subscribe_messages=True) as channel:
                    channel.subscribe(keys.CANCEL_CHANNEL)
                    while not self.stopping.is_set():
                        message = channel.get_message(timeout=1.0)
                        if message and (held := self._held.get(message["data"])):
                            self.interrupt(held, CANCEL)
            except redis.RedisError as error:
                log.warning("cancel channel lost", error=str(error))
                self.stopping.wait(1.0)


_process: WorkerProcess | None = None


def start(app: Celery, settings: Settings, name: str, stages: list[str]) -> WorkerProcess:
    """Make the process object of this worker."""
    global _process
    _process = WorkerProcess(app, settings, name, stages)
    _process.start()
    return _process


def current() -> WorkerProcess:
    """The process object.

    Raises:
        RuntimeError: Not inside a worker that is ready.
    """
    if _process is None:
        raise RuntimeError("no worker process: stages run inside `celery -A workers.app worker -P threads`")
    return _process
