"""`GET /v1/live`: what happens, as it happens, for a page that somebody looks at."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Literal, get_args

import redis
from flask import Blueprint, Response

from services.gateway.answers import event_stream
from services.gateway.auth import Caller, caller, holder
from services.gateway.context import Gateway, gateway
from services.gateway.http import STRING, Tenant, operation, query
from services.gateway.metrics import queue_depths
from services.gateway.page.hub import Viewer
from services.gateway.page.watched import event
from services.gateway.problems import invalid
from services.gateway.routes.backends import BackendList
from services.gateway.routes.fleet import current
from services.gateway.routes.rollouts import absent
from services.gateway.waiting import Waiter, waiter
from services.state.redis import is_away

blueprint = Blueprint("live", __name__, url_prefix="/v1")

Topic = Literal["overview", "batches", "reports"]
MOST_IDS = 200


@blueprint.get("/live")
@operation(404, 429, answers={200: STRING}, media="text/event-stream")
def live(
    topics: Annotated[str, query("Of overview, batches and reports, with commas.", "")],
    rollout: Annotated[str | None, query("A rollout to be followed.")],
    ids: Annotated[str, query(f"Rollouts whose states are followed, with commas; at most {MOST_IDS}.", "")],
    tenant: Tenant,
) -> Response:
    """What happens, as server-sent events without end; each begins with how it is now."""
    gate, mine, who = gateway(), waiter(), holder()
    viewer = Viewer(mine, tenant, _topics(topics), rollout, _ids(ids))
    if not (viewer.topics or rollout or viewer.ids):
        raise invalid("topics", "name what to follow: `topics`, `rollout` or `ids`")
    if rollout is not None and gate.rollouts.state(rollout, tenant) is None:
        raise absent(rollout)
    gate.streams.take(who)
    mine.streams = True
    gate.live.enter(viewer, partial(_overview, gate))
    leave = partial(gate.live.leave, viewer)
    return event_stream(_events(gate, caller(), viewer), partial(gate.streams.free, who), leave)


def _topics(text: str) -> frozenset[str]:
    topics, known = frozenset(filter(None, text.split(","))), get_args(Topic)
    if unknown := sorted(topics.difference(known)):
        raise invalid("topics", f"{unknown[0]!r} is none; there are: {', '.join(known)}")
    return topics


def _ids(text: str) -> frozenset[str]:
    ids = frozenset(filter(None, text.split(",")))
    if len(ids) > MOST_IDS:
        raise invalid("ids", f"{len(ids)} are more than {MOST_IDS}; name those that are shown")
    return ids


def _events(gate: Gateway, reader: Caller, viewer: Viewer) -> Iterator[bytes | Waiter]:
    """What is new, whenever something is; and a comment where nothing happens for long."""
    mine = viewer.waiter
    beat_s = gate.settings.sse_heartbeat_s
    yield b": live\n\n"
    pause_s = 0.0  # first to where streams go on: it is not for this thread to send
    while not mine.over:
        yield from mine.pauses(pause_s)
        mine.rearm()
        try:
            if not gate.guard.holds(reader):  # its key was revoked, say
                return
        except redis.RedisError as error:
            if not is_away(error):
                raise
        said = viewer.take()
        if said or time.monotonic() >= mine.deadline:
            yield said or b": nothing new\n\n"
        pause_s = beat_s


def _overview(gate: Gateway, tenants: Iterable[str | None]) -> dict[str | None, bytes]:
    """The event `overview`: what the fleet, the backends and the policy are now, and whose the viewer is."""
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
