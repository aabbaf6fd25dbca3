"""The service at a glance, for `GET /v1/live`: what `/v1/fleet`, `/v1/backends` and `/v1/policy` say."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from services.gateway.context import Gateway
from services.gateway.metrics import queue_depths
from services.gateway.page.watched import event
from services.gateway.routes.backends import BackendList
from services.gateway.routes.fleet import current


def overview(gate: Gateway, tenants: Iterable[str | None]) -> dict[str | None, bytes]:
    """The event `overview` for each of these tenants; None = for who sees all.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    policy = gate.policy.current()
    weights = {"version": policy.policy.version, "since": policy.policy.since} if policy else None
    backends = BackendList(backends=gate.backends.list()).model_dump_json()
    same = (
        f'{{"at":{time.time()},"fleet":{current(gate).model_dump_json()},'
        f'"queues":{json.dumps(queue_depths(gate))},"policy":{json.dumps(weights)},{backends[1:-1]},"tenant":'
    )
    live = {usage.tenant.name: usage.live for usage in gate.tenants.usage()}
    made = {}
    for tenant in tenants:
        count = sum(live.values()) if tenant is None else live.get(tenant, 0)
        made[tenant] = event("overview", f"{same}{json.dumps({'name': tenant or '*', 'live': count})}}}")
    return made
