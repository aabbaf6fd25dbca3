"""What a worker says of itself and of its node."""

from __future__ import annotations

from sandbox.errors import SandboxError
from sandbox.host_client import SyncHostClient
from services.state.fleet import ANNOUNCE_EVERY_S
from workers.chores.base import Chore
from workers.services import WorkerServices


class Announcer(Chore):
    """Says that the worker lives, and what it carries."""

    name = "announce"
    interval_s = ANNOUNCE_EVERY_S
    first_s = 0.0

    def __init__(self, services: WorkerServices) -> None:
        super().__init__()
        self._services = services

    @classmethod
    def of(cls, services: WorkerServices) -> Announcer:
        return cls(services)

    def begin(self, services: WorkerServices) -> None:
        services.fleet.put_handlers(handler.info() for handler in services.handlers.all())

    def tick(self) -> None:
        self._services.announce()


class NodeReporter(Announcer):
    """Passes on what the node's sandbox host says of itself. Asking also replaces a host that was killed.

    In a thread of its own: a host that is slow to answer must not make the worker look dead.
    """

    name = "sandboxes"

    def begin(self, services: WorkerServices) -> None:
        """Nothing: handlers are announced once."""

    def tick(self) -> None:
        services = self._services
        try:
            if stats := SyncHostClient(services.host.state).stats():
                services.fleet.put_node(services.settings.node, stats)
        except SandboxError as error:
            self.log.warning("the sandbox host does not answer", error=str(error))
