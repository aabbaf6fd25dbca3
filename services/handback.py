"""Gives back the rollouts that wait for a node which ends in order: none of them uses up an attempt."""

from __future__ import annotations

from services.dispatch import Dispatcher
from services.queues import INIT, Ref, make_celery
from services.settings import Settings
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.rollouts import RolloutStore


def hand_back(settings: Settings, node: str) -> int:
    """Have the rollouts begin anew whose sandboxes are on this node, before those end; their number.

    Call it when the node's workers have ended: what they hold is theirs.

    Raises:
        redis.RedisError, OSError: Redis does not answer; the reaper sees to it later.
    """
    with connect(settings.redis_url, max_connections=2, retries=0) as client:
        store = RolloutStore(client, settings)
        refs = [
            Ref(id=one.rollout_id, attempt=one.attempt, node=None)
            for one in store.vacate([node], lost=False)
            if one.action == "restart"
        ]
        FleetStore(client).forget_nodes([node])
        app = make_celery(settings)
        try:
            Dispatcher(app, store).send(INIT, refs)
        finally:
            app.close()
    return len(refs)
