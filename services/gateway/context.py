"""What the routes of one gateway process share."""

from __future__ import annotations

from flask import current_app

from services.dispatch import Dispatcher
from services.gateway.auth import Guard
from services.gateway.page.hub import Hub
from services.gateway.policies import PolicyChecker
from services.gateway.tasks import TaskChecker
from services.gateway.waiting import Places, WaitingRoom
from services.queues import make_celery
from services.settings import Settings
from services.state.api_keys import KeyStore
from services.state.backends.store import BackendStore
from services.state.batches.store import BatchStore
from services.state.bundles import BundleStore
from services.state.checkpoints import CheckpointStore
from services.state.fleet import FleetStore
from services.state.jobs import JobStore
from services.state.observations import Observations
from services.state.policy.store import PolicyStore
from services.state.redis import connect
from services.state.reports import ReportStore
from services.state.results.store import ResultStore
from services.state.results.stream import ResultStream
from services.state.rollouts.store import RolloutStore
from services.state.sessions import SessionStore
from services.state.startup import StartCheck
from services.state.tenants import TenantStore
from services.state.webhooks import WebhookStore
from services.webhook_address import AllowedAddresses

EXTENSION = "rollout"


class Gateway:
    """Connections and stores of a gateway process; nothing is sent before the first request."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.redis = client = connect(settings.redis_url, max_connections=settings.gateway_threads + 4)
        self.start = StartCheck(client, settings)
        self.observations = Observations(client)
        self.rollouts = RolloutStore(client, settings)
        self.checkpoints = CheckpointStore(client, settings)
        self.batches = BatchStore(client, settings)
        self.bundles = BundleStore(client, settings)
        self.backends = BackendStore(client)
        self.policy = PolicyStore(client)
        self.fleet = FleetStore(client)
        self.result_stream = ResultStream(client)
        self.results = ResultStore(client, settings)
        self.webhooks = WebhookStore(client, settings.webhook_url)
        self.webhook_addresses = AllowedAddresses(settings.webhook_allow)
        self.tenants = TenantStore(client)
        self.reports = ReportStore(client)
        self.jobs = JobStore(client)
        self.sessions = SessionStore(client)
        self.guard = Guard(KeyStore(client), self.sessions)
        self.tasks = TaskChecker(self.fleet)
        self.policies = PolicyChecker(self.policy, self.backends)
        self.dispatcher = Dispatcher(make_celery(settings), self.rollouts)
        self.streams = Places(
            settings.sse_streams,
            settings.gateway_tenant_share,
            noun="streams",
            verb="are open",
            setting="ROLLOUT_SSE_STREAMS",
            remedy="read GET /v1/results?cursor=…&wait=… instead, or close some",
            retry_after_s=10,
        )
        """One for each stream of results that may be open."""
        self.waiting = WaitingRoom(
            lambda: connect(settings.redis_url, max_connections=1),
            self.result_stream,
            Places(
                settings.gateway_waiters,
                settings.gateway_tenant_share,
                noun="waiting requests",
                verb="wait here",
                setting="ROLLOUT_GATEWAY_WAITERS",
                remedy="one client with GET /v1/results?cursor=…&wait=… can wait for all of its rollouts",
                retry_after_s=5,
            ),
        )
        """Requests that wait for results, streams among them."""
        self.live = Hub(self)
        """Those who look at what happens."""


def gateway() -> Gateway:
    """The gateway of the request under way."""
    return current_app.extensions[EXTENSION]
