"""`/v1/results`, its stream, and `/v1/rollouts/ack`: what ended since a cursor, and that it arrived.

The paths `/v1/completions` are other names of the first two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated

import redis
import structlog
from flask import Blueprint, Response

from rollout.schema import AckRequest, AckResponse, ResultPage
from services.gateway.answers import Answer, event_stream
from services.gateway.auth import Caller, caller, holder
from services.gateway.context import Gateway, gateway
from services.gateway.http import STRING, Cursor, Include, Limit, Tag, Tenant, Wait, operation, query
from services.gateway.problems import invalid
from services.gateway.waiting import Interest, Waiter, waiter
from services.state.api_keys import Scope
from services.state.redis import is_away
from services.state.results.stream import is_cursor

log = structlog.get_logger("gateway")
blueprint = Blueprint("results", __name__, url_prefix="/v1")

LAST = query("Where a stream was cut.", alias="Last-Event-ID")
AWAY_PAUSE_S = 2.0
"""Seconds between two tries of a stream to read from a Redis that is away."""
STREAM_PAGE = 16
"""Rollouts of a stream that are read at once: a long trajectory is 1 MB of JSON."""


def _cursor(gate: Gateway, raw: str, field: str = "cursor") -> str:
    if raw == "$":
        return gate.result_stream.tail()
    if not is_cursor(raw):
        raise invalid(field, f"{raw!r} is no cursor; use one from an earlier answer, '0' or '$'")
    return raw


@blueprint.get("/results")
@blueprint.get("/completions")
@operation(429, answers={200: ResultPage}, arrays=True)
def results(cursor: Cursor, wait: Wait, limit: Limit, tag: Tag, include: Include, tenant: Tenant) -> Response:
    """Rollouts in the order in which they ended, since a cursor; with `wait`, at least one."""
    gate = gateway()
    # "$" is the end as it was when the call came, however often it is dispatched.
    begin = waiter().remember("cursor", lambda: _cursor(gate, cursor))
    page: tuple[list[str], str] = ([], begin)

    def look() -> bool:
        nonlocal page
        page = gate.result_stream.since(page[1], limit=limit, tag=tag, tenant=tenant)
        return bool(page[0])

    gate.waiting.wait(look, wait, Interest(tenant=tenant, tag=tag))
    answer = Answer()
    rollouts = answer.rollouts(page[0], trajectory=include == "trajectory")
    there = {item.id for item in rollouts}
    return answer.send(
        ResultPage(
            rollouts=rollouts,
            cursor=page[1],
            expired=[rollout_id for rollout_id in page[0] if rollout_id not in there],
            missed=gate.result_stream.missed(begin),
        )
    )


@blueprint.get("/results/stream")
@blueprint.get("/completions/stream")
@operation(429, answers={200: STRING}, media="text/event-stream")
def stream(
    cursor: Cursor, tag: Tag, include: Include, tenant: Tenant, last: Annotated[str | None, LAST]
) -> Response:
    """The same as server-sent events (completion, expired, missed), without end."""
    gate, mine, who = gateway(), waiter(), holder()
    cursor = _cursor(gate, last, "Last-Event-ID") if last else _cursor(gate, cursor)
    gate.streams.take(who)
    try:
        gate.waiting.enter(mine, Interest(tenant=tenant, tag=tag))
    except BaseException:
        gate.streams.free(who)
        raise
    mine.streams = True
    body = _events(gate, caller(), cursor, mine, include == "trajectory")
    return event_stream(body, partial(gate.streams.free, who), mine.leave)


def _events(
    gate: Gateway, reader: Caller, cursor: str, mine: Waiter, trajectory: bool
) -> Iterator[str | Waiter]:
    """Event after event, and a comment where nothing happens for long: it also finds out who has left."""
    ids: list[str] = []
    after = cursor
    tag, tenant = mine.interest.tag, mine.interest.tenant

    def look() -> bool:
        nonlocal ids, after
        mine.rearm()
        ids, after = gate.result_stream.since(after, limit=STREAM_PAGE, tag=tag, tenant=tenant)
        return bool(ids)

    try:
        yield ": results\n\n"
        if gate.result_stream.missed(cursor):
            yield "event: missed\ndata: {}\n\n"
        # A stream is sent from the few threads that go on with what was parked, however much there is.
        yield from mine.pauses(0.0)
        while not mine.over:
            try:
                if not look():
                    yield from mine.pauses(gate.settings.sse_heartbeat_s)
                    if not look():
                        if time.monotonic() < mine.deadline and not mine.over:
                            continue  # what woke it was read before
                        yield ": nothing new\n\n"
                if not gate.guard.holds(reader):  # its key was revoked, say
                    return
                there = set()
                for item in gate.rollouts.get_many(ids, trajectory=trajectory):
                    there.add(item.id)
                    yield f"id: {item.completion}\nevent: completion\ndata: {item.model_dump_json()}\n\n"
                    cursor = item.completion or cursor
                for rollout_id in ids:
                    if rollout_id not in there:
                        yield f"event: expired\ndata: {json.dumps({'id': rollout_id})}\n\n"
                if after != cursor:
                    # Also past what another tag has: an event without data moves the reader's cursor alone.
                    yield f"id: {after}\n\n"
                    cursor = after
            except redis.RedisError as error:
                if not is_away(error):
                    raise
                # The stream goes on behind the last event sent once Redis is back.
                ids, after = [], cursor
                yield ": Redis is away\n\n"
                mine.rearm()
                yield from mine.pauses(AWAY_PAUSE_S)
    except redis.RedisError as error:
        # Too late for a 503. The reader comes back with the last id, and is told then.
        log.warning("stream of results cut: Redis does not answer", error=str(error))


@blueprint.post("/rollouts/ack")
@operation(scope=Scope.READ)
def acknowledge(body: AckRequest, tenant: Tenant) -> AckResponse:
    """Acknowledge results that have arrived. Twice is harmless."""
    words = gateway().results.acknowledge(body.ids, tenant)
    return AckResponse(
        acknowledged=words.count("acknowledged"),
        already_acknowledged=words.count("already"),
        not_ended=words.count("live"),
        unknown=words.count("unknown"),
    )
