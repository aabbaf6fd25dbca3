"""The wing's door: its routes in the gateway, and the port where they need no key.

Clients that were written for those servers send no key. Who starts the gateway may open a port for them
(`rollout up --compat-port P --compat-tenant T`), on an address of its own: whoever reaches that is the
tenant. The application behind it has these routes and no others.
"""

from __future__ import annotations

from typing import Any

import structlog
from flask import Flask, current_app, g, request

from services.gateway import auth, door, problems, requests
from services.gateway.answers import compress_answers
from services.gateway.compat import nemo_gym, prorl
from services.gateway.compat.port import EXTENSION, Compat
from services.gateway.context import EXTENSION as GATEWAY
from services.gateway.problems import ApiProblem
from services.gateway.routes import service
from services.state.api_keys import ApiKey, Scope

log = structlog.get_logger("gateway")

SERVERS = ("prorl.add_llm_server", "prorl.clear_llm_server")
"""Endpoints that change what all tenants share."""
BLUEPRINTS = (prorl.blueprint, nemo_gym.blueprint)
NOBODY = "compat"
"""Stands for the id of a key."""


def register(app: Flask) -> None:
    """Add the routes to the gateway; calls that come by the port get an application of their own.

    Raises:
        SettingsError: The port is set up by halves.
    """
    for blueprint in BLUEPRINTS:
        app.register_blueprint(blueprint)
    compat = Compat.of(app.extensions[GATEWAY].settings)
    if compat is None:
        return
    log.warning(str(compat))
    app.extensions[EXTENSION] = compat
    ordinary, keyless, port = app.wsgi_app, _keyless(app, compat), str(compat.port)

    def choose(environ: dict[str, Any], start_response: Any) -> Any:
        # The listener's own, whatever the request says.
        return (keyless if environ["SERVER_PORT"] == port else ordinary)(environ, start_response)

    app.wsgi_app = choose  # type: ignore[method-assign]


def _keyless(gateway: Flask, compat: Compat) -> Flask:
    app = Flask("services.gateway.compat")
    gate = app.extensions[GATEWAY] = gateway.extensions[GATEWAY]
    app.config["MAX_CONTENT_LENGTH"] = gate.settings.max_body_bytes
    requests.register(app)
    for blueprint in BLUEPRINTS:
        app.register_blueprint(blueprint)
    app.add_url_rule("/health", "service.health", service.health)
    problems.register(app)
    compress_answers(app)
    door.register(app, names=door.own_names(compat.host, *gate.settings.gateway_names.split(",")))
    scopes = frozenset((Scope.SUBMIT, Scope.READ))
    nobody = ApiKey(id=NOBODY, tenant=compat.tenant, scopes=scopes, digest="", created_at=0.0)

    @app.before_request
    def _let_in() -> None:
        view = current_app.view_functions.get(request.endpoint or "")
        if view is None or getattr(view, "scope", "") is None:
            return
        gate.start.require()
        scope = auth.scope_of(view, request.method)
        if not nobody.may(scope) and not (compat.servers and request.endpoint in SERVERS):
            detail = f"{request.path} is closed at this port; `rollout backends add SERVER` needs a key"
            raise ApiProblem(403, "Not permitted", detail)
        g.caller = auth.Caller(gate.guard.access().tenant(compat.tenant), nobody)
        structlog.contextvars.bind_contextvars(tenant=compat.tenant, port=NOBODY)

    door.register_bodies(app)
    return app
