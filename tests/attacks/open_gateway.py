"""The gateway without its door, for controls: whoever calls is an admin, and nobody looks at where from."""

from __future__ import annotations

from flask import Flask

from services.gateway import app, auth, door
from services.state.api_keys import ApiKey, Scope
from services.state.tenants import DEFAULT_TENANT

ANYBODY = ApiKey(
    id="control", tenant=DEFAULT_TENANT, scopes=frozenset((Scope.ADMIN,)), digest="", created_at=0.0
)


def create_app() -> Flask:
    """As the gateway was before: loopback is trusted. And it allows every other site."""
    for name in ("_check_host", "_check_origin", "_check_type"):
        setattr(door, name, lambda *_: None)
    auth.Guard.identify = lambda self, scope, text=None: auth.Caller(
        self.access().tenant(DEFAULT_TENANT), ANYBODY
    )
    made = app.create_app()

    @made.after_request
    def _allow(response):
        response.headers["Access-Control-Allow-Origin"] = "*"
        return response

    return made
