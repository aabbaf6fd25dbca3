"""The wing's door: its routes in the gateway, and the port where they need no key.

Clients that were written for those servers send no key. Who starts the gateway may open a port for them
(`rollout up --compat-port P --compat-tenant T`), on an address of its own: whoever reaches that is the
tenant. The application behind it has these routes and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog
from flask import Flask, request

from services.gateway import door
from services.gateway.auth import Caller, Guard
from services.gateway.compat import nemo_gym, prorl
from services.gateway.compat.port import EXTENSION, Compat
from services.gateway.context import EXTENSION as GATEWAY
from services.gateway.context import Gateway
from services.gateway.problems import ApiProblem
from services.gateway.routes import service
from services.state.api_keys import ApiKey, KeyStore, Scope

log = structlog.get_logger("gateway")

SERVERS = ("prorl.add_llm_server", "prorl.clear_llm_server")
"""Endpoints that change what all tenants share."""
BLUEPRINTS = (prorl.blueprint, nemo_gym.blueprint)
NOBODY = "compat"
"""Stands for the id of a key."""


class _Anybody(Guard):
    """Lets in whoever calls the port, as its tenant."""

    def __init__(self, gate: Gateway, compat: Compat) -> None:
        super().__init__(KeyStore(gate.redis), gate.sessions)
        self._compat = compat
        scopes = frozenset((Scope.SUBMIT, Scope.READ))
        self._key = ApiKey(id=NOBODY, tenant=compat.tenant, scopes=scopes, digest="", created_at=0.0)

    def identify(self, scopes: Sequence[str], text: str | None = None) -> Caller:
        if not self._key.may(*scopes) and not (self._compat.servers and request.endpoint in SERVERS):
            detail = f"{request.path} is closed at this port; `rollout backends add SERVER` needs a key"
            raise ApiProblem(403, "Not permitted", detail)
        structlog.contextvars.bind_contextvars(port=NOBODY)
        return Caller(self.access().tenant(self._compat.tenant), self._key)

    def holds(self, caller: Caller) -> bool:
        return True


def register(app: Flask, application: Callable[..., Flask]) -> None:
    """Add the routes to the gateway; calls that come by the port get an application of their own.

    Args:
        application: Makes it, as the gateway's own.

    Raises:
        SettingsError: The port is set up by halves.
    """
    for blueprint in BLUEPRINTS:
        app.register_blueprint(blueprint)
    gate: Gateway = app.extensions[GATEWAY]
    compat = Compat.of(gate.settings)
    if compat is None:
        return
    log.warning(str(compat))
    app.extensions[EXTENSION] = compat
    names = door.own_names(compat.host, *gate.settings.gateway_names.split(","))
    keyless = application("services.gateway.compat", gate, _Anybody(gate, compat), BLUEPRINTS, names)
    keyless.add_url_rule("/", "service.index", service.index)
    keyless.add_url_rule("/health", "service.health", service.health)
    ordinary, port = app.wsgi_app, str(compat.port)

    def choose(environ: dict[str, Any], start_response: Any) -> Any:
        # The listener's own, whatever the request says.
        return (keyless if environ["SERVER_PORT"] == port else ordinary)(environ, start_response)

    app.wsgi_app = choose  # type: ignore[method-assign]
