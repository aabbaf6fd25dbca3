"""What is written of each request: an id for the logs and for the caller, a line, and metrics."""

from __future__ import annotations

import re
import secrets
import time

import structlog
from flask import Flask, Response, g, request

from services.gateway import metrics
from services.gateway.problems import MAX_FIELD, MAX_MESSAGE, short
from services.gateway.waiting import waiter

log = structlog.get_logger("gateway")

REQUEST_ID = "X-Request-ID"
_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
"""A caller's own id is taken over if it cannot break a line or a header."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods with series of their own: a caller may name any, and without a key."""
_ROUTINE = frozenset({"service.health", "service.ready", "service.prometheus", "page.asset"})
"""Asked every few seconds by machines, or dozens at once by the page: a line each would hide the others."""


def register(app: Flask) -> None:
    """Measure and log every request of the app. To be called before other hooks are registered."""

    @app.before_request
    def _begin() -> None:
        # A request that was parked is dispatched more than once, and is one request all the same.
        mine = waiter()
        g.started = mine.began
        given = request.headers.get(REQUEST_ID, "")
        own = mine.remember("id", lambda: secrets.token_hex(8))
        g.request_id = given if _GIVEN_ID.fullmatch(given) else own
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=g.request_id)

    @app.after_request
    def _end(response: Response) -> Response:
        seconds = time.perf_counter() - g.started
        # The rule and not the path: ids would make a series each.
        route = request.url_rule.rule if request.url_rule else "(none)"
        method = request.method if request.method in METHODS else "other"
        metrics.REQUESTS.labels(method, route, response.status_code).inc()
        metrics.LATENCY.labels(route).observe(seconds)
        response.headers[REQUEST_ID] = g.request_id
        write = log.debug if request.endpoint in _ROUTINE and response.status_code < 400 else log.info
        write(
            "request",
            method=short(request.method, MAX_FIELD),
            path=short(request.path, MAX_MESSAGE),
            status=response.status_code,
            ms=round(seconds * 1000, 1),
        )
        return response

    @app.teardown_request
    def _forget(_: BaseException | None) -> None:
        structlog.contextvars.clear_contextvars()
