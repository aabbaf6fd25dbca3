"""The application factory: `gunicorn 'services.gateway.app:create_app()'`."""

from __future__ import annotations

import redis
import structlog
from flask import Flask, request

from services import logs
from services.gateway import auth, door, problems, requests
from services.gateway.answers import compress_answers
from services.gateway.compat.app import register as register_compat
from services.gateway.context import EXTENSION, Gateway
from services.gateway.routes import (
    backends,
    batches,
    fleet,
    policy,
    results,
    rollouts,
    service,
    webhooks,
)
from services.settings import Settings
from services.settings import settings as process_settings
from services.state.redis import connect
from services.state.startup import StartCheck, UnfitRedis

log = structlog.get_logger("gateway")

BLUEPRINTS = tuple(
    module.blueprint for module in (rollouts, batches, results, webhooks, backends, policy, fleet, service)
)


def create_app(settings: Settings | None = None) -> Flask:
    """Build the gateway. It can start before Redis.

    Raises:
        SettingsError: The compatibility port is set up by halves.
        UnfitRedis: The service must not use this Redis.
    """
    settings = settings or process_settings()
    logs.configure(settings)
    app = Flask("services.gateway")
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    gate = app.extensions[EXTENSION] = Gateway.create(settings)
    requests.register(app)
    for blueprint in BLUEPRINTS:
        app.register_blueprint(blueprint)
    register_compat(app)
    problems.register(app)
    compress_answers(app)
    door.register(app, names=_names(settings))

    @app.before_request
    def _fit() -> None:
        view = app.view_functions.get(request.endpoint or "")
        if view is not None and auth.scope_of(view, request.method) is not None:
            gate.start.require()  # what is open to everybody answers whatever Redis is

    auth.register(app, gate.guard)
    door.register_bodies(app)
    _check_start(gate)
    return app


def _names(settings: Settings) -> set[str] | None:
    """Host names that callers of the ordinary port may use; None = any: others than this machine reach it."""
    if not door.is_loopback(settings.gateway_host):
        return None
    return door.own_names(*settings.gateway_names.split(","))


def _check_start(gate: Gateway) -> None:
    """Refuse a Redis that must not be used, and say so if nobody has a key yet.

    A Redis that does not answer yet is checked at the first request.
    """
    try:
        with connect(gate.settings.redis_url, max_connections=1, retries=0) as client:
            StartCheck(client, gate.settings).require()
        gate.guard.access()
    except redis.RedisError as error:
        log.warning("Redis does not answer yet; it is checked at the first request", error=str(error))
    except UnfitRedis as error:
        log.critical("the gateway cannot start", error=str(error))
        raise
    else:
        gate.start.passed = True
