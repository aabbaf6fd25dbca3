"""What a worker says of itself and of its node, and how late its event loop is."""

from __future__ import annotations

import asyncio
import threading
import time

from sandbox.errors import SandboxError
from sandbox.host_client import HostClient
from services.state.fleet import ANNOUNCE_EVERY_S
from workers.chores.base import Chore
from workers.metrics import LAG_BUCKETS_S


class Announcer(Chore):
    """Says that the worker lives, and what it carries."""

    name = "announce"
    interval_s = ANNOUNCE_EVERY_S
    first_s = 0.0

    def begin(self) -> None:
        self._services.fleet.put_handlers(handler.info() for handler in self._services.handlers.all())

    def tick(self) -> None:
        self._services.announce()


class NodeReporter(Chore):
    """Passes on what the node's sandbox host says of itself. Asking also replaces a host that was killed.

    In a thread of its own: a host that is slow to answer must not make the worker look dead.
    """

    name = "sandboxes"
    interval_s = ANNOUNCE_EVERY_S
    first_s = 0.0

    def tick(self) -> None:
        services = self._services
        try:
            if stats := asyncio.run(HostClient(services.host.state).stats()):
                services.fleet.put_node(services.settings.node, stats)
        except SandboxError as error:
            self.log.warning("the sandbox host does not answer", error=str(error))


class LoopLag(Chore):
    """Measures how late the event loop is, where somebody reads it."""

    name = "loop-lag"
    setting = "worker_metrics_port"

    def begin(self) -> None:
        self._services.metrics.serve(self._services.settings)

    def tick(self) -> None:
        lag = self._services.metrics.loop_lag
        ran = threading.Event()
        began = time.monotonic()
        self._services.loop.call_soon_threadsafe(ran.set)
        # Also while the loop is blocked: a long block must show before it ends.
        while not ran.wait(LAG_BUCKETS_S[-1]) and not self.stopping.is_set():
            lag.observe(time.monotonic() - began)
        lag.observe(time.monotonic() - began)
