"""The application factory: `gunicorn 'services.gateway.app:create_app()'`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import redis
import structlog
from flask import Blueprint, Flask

from services import logs
from services.gateway import auth, door, problems, requests
from services.gateway.answers import compress_answers
from services.gateway.compat.app import register as register_compat
from services.gateway.context import EXTENSION, Gateway
from services.gateway.page import export, live, serving, session
from services.gateway.routes import (
    backends,
    batches,
    bundles,
    fleet,
    policy,
    reports,
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

ROUTES = (rollouts, batches, bundles, results, webhooks, backends, policy, fleet, reports, service)
PAGE = (serving, session, export, live)
BLUEPRINTS = tuple(module.blueprint for module in (*ROUTES, *PAGE))


def create_app(settings: Settings | None = None) -> Flask:
    """Build the gateway. It can start before Redis.

    Raises:
        SettingsError: The compatibility port is set up by halves.
        UnfitRedis: The service must not use this Redis.
    """
    settings = settings or process_settings()
    logs.configure(settings)
    gate = Gateway(settings)
    # Whom other machines reach knows callers by their keys, whatever name they call it by.
    local = door.is_loopback(settings.gateway_host)
    names = door.own_names(*settings.gateway_names.split(",")) if local else None
    app = application("services.gateway", gate, gate.guard, BLUEPRINTS, names)
    register_compat(app, application)
    _check_start(gate)
    return app


def application(
    name: str,
    gate: Gateway,
    guard: auth.Guard,
    blueprints: Iterable[Blueprint],
    names: Collection[str] | None,
) -> Flask:
    """Routes behind the gateway's door.

    Args:
        guard: Says who calls.
        names: As `door.register` has it.
    """
    app = Flask(name)
    app.config["MAX_CONTENT_LENGTH"] = gate.settings.max_body_bytes
    app.extensions[EXTENSION] = gate
    requests.register(app)
    for blueprint in blueprints:
        app.register_blueprint(blueprint)
    problems.register(app)
    compress_answers(app)
    door.register(app, names=names)
    auth.register(app, guard, gate.start)
    door.register_bodies(app)
    return app


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
