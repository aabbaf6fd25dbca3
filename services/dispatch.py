"""The only way into the pipeline: write the record first, then send the chain by name.

Used by the gateway and by the reaper. Should the process die between the two, the reaper finds the
record and sends the message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import redis
import structlog
from celery import Celery

from rollout.schema import RolloutRequest, State, Submitted
from services.messages import message
from services.queues import INIT, STAGE_TASK, TASK_CLEANUP, TASK_INIT, Ref, route
from services.state.requests import stored_form
from services.state.rollouts.store import NewRollout, RolloutStore
from services.state.tenants import Tenant

log = structlog.get_logger("dispatch")

MESSAGES_AT_ONCE = 64
"""Messages sent in one round trip: workers begin with the first ones while the next are built."""


class IdConflict(ValueError):
    """An id is in use with another body. `ids` are the ones at fault."""

    def __init__(self, ids: list[str]) -> None:
        super().__init__(f"in use with another body: {', '.join(ids[:5])}")
        self.ids = ids


class Dispatcher:
    """Puts rollouts into the pipeline and ends them."""

    def __init__(self, app: Celery, store: RolloutStore) -> None:
        self._app = app
        self._store = store

    def submit(
        self,
        requests: Iterable[RolloutRequest],
        tenant: Tenant | None = None,
        *,
        batch_group: str = "",
        members: range | None = None,
    ) -> list[Submitted]:
        """Accept requests, all or none, and start what is new among them.

        Args:
            tenant: Whose they are; None = the default tenant, without quotas.
            batch_group: The group of a batch that they are.
            members: Only these indices of each group; None = all.

        Raises:
            Unstorable: A request could not be read again.
            IdConflict: An id was used before, with another body or by another tenant.
            QuotaExceeded: The tenant may not have so many more now.
        """
        rollouts = [
            new
            for request in requests
            for new in _expand(request, batch_group)
            if members is None or new.index in members
        ]
        words = self._store.submit(rollouts, tenant)
        conflicts = [new.id for new, word in zip(rollouts, words, strict=True) if word == "conflict"]
        if conflicts:
            raise IdConflict(conflicts)
        self.ring(words.count("new"))
        return [
            Submitted(
                id=new.id,
                group_id=new.group_id,
                state=State.QUEUED if word == "new" else State(word),
                created=word == "new",
            )
            for new, word in zip(rollouts, words, strict=True)
        ]

    def ring(self, count: int = 1) -> None:
        """Send INIT so many messages, each the chain of one rollout: the one whose turn it then is."""
        self._send(TASK_INIT, [()] * count)

    def send(self, stage: str, ref: Ref, root_id: str = "", parent_id: str | None = None) -> None:
        """Send the message that a waiting rollout lacks: its chain from a stage on.

        Args:
            root_id: As for `message`, of a chain that is under way; so is `parent_id`.
        """
        self._send(STAGE_TASK[stage], [() if stage == INIT else (ref,)], root_id, parent_id)

    def _send(self, task: str, messages: Sequence[tuple[Ref, ...]], *chain: str | None) -> None:
        """Send messages of a task, each with its arguments."""
        try:
            for first in range(0, len(messages), MESSAGES_AT_ONCE):
                some = messages[first : first + MESSAGES_AT_ONCE]
                raw = [message(self._app, task, args, *chain) for args in some]
                self._store.command("LPUSH", route(task, some[0], None, None)["queue"], *raw)
        except redis.RedisError as error:
            # The records are written, so nothing is lost: the reaper rings for them.
            log.warning(
                "messages not sent; the reaper will", task=task, count=len(messages), error=str(error)
            )

    def cancel(self, rollout_id: str, tenant: str | None = None) -> tuple[str, str]:
        """Cancel one rollout; `(word, state)` as in `RolloutStore.cancel`."""
        return self.cancel_many([rollout_id], tenant)[0]

    def cancel_many(self, rollout_ids: Sequence[str], tenant: str | None = None) -> list[tuple[str, str]]:
        """Cancel rollouts, thousands at once if need be; an answer for each, in their order."""
        answers = self._store.cancel_many(rollout_ids, tenant)
        sandboxes: dict[str, list[tuple[Ref]]] = {}
        for rollout_id, (word, _, node, attempt) in zip(rollout_ids, answers, strict=True):
            if word == "cancelled" and node:
                sandboxes.setdefault(node, []).append((Ref(id=rollout_id, attempt=attempt, node=node),))
        for refs in sandboxes.values():
            self._send(TASK_CLEANUP, refs)
        return [(word, state) for word, state, _, _ in answers]

    def clean_up(self, rollout_id: str, node: str, attempt: int) -> None:
        """Have the sandbox of an attempt that ended outside a stage released on its node.

        The host's own time limit is behind it.
        """
        self._send(TASK_CLEANUP, [(Ref(id=rollout_id, attempt=attempt, node=node),)])


def _expand(request: RolloutRequest, batch_group: str = "") -> list[NewRollout]:
    body = stored_form(request)
    digest = hashlib.sha256(body.encode()).hexdigest()
    group_id, ids = request.rollout_ids()
    return [
        NewRollout(rollout_id, group_id, index, request, body, digest, batch_group)
        for index, rollout_id in enumerate(ids)
    ]
