"""Takes up weight updates: in every RUN worker; whoever is rung for carries one out."""

from __future__ import annotations

import threading

import redis

from rollout.schema import Stage
from services.state.policy.store import LeaseLost, Work
from workers.chores.base import CHORE_FAILURES, Chore

BELL_S = 1.0
"""Longest sleep between two looks for an update whose worker died. A new one rings, and is seen at once."""


class Updater(Chore):
    """These workers, and perhaps no others, reach the backends."""

    name = "updates"
    stage = Stage.RUN
    interval_s = 0.0
    retry_s = 1.0

    def tick(self) -> None:
        """Begin to carry out an update, or wait for one. Those of several policies run at once."""
        work = self._services.weights.claim()
        if work is None:
            self._services.policy.await_bell(BELL_S)
            return
        threading.Thread(target=self._carry_out, args=(work,), name="update", daemon=True).start()

    def _carry_out(self, work: Work) -> None:
        try:
            self._services.weights.carry_out(work)
        except LeaseLost as error:
            self.log.warning("update given up", error=str(error))
        except redis.RedisError as error:
            CHORE_FAILURES.labels(self.name).inc()
            self.log.warning("update broken off: Redis does not answer", error=str(error))
        except Exception:
            CHORE_FAILURES.labels(self.name).inc()
            self.log.exception("update broken off")
