"""Batches on a real Redis without workers: a test ends the rollouts and turns the wheel by hand."""

from __future__ import annotations

from rollout.batch import Batch, BatchRequest
from rollout.schema import RolloutRequest, Stage, State, Submitted, new_id
from services.dispatch import _expand
from services.settings import Settings
from services.state.batches.store import BatchStore
from services.state.rollouts.store import Finish, RolloutStore
from services.state.tenants import TenantStore
from tests.helpers.chores import services
from workers.chores.batches import Batcher


class Desk:
    """Stands for the dispatcher: writes records, sends no messages."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self.dies = 0
        """So many submissions fail first, as a worker that is killed."""

    def submit(self, requests, tenant=None, *, batch_group="", members=None) -> list[Submitted]:
        if self.dies:
            self.dies -= 1
            raise KeyboardInterrupt
        new = [
            rollout
            for request in requests
            for rollout in _expand(request, batch_group)
            if members is None or rollout.index in members
        ]
        self._store.submit(new, tenant)
        return []

    def cancel_many(self, rollout_ids, tenant=None):
        return [(word, "") for word, *_ in self._store.cancel_many(rollout_ids, tenant)]


class World:
    """A Redis of its own, one batcher, and rollouts that end when a test says so."""

    def __init__(self, client, url: str) -> None:
        config = Settings(redis_url=url)
        self.redis = client
        self.rollouts = RolloutStore(client, config)
        self.batches = BatchStore(client, config)
        self.desk = Desk(self.rollouts)
        self.tenants = TenantStore(client)
        self.batcher = Batcher(services(client, config, dispatcher=self.desk))

    def create(self, **fields) -> str:
        prompts = fields.pop("prompts", 4)
        if isinstance(prompts, int):
            prompts = [RolloutRequest(handler="noop", task={"number": k}) for k in range(prompts)]
        batch_id = fields.get("id") or new_id()
        tenant = fields.pop("tenant", "default")
        self.batches.create(batch_id, BatchRequest(prompts=prompts, **fields), tenant)
        self.settle()
        return batch_id

    def settle(self) -> None:
        """Do all that is due."""
        while self.batcher.step():
            pass

    def live(self) -> list[str]:
        """Rollouts that have not ended, the oldest first."""
        return sorted(
            rollout.id
            for state in State
            if not state.terminal
            for rollout in self.rollouts.get_many(self.rollouts.ids(state=state), trajectory=False)
        )

    def end(self, rollout_id: str, reward: float | None, **fields: str) -> None:
        """Put a rollout through its stages; None = it fails without a reward."""
        attempt = 1
        for stage, state in ((Stage.INIT, State.READY), (Stage.RUN, State.EVALUATING), (Stage.EVAL, None)):
            claim = self.rollouts.claim(rollout_id, attempt, stage, "w")
            assert not isinstance(claim, str), claim
            if state is not None:
                self.rollouts.finish(claim, Finish(state))
            elif reward is None:
                self.rollouts.finish(
                    claim, Finish(State.FAILED, {"drop": "1", "drop_reason": "x", "blame": "sandbox"})
                )
            else:
                self.rollouts.finish(claim, Finish(State.COMPLETED, {"reward": str(reward), **fields}))

    def end_group(self, group_id: str, rewards: list[float | None], **fields: str) -> None:
        ids = [group_id] if len(rewards) == 1 else [f"{group_id}.{k}" for k in range(len(rewards))]
        for rollout_id, reward in zip(ids, rewards, strict=True):
            self.end(rollout_id, reward, **fields)
        self.settle()

    def get(self, batch_id: str) -> Batch:
        return self.batches.get(batch_id)


def balanced(batch: Batch) -> bool:
    """Every group is accounted for."""
    decided = batch.kept + batch.filtered + batch.failed + batch.cancelled
    return batch.started + batch.carried_in == decided + batch.carried_out + batch.open
