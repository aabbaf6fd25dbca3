"""What a worker does beside its stages: each a `Chore`, in a thread of its own until the worker stops."""

from __future__ import annotations

import threading
from typing import ClassVar

import redis
import structlog
from kombu.exceptions import OperationalError

from rollout.schema import Stage
from services.state.election import LOCK_S, Election
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
    lock: ClassVar[str | None] = None
    """Redis key of the lock whose holder, one worker of the fleet, ticks; None = every worker does."""
    election: Election | None = None
    stage: ClassVar[Stage | None] = None
    """The fleet whose workers do it; None = each does."""
    setting: ClassVar[str | None] = None
    """The setting without which none does it."""

    def __init__(self, services: WorkerServices) -> None:
        """
        Raises:
            SettingsError: The settings contradict themselves.
            OSError: Something that they name cannot be used.
        """
        self.log = structlog.get_logger(self.name)
        self.stopping = threading.Event()
        """Set once the worker stops."""
        self._services = services
        self._bell = threading.Event()
        if self.lock is not None:
            self.election = self.elect(self.lock)

    def elect(self, key: str, lock_s: float = LOCK_S) -> Election:
        """This worker's part in an election, by a lock that its holder loses after `lock_s` of silence."""
        return Election(self._services.redis, key, self._services.owner, self.interval_s, lock_s)

    @classmethod
    def is_for(cls, services: WorkerServices) -> bool:
        """Whether a worker of these services does it.

        Raises:
            SettingsError: The settings contradict themselves.
        """
        wanted = cls.setting is None or bool(getattr(services.settings, cls.setting))
        return wanted and (cls.stage is None or services.serves(cls.stage))

    def tick(self) -> float | None:
        """Do what is due; answers the seconds to the next turn, None = `interval_s`."""
        raise NotImplementedError

    # -- what some override ------------------------------------------------------------------

    def begin(self) -> None:
        """The worker is about to start, and no chore has; what this raises keeps it from that."""

    def look(self) -> None:
        """What every worker does in a turn before one of them is elected."""

    def stand_by(self) -> None:
        """Another worker is elected."""

    def redis_was_away(self) -> None:
        """A turn was broken off because Redis did not answer."""

    def close(self) -> None:
        """The worker stops: let go of what is held."""

    # -- the loop ----------------------------------------------------------------------------

    def start(self) -> None:
        """Take turns in a thread, until `stop`."""
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
        except OSError as error:
            self.log.warning(f"{self.name}: a turn broke off", error=str(error))
        except Exception:
            self.log.exception(f"{self.name}: a turn broke off")
        CHORE_FAILURES.labels(self.name).inc()
        return self.interval_s if self.retry_s is None else self.retry_s
