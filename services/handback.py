"""Gives back the rollouts that wait for a node which ends in order: none of them uses up an attempt."""

from __future__ import annotations

from services.dispatch import Dispatcher
from services.queues import make_celery
from services.settings import Settings
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.rollouts.store import RolloutStore


def hand_back(settings: Settings, node: str) -> int:
    """Have the rollouts begin anew whose sandboxes are on this node, before those end; their number.

    Call it when the node's workers have ended: what they hold is theirs.

    Raises:
        redis.RedisError, OSError: Redis does not answer; the reaper sees to it later.
    """
    with connect(settings.redis_url, max_connections=2, retries=0) as client:
        store = RolloutStore(client, settings)
        count = sum(item.action == "restart" for item in store.vacate([node], lost=False))
        FleetStore(client).forget_nodes([node])
        app = make_celery(settings)
        try:
            Dispatcher(app, store).ring(count)
        finally:
            app.close()
    return count
