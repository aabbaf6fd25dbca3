"""Takes up weight updates: in every RUN worker; whoever is rung for carries one out."""

from __future__ import annotations

from rollout.schema import Stage
from services.state.policy import LeaseLost, PolicyStore
from workers.chores.base import Chore
from workers.services import WorkerServices
from workers.weights import WeightUpdates

BELL_S = 1.0
"""Longest sleep between two looks for an update whose worker died. A new one rings, and is seen at once."""


class Updater(Chore):
    """These workers, and perhaps no others, reach the backends."""

    name = "updates"
    interval_s = 0.0
    retry_s = 1.0

    def __init__(self, store: PolicyStore, weights: WeightUpdates) -> None:
        super().__init__()
        self._store = store
        self._weights = weights

    @classmethod
    def of(cls, services: WorkerServices) -> Updater | None:
        return cls(services.policy, services.weights) if services.serves(Stage.RUN) else None

    def tick(self) -> None:
        """Carry out an update, or wait for one."""
        work = self._weights.claim()
        if work is None:
            self._store.await_bell(BELL_S)
            return
        try:
            self._weights.carry_out(work)
        except LeaseLost as error:
            self.log.warning("update given up", error=str(error))
