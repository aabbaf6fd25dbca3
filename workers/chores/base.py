"""What a worker does beside its stages: each a `Chore`, in a thread of its own until the worker stops."""

from __future__ import annotations

import threading
from typing import ClassVar, Self

import redis
import structlog
from kombu.exceptions import OperationalError

from services.state.election import Election
from workers.metrics import CHORE_FAILURES
from workers.services import WorkerServices


class Chore:
    """Something that is done again and again; whatever breaks off one turn is logged and ends nothing."""

    name: ClassVar[str]
    """Names its thread, and its lines in the log."""
    interval_s: float = 1.0
    """Seconds between two turns."""
    first_s: float | None = None
    """Seconds before the first turn; None = `interval_s`."""
    retry_s: float | None = None
    """Seconds after a turn that was broken off; None = `interval_s`."""
    channel: ClassVar[str | None] = None
    """Redis channel; whatever is published there rings."""
    election: Election | None = None
    """Where there is one, only the elected worker of the fleet ticks."""

    def __init__(self) -> None:
        self.log = structlog.get_logger(self.name)
        self.stopping = threading.Event()
        """Set once the worker stops."""
        self._bell = threading.Event()

    @classmethod
    def of(cls, services: WorkerServices) -> Self | None:
        """The chore as a worker of these services does it; None: this worker does not.

        Raises:
            SettingsError: The settings contradict themselves.
            OSError: Something that the settings name cannot be used.
        """
        raise NotImplementedError

    def tick(self) -> float | None:
        """Do what is due; answers the seconds to the next turn, None = `interval_s`."""
        raise NotImplementedError

    # -- what some override ------------------------------------------------------------------

    def begin(self, services: WorkerServices) -> None:
        """The worker starts; what this raises keeps it from that."""

    def look(self) -> None:
        """What every worker does in a turn before one of them is elected."""

    def stand_by(self) -> None:
        """Another worker is elected."""

    def redis_was_away(self) -> None:
        """A turn was broken off because Redis did not answer."""

    def close(self) -> None:
        """The worker stops: let go of what is held."""

    # -- the loop ----------------------------------------------------------------------------

    def start(self, services: WorkerServices) -> None:
        """Take turns in a thread, until `stop`."""
        self.begin(services)
        threading.Thread(target=self.run, name=self.name, daemon=True).start()

    def ring(self) -> None:
        """Have the next turn begin now."""
        self._bell.set()

    def stop(self) -> None:
        """End `run` after the turn under way."""
        self.stopping.set()
        self.ring()

    def run(self) -> None:
        """Take turns until the worker stops."""
        pause_s = self.interval_s if self.first_s is None else self.first_s
        while True:
            self._bell.wait(pause_s)
            self._bell.clear()
            if self.stopping.is_set():
                break
            pause_s = self.turn()
        self.close()

    def turn(self) -> float:
        """Do what is due, if this worker is elected; answers the seconds to the next turn."""
        try:
            self.look()
            pause_s = None
            if self.election is None or self.election.won():
                pause_s = self.tick()
            else:
                self.stand_by()
            return self.interval_s if pause_s is None else pause_s
        except (redis.RedisError, OperationalError) as error:
            self.redis_was_away()
            self.log.warning(f"{self.name}: Redis does not answer", error=str(error))
        except Exception:
            self.log.exception(f"{self.name}: a turn broke off")
        CHORE_FAILURES.labels(self.name).inc()
        return self.interval_s if self.retry_s is None else self.retry_s
