"""The application factory: `gunicorn 'services.gateway.app:create_app()'`."""

from __future__ import annotations

import redis
import structlog
from flask import Flask, request

from services import logs
from services.gateway import auth, door, problems, requests
from services.gateway.compat import open_port
from services.gateway.compat_port import Compat
from services.gateway.compression import compress_answers
from services.gateway.context import EXTENSION, Gateway
from services.gateway.routes import (
    backends,
    batches,
    fleet,
    nemo_gym,
    policy,
    prorl,
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

_WITHOUT_REDIS = frozenset({"service.health", "service.ready", "service.spec", "nemo_gym.alive", None})
"""Endpoints that answer whatever Redis is; None = a path that does not exist."""


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
    for module in (rollouts, batches, results, webhooks, backends, policy, fleet, service, prorl, nemo_gym):
        app.register_blueprint(module.blueprint)
    problems.register(app)
    compress_answers(app)
    door.register(app, names=_names(settings))

    @app.before_request
    def _fit() -> None:
        if request.endpoint not in _WITHOUT_REDIS:
            gate.start.require()

    auth.register(app, gate.guard)
    door.register_bodies(app)
    _check_start(gate)
    if compat := Compat.of(settings):
        app.wsgi_app = open_port(app.wsgi_app, gate, compat)
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
