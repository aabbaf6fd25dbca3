"""`/v1/session`: a key that is entered once becomes a cookie, and a proof that the page keeps."""

from __future__ import annotations

from typing import Annotated, Any

from flask import Blueprint, Response, jsonify, request
from pydantic import Field

from rollout.schema.base import Strict
from services.gateway.auth import MAX_HEADER, Caller, caller, cookie_name
from services.gateway.context import gateway
from services.gateway.http import operation
from services.gateway.problems import ApiProblem
from services.state.api_keys import Scope
from services.state.sessions import LIFETIME_S, Session

blueprint = Blueprint("session", __name__, url_prefix="/v1")


class SessionRequest(Strict):
    """Who begins a session."""

    key: Annotated[str, Field(max_length=MAX_HEADER)]
    """The text of an API key."""


def _shown(me: Caller, session: Session | None) -> dict[str, Any]:
    """Whose a call is, and when what it comes with ends; None = a key that does not expire."""
    ends = session.expires_at if session else me.key.expires_at
    return {"tenant": me.tenant.name, "scopes": sorted(me.key.scopes), "expires_at": ends}


def _attributes() -> dict[str, Any]:
    """Those of the cookie. Where a proxy ends TLS, the page's own origin tells of it."""
    secure = request.is_secure or request.headers.get("Origin", "").startswith("https://")
    return {"secure": secure, "httponly": True, "samesite": "Strict"}


@blueprint.post("/session")
@operation(401, 403, 503, scope=None)
def begin(body: SessionRequest) -> Response:
    """Begin a session with an API key, for the web page."""
    gate = gateway()
    gate.start.require()
    me = gate.guard.identify([Scope.READ], body.key.strip())
    session, token, proof = gate.sessions.create(me.key)
    response = jsonify(_shown(me, session) | {"proof": proof})
    response.set_cookie(cookie_name(), token, LIFETIME_S, **_attributes())
    response.headers["Cache-Control"] = "no-store"
    return response


@blueprint.get("/session")
@operation()
def show() -> dict[str, Any]:
    """Whose the session or the key is that the call comes with, and until when."""
    return _shown(caller(), caller().session)


@blueprint.delete("/session")
@operation(404, scope=Scope.READ, answers={204: None})
def end() -> Response:
    """End the session that the call comes with."""
    session = caller().session
    if session is None:
        raise ApiProblem(404, "No session", "the call came with a key; `rollout keys revoke` ends one")
    gateway().sessions.end(session)
    response = Response(status=204)
    response.delete_cookie(cookie_name(), **_attributes())
    return response
