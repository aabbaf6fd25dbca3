"""Moves batches on: starts groups where there is room, decides those that have ended, ends what is redundant.

Runs in every worker; what is to be done is taken from Redis under a lease, so no worker is needed and none is
in the way. Each step is written once, by `batches.lua`, and may be done again by another worker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import redis

from rollout.batch import Batch, BatchRequest, BatchState, Verdict
from rollout.schema import DEFAULT_POLICY, Rollout, RolloutRequest
from services.state import keys
from services.state.batches.store import FILL_AT_ONCE, BatchStore, NoSuchBatch, Starting, Todo
from services.state.tenants import QuotaExceeded, Tenant
from workers.chores.base import Chore
from workers.chores.filters import Filters
from workers.services import WorkerServices

LATER_S = 2.0
"""How long a batch waits for its tenant's quota, where that does not say how long."""
AT_ONCE = 16


class Batcher(Chore):
    """Moves the batches on that it is rung for."""

    name = "batches"
    interval_s = 2.0
    """Bells may be lost."""
    channel = keys.BATCHES_BELL

    def __init__(self, services: WorkerServices) -> None:
        super().__init__(services)
        self._store = BatchStore(services.redis, services.settings)
        self._tenants = services.tenants
        self._dispatcher = services.dispatcher
        self.filters = Filters()

    def begin(self) -> None:
        self._services.fleet.put_filters(self.filters.names())

    def tick(self) -> None:
        """Do all that is due."""
        while not self.stopping.is_set() and self.step():
            pass

    def step(self) -> bool:
        """Do what is due, a few things at once; False: nothing is."""
        todos = self._store.take(AT_ONCE)
        for todo in todos:
            try:
                self._do(todo)
            except redis.RedisError:
                raise
            except QuotaExceeded as error:
                self.log.warning(
                    "a batch waits for its tenant's quota", subject=todo.subject, error=str(error)
                )
                self._store.later(todo, error.wait_s or LATER_S)
            except Exception:
                # One batch's trouble must not keep the others'; its lease brings it back.
                self.log.exception("a batch could not be moved on", todo=todo.kind, subject=todo.subject)
        return bool(todos)

    def _do(self, todo: Todo) -> None:
        steps: dict[str, Callable[[str], None]] = {
            "fill": self._fill,
            "start": self._start,
            "decide": self._decide,
            "end": self._end,
        }
        # A batch past its retention needs nothing any more.
        with suppress(NoSuchBatch):
            steps[todo.kind](todo.subject)
        self._store.through(todo)

    # -- starting ----------------------------------------------------------------------------

    def _fill(self, batch_id: str) -> None:
        while pieces := self._store.fill(batch_id):
            tenant = self._tenants.get(self._store.get(batch_id).tenant)
            for piece in pieces:
                self._submit(piece, tenant)
            if len(pieces) < FILL_AT_ONCE:
                return

    def _start(self, piece: str) -> None:
        """Somebody marked rollouts as sent and did not live to say that they are."""
        group_id, first, count = piece.split()
        group = self._store.group(group_id)
        if group is not None and group.state == "open":
            tenant = self._tenants.get(self._store.get(group.batch).tenant)
            self._submit(Starting(group_id, int(first), int(count), group.size, group.prompt), tenant)

    def _submit(self, piece: Starting, tenant: Tenant) -> None:
        prompt = RolloutRequest.model_validate_json(piece.prompt)
        group_id = piece.group_id
        request = prompt.model_copy(update={"id": group_id, "n": piece.size, "group_id": group_id})
        members = range(piece.first, piece.first + piece.count)
        # Its bytes were taken from the quota when it came.
        tenant = tenant.model_copy(update={"quota_bytes": None})
        self._dispatcher.submit([request], tenant, batch_group=group_id, members=members)
        if self._store.started(piece):
            self._cancel_late(piece)

    def _cancel_late(self, piece: Starting) -> None:
        """The batch had ended before these rollouts were submitted, so its end could not cancel them."""
        group = self._store.group(piece.group_id)
        if group is not None and self._is_given_up(batch := self._store.get(group.batch)):
            self._dispatcher.cancel_many(piece.rollout_ids, batch.tenant)

    def _is_given_up(self, batch: Batch) -> bool:
        """Whether it has ended, and what it left under way is for nobody."""
        if batch.state is BatchState.CANCELLED:
            return True
        return batch.state.ended and self._store.config(batch.id).carry == "none"

    # -- deciding ----------------------------------------------------------------------------

    def _decide(self, group_id: str) -> None:
        group = self._store.group(group_id)
        if group is None or group.state != "undecided":
            return
        batch = self._store.get(group.batch)
        config = self._store.config(group.batch)
        members = list(self._services.store.get_many(group.rollout_ids, trajectory=False))
        decision = self.filters.decide(config, members)
        if batch.state.ended and config.carry == "none":
            decision = replace(decision, verdict=Verdict.CANCELLED, reason="redundant")
        elif decision.verdict is Verdict.KEPT and self._is_stale(config, members):
            decision = replace(decision, verdict=Verdict.FILTERED, reason="stale")
        state, batch_state = self._store.decide(group_id, **vars(decision))
        self.log.info(
            "group " + state, batch=group.batch, group=group_id, batch_state=batch_state, **vars(decision)
        )

    def _is_stale(self, config: BatchRequest, members: list[Rollout]) -> bool:
        if config.max_staleness is None:
            return False
        versions = {version for member in members for version in member.policy_versions}
        policy = members[0].request.policy if members else DEFAULT_POLICY
        ages = (self._services.policy.age(version, policy) for version in versions)
        return max(ages, default=0) > config.max_staleness

    # -- ending ------------------------------------------------------------------------------

    def _end(self, batch_id: str) -> None:
        """What a batch that has ended left under way goes on to be carried over, or is cancelled."""
        batch = self._store.get(batch_id)
        groups = self._store.open_groups(batch_id)
        if self._is_given_up(batch):
            for group_id in groups:
                group = self._store.group(group_id)
                if group is None:
                    continue
                self._store.cut(group_id)  # of what had not been submitted
                self._dispatcher.cancel_many(group.rollout_ids, batch.tenant)
                self._decide(group_id)
        self.log.info("batch " + batch.state.value, batch=batch_id, kept=batch.kept, open_groups=len(groups))
        self._store.expire(batch_id, groups)
