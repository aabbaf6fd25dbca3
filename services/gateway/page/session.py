"""`/v1/session`: a key that is entered once becomes a cookie, and a proof that the page keeps."""

from __future__ import annotations

from typing import Annotated

from flask import Blueprint, Response, request
from pydantic import BaseModel, Field

from rollout.schema.base import Strict
from services.gateway.auth import MAX_HEADER, caller, cookie_name
from services.gateway.context import gateway
from services.gateway.http import operation, reply
from services.gateway.problems import ApiProblem
from services.state.api_keys import ApiKey, Scope
from services.state.sessions import LIFETIME_S

blueprint = Blueprint("session", __name__, url_prefix="/v1")


class SessionRequest(Strict):
    """Who begins a session."""

    key: Annotated[str, Field(max_length=MAX_HEADER)]
    """The text of an API key."""


class SessionInfo(BaseModel):
    """Whom the caller is taken for."""

    tenant: str
    scopes: list[Scope]
    expires_at: float | None = None
    """When the session, or the key that the call came with, ends; None = the key does not expire."""


class NewSession(SessionInfo):
    """A session that has begun; its token is in the answer's cookie."""

    proof: str
    """To be sent as `X-Rollout-Session` with each call, beside the cookie."""


def _fields(key: ApiKey, expires_at: float | None) -> dict[str, object]:
    return {"tenant": key.tenant, "scopes": sorted(key.scopes), "expires_at": expires_at}


@blueprint.post("/session")
@operation(401, 403, 503, scope=None, answers={200: NewSession})
def begin(body: SessionRequest) -> Response:
    """Begin a session with an API key, for the web page."""
    gate = gateway()
    gate.start.require()
    key = gate.guard.identify(Scope.READ, body.key.strip()).key
    session, token, proof = gate.sessions.create(key)
    response = reply(NewSession(**_fields(key, session.expires_at), proof=proof))
    response.set_cookie(
        cookie_name(), token, LIFETIME_S, secure=request.is_secure, httponly=True, samesite="Strict"
    )
    response.headers["Cache-Control"] = "no-store"
    return response


@blueprint.get("/session")
@operation()
def show() -> SessionInfo:
    """Whose the session or the key is that the call comes with, and until when."""
    me = caller()
    return SessionInfo(**_fields(me.key, me.session.expires_at if me.session else me.key.expires_at))


@blueprint.delete("/session")
@operation(404, scope=Scope.READ, answers={204: None})
def end() -> Response:
    """End the session that the call comes with."""
    session = caller().session
    if session is None:
        raise ApiProblem(404, "No session", "the call came with a key; `rollout keys revoke` ends one")
    gateway().sessions.end(session)
    response = Response(status=204)
    response.delete_cookie(cookie_name(), secure=request.is_secure, httponly=True, samesite="Strict")
    return response
