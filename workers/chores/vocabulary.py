"""Keeping what the ids of this worker's tokenizers stand for, for the page."""

from __future__ import annotations

from rollout.schema import Stage
from workers.agent.vocabulary import LOOK_S, Keeper
from workers.chores.base import Chore
from workers.services import WorkerServices


class Vocabulary(Chore):
    """Looks for tokenizers that were loaded, beside the rollouts that need them."""

    name = "vocabulary"
    stage = Stage.RUN
    interval_s = LOOK_S

    def __init__(self, services: WorkerServices) -> None:
        super().__init__(services)
        self._keeper = Keeper(services.redis)

    def tick(self) -> None:
        self._keeper.look()
