"""The application factory: `gunicorn 'services.gateway.app:create_app()'`."""

from __future__ import annotations

import time

from flask import Flask, Response, g, request

from services import logs
from services.gateway import metrics, problems
from services.gateway.context import EXTENSION, Gateway
from services.gateway.routes import backends, rollouts, service
from services.settings import Settings
from services.settings import settings as process_settings


def create_app(settings: Settings | None = None) -> Flask:
    """Build the gateway. It connects to Redis at the first request, so it can start before Redis."""
    settings = settings or process_settings()
    logs.configure(settings)
    app = Flask("services.gateway")
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.extensions[EXTENSION] = Gateway.create(settings)
    for module in (rollouts, backends, service):
        app.register_blueprint(module.blueprint)
    problems.register(app)

    @app.before_request
    def _started() -> None:
        g.started = time.perf_counter()

    @app.after_request
    def _measured(response: Response) -> Response:
        # The rule and not the path: ids would make a series each.
        route = request.url_rule.rule if request.url_rule else "(none)"
        metrics.REQUESTS.labels(request.method, route, response.status_code).inc()
        metrics.LATENCY.labels(route).observe(time.perf_counter() - g.started)
        return response

    return app
