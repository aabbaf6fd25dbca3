"""What a chore is made of, without a worker: stores on a given Redis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import redis

from services.dispatch import Dispatcher
from services.queues import make_celery
from services.settings import Settings
from services.state.fleet import FleetStore
from services.state.policy.store import PolicyStore
from services.state.rollouts.store import RolloutStore
from services.state.tenants import TenantStore


def services(client: redis.Redis, settings: Settings, owner: str = "w", **others: Any) -> Any:
    """As much of `WorkerServices` as the chores of every worker take; `others` replace or add parts."""
    app, store = make_celery(settings), RolloutStore(client, settings)
    parts = {
        "app": app,
        "settings": settings,
        "name": owner,
        "owner": owner,
        "redis": client,
        "store": store,
        "tenants": TenantStore(client),
        "policy": PolicyStore(client),
        "fleet": FleetStore(client),
        "dispatcher": Dispatcher(app, store),
    }
    return SimpleNamespace(**parts | others)


class Clock:
    """`time` of a chore, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now
