"""Takes up weight updates: in every RUN worker; whoever is rung for carries one out."""

from __future__ import annotations

from rollout.schema import Stage
from services.state.policy.store import LeaseLost
from workers.chores.base import Chore
from workers.services import WorkerServices

BELL_S = 1.0
"""Longest sleep between two looks for an update whose worker died. A new one rings, and is seen at once."""


class Updater(Chore):
    """These workers, and perhaps no others, reach the backends."""

    name = "updates"
    interval_s = 0.0
    retry_s = 1.0

    @classmethod
    def is_for(cls, services: WorkerServices) -> bool:
        return services.serves(Stage.RUN)

    def tick(self) -> None:
        """Carry out an update, or wait for one."""
        work = self._services.weights.claim()
        if work is None:
            self._services.policy.await_bell(BELL_S)
            return
        try:
            self._services.weights.carry_out(work)
        except LeaseLost as error:
            self.log.warning("update given up", error=str(error))
