"""What the routes of one gateway process share."""

from __future__ import annotations

from dataclasses import dataclass

import redis
from celery import Celery
from flask import current_app

from services.dispatch import Dispatcher
from services.gateway.auth import Guard
from services.gateway.tasks import TaskChecker
from services.gateway.waiting import Places, WaitingRoom
from services.queues import make_celery
from services.settings import Settings
from services.state.api_keys import KeyStore
from services.state.backends.store import BackendStore
from services.state.batches.store import BatchStore
from services.state.fleet import FleetStore
from services.state.jobs import JobStore
from services.state.observations import Observations
from services.state.policy.store import PolicyStore
from services.state.redis import connect
from services.state.results.store import ResultStore
from services.state.results.stream import CompletionStore
from services.state.rollouts.store import RolloutStore
from services.state.startup import StartCheck
from services.state.tenants import TenantStore
from services.state.webhooks import WebhookStore
from services.webhook_address import AllowedAddresses

EXTENSION = "rollout"


@dataclass
class Gateway:
    """Connections and stores of a gateway process."""

    settings: Settings
    redis: redis.Redis
    start: StartCheck
    observations: Observations
    celery: Celery
    rollouts: RolloutStore
    batches: BatchStore
    backends: BackendStore
    policy: PolicyStore
    fleet: FleetStore
    completions: CompletionStore
    results: ResultStore
    webhooks: WebhookStore
    webhook_addresses: AllowedAddresses
    waiting: WaitingRoom
    """Requests that wait for completions, streams among them."""
    streams: Places
    """One for each stream of completions that may be open."""
    dispatcher: Dispatcher
    tasks: TaskChecker
    guard: Guard
    tenants: TenantStore
    jobs: JobStore

    @classmethod
    def create(cls, settings: Settings) -> Gateway:
        """Connect lazily: nothing is sent before the first request."""
        client = connect(settings.redis_url, max_connections=settings.gateway_threads + 4)
        celery = make_celery(settings)
        rollouts = RolloutStore(client, settings)
        fleet = FleetStore(client)
        completions = CompletionStore(client)
        return cls(
            settings=settings,
            redis=client,
            start=StartCheck(client, settings),
            observations=Observations(client),
            celery=celery,
            rollouts=rollouts,
            batches=BatchStore(client, settings),
            backends=BackendStore(client),
            policy=PolicyStore(client),
            fleet=fleet,
            completions=completions,
            results=ResultStore(client, settings),
            webhooks=WebhookStore(client, settings.webhook_url),
            webhook_addresses=AllowedAddresses(settings.webhook_allow),
            streams=Places(
                settings.sse_streams,
                settings.gateway_tenant_share,
                noun="streams",
                verb="are open",
                setting="ROLLOUT_SSE_STREAMS",
                remedy="read GET /v1/results?cursor=…&wait=… instead, or close some",
                retry_after_s=10,
            ),
            waiting=WaitingRoom(
                lambda: connect(settings.redis_url, max_connections=1),
                completions,
                Places(
                    settings.gateway_waiters,
                    settings.gateway_tenant_share,
                    noun="waiting requests",
                    verb="wait here",
                    setting="ROLLOUT_GATEWAY_WAITERS",
                    remedy="one client with GET /v1/results?cursor=…&wait=… can wait for all of its rollouts",
                    retry_after_s=5,
                ),
            ),
            dispatcher=Dispatcher(celery, rollouts),
            tasks=TaskChecker(fleet),
            guard=Guard(KeyStore(client)),
            tenants=TenantStore(client),
            jobs=JobStore(client),
        )


def gateway() -> Gateway:
    """The gateway of the request under way."""
    return current_app.extensions[EXTENSION]
