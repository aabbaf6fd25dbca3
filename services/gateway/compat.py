"""The compatibility port: the routes of ProRL and NeMo Gym without a key, for one tenant, and nothing else.

Clients that were written for those servers send no key. Who starts the gateway may open a port for them
(`rollout up --compat-port P --compat-tenant T`), on an address of its own: whoever reaches that is the
tenant. The application behind it has these routes and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
from flask import Flask, current_app, g, request

from services.gateway import auth, door, problems, requests
from services.gateway.compat_port import Compat
from services.gateway.compression import compress_answers
from services.gateway.context import EXTENSION, Gateway
from services.gateway.problems import ApiProblem
from services.gateway.routes import nemo_gym, prorl, service
from services.state.api_keys import ApiKey, Scope

log = structlog.get_logger("gateway")

SERVERS = ("prorl.add_llm_server", "prorl.clear_llm_server")
"""Endpoints that change what all tenants share."""
NOBODY = "compat"
"""Stands for the id of a key."""
Wsgi = Callable[[dict[str, Any], Any], Any]


def open_port(ordinary: Wsgi, gate: Gateway, compat: Compat) -> Wsgi:
    """Give calls that came by the port an application of their own, and all others the ordinary one."""
    log.warning(str(compat))
    app, port = _application(gate, compat), str(compat.port)

    def choose(environ: dict[str, Any], start_response: Any) -> Any:
        # The listener's own, whatever the request says.
        return (app if environ["SERVER_PORT"] == port else ordinary)(environ, start_response)

    return choose


def _application(gate: Gateway, compat: Compat) -> Flask:
    app = Flask("services.gateway.compat")
    app.config["MAX_CONTENT_LENGTH"] = gate.settings.max_body_bytes
    app.extensions[EXTENSION] = gate
    requests.register(app)
    app.register_blueprint(prorl.blueprint)
    app.register_blueprint(nemo_gym.blueprint)
    app.add_url_rule("/health", "service.health", service.health)
    problems.register(app)
    compress_answers(app)
    door.register(app, names=door.own_names(compat.host, *gate.settings.gateway_names.split(",")))
    nobody = ApiKey(
        id=NOBODY,
        tenant=compat.tenant,
        scopes=frozenset((Scope.SUBMIT, Scope.READ)),
        digest="",
        created_at=0.0,
    )

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
