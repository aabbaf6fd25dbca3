"""Who calls, and what they may do: API keys, sessions of the web page, scopes, tenants.

Every call needs a key, or a session that one began, wherever it comes from. What is open to all says nothing
of the service.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
import structlog
from flask import Flask, Response, current_app, g, request

from rollout.schema import FieldError, Problem
from services.gateway import refusals
from services.gateway.problems import ApiProblem, respond
from services.state.api_keys import Access, ApiKey, KeyStore, Scope
from services.state.sessions import Session, SessionStore
from services.state.startup import StartCheck
from services.state.tenants import Tenant

log = structlog.get_logger("gateway")

CACHE_S = 2.0
"""Keys and tenants are read again after so many seconds: that long a revoked key may still work."""
PROOF = "X-Rollout-Session"
"""The header with a session's proof. No page of another origin can send it, nor knows what to send."""
MAX_HEADER = 200
"""Characters of an Authorization header worth looking at; a key has 81."""
WORKING = ("active", "replaced")
"""States of a key that is accepted."""
ALL_TENANTS = "*"
LOG_IN = "log in again at /"
ENTER = "enter an API key, rlt_…, as `rollout keys create` shows it"
MAKE_KEY = "make one with `rollout keys create TENANT --scope admin`"


@dataclass
class Caller:
    """Whose call it is."""

    tenant: Tenant
    key: ApiKey
    session: Session | None = None
    """Of a call that came with one; None = it came with the key itself."""
    asked_at: float = float("-inf")
    """Monotonic time at which it was asked last whether the session is over."""


class Guard:
    """Checks each call against the keys in Redis, which it reads every `CACHE_S` seconds at most."""

    def __init__(self, store: KeyStore, sessions: SessionStore) -> None:
        self._store, self._sessions = store, sessions
        self._cached: tuple[float, Access] | None = None

    def access(self) -> Access:
        """Keys and tenants, not older than `CACHE_S`.

        Raises:
            redis.RedisError: They cannot be read; nobody is let in on what they were.
        """
        cached = self._cached
        asked = time.monotonic()
        if cached is not None and asked - cached[0] < CACHE_S:
            return cached[1]
        access = self._store.access(cached[1] if cached else None)
        if cached is None or cached[1].configured != access.configured:
            if access.configured:
                log.info("calls need an API key", keys=len(access.keys))
            else:
                log.warning(f"no API key is configured, so every call is refused: {MAKE_KEY}")
        self._cached = (asked, access)
        return access

    def forget(self) -> None:
        """Read them anew at the next call."""
        self._cached = None

    def identify(self, scopes: Sequence[str], text: str | None = None) -> Caller:
        """The caller of the request under way.

        Args:
            scopes: Of which the key needs one.
            text: A key, in place of what the request came with.

        Raises:
            ApiProblem: 401 without a valid key, 403 for one that may not do this; both say what is missing.
        """
        access = self.access()
        try:
            key, session = self._credentials(access, text)
        except ApiProblem:
            refusals.REFUSED.labels(refusals.KEY).inc()
            raise
        if not key.may(*scopes):
            refusals.REFUSED.labels(refusals.SCOPE).inc()
            held = ", ".join(sorted(key.scopes)) or "none"
            needed = " or ".join(f"'{scope}'" for scope in scopes)
            raise ApiProblem(
                403,
                "Scope missing",
                f"{request.method} {request.path} needs the scope {needed}; key {key.id} has: {held}",
                headers=_challenge("insufficient_scope", scopes[0]),
            )
        return Caller(access.tenant(key.tenant), key, session)

    def _credentials(self, access: Access, text: str | None) -> tuple[ApiKey, Session | None]:
        """The key with this text, or what the request came with: a key, or cookie and proof of a session."""
        if text is not None:
            return _working(access, text, ENTER), None
        header = request.headers.get("Authorization")
        token, proof = request.cookies.get(cookie_name()), request.headers.get(PROOF)
        if header is not None or token is proof is None:
            return _key(access, header), None
        if token is None or proof is None:
            missing = f"header {PROOF}" if proof is None else f"cookie {cookie_name()}"
            detail = (
                f"a session counts only with its cookie and its proof: the {missing} is missing; {LOG_IN}"
            )
            raise ApiProblem(401, "Session incomplete", detail, headers=_challenge())
        session = self._sessions.find(token, proof)
        key = access.keys.get(session.key_id) if session else None
        if key is None:
            detail = f"the session is over, or not known here; {LOG_IN}"
            raise ApiProblem(401, "Session over", detail, headers=_challenge("invalid_token"))
        _check_state(key)
        return key, session

    def holds(self, caller: Caller) -> bool:
        """Whether one who was let in would be still: an answer may take minutes, a stream days.

        Raises:
            redis.RedisError: It cannot be told.
        """
        key = self.access().keys.get(caller.key.id)
        if key is None or key.state(time.time()) not in WORKING:
            return False
        now = time.monotonic()
        if caller.session is None or now < caller.asked_at + CACHE_S:
            return True
        caller.asked_at = now  # a stream asks at each event
        return self._sessions.lasts(caller.session)


def cookie_name() -> str:
    """That of a session's cookie. Cookies know no ports, so each gateway of a host has a name of its own."""
    port = re.search(r":(\d{1,5})$", request.host)
    return f"rollout_session_{port[1] if port else 443 if request.is_secure else 80}"


def _challenge(error: str | None = None, scope: str = "") -> Mapping[str, str]:
    """The header of RFC 6750, section 3."""
    challenge = 'Bearer realm="rollout"'
    if error:
        challenge += f', error="{error}"'
    if re.fullmatch(r"[!#-\[\]-~]+", scope):  # RFC 6749; a policy's name comes from the address
        challenge += f', scope="{scope}"'
    return {"WWW-Authenticate": challenge}


def _key(access: Access, header: str | None) -> ApiKey:
    """The key that a header carries. What it carries is never repeated: it may be a secret."""
    expected = "send `Authorization: Bearer rlt_…`; the client takes the key from ROLLOUT_API_KEY"
    if not access.configured:
        expected += f". No key was ever made here: {MAKE_KEY}"
    if header is None:
        raise ApiProblem(401, "API key missing", expected, headers=_challenge())
    scheme, _, text = header[: MAX_HEADER + 1].partition(" ")
    if scheme.lower() != "bearer":
        detail = f"the Authorization header has another scheme than Bearer: {expected}"
        raise ApiProblem(401, "API key missing", detail, headers=_challenge())
    return _working(access, text.strip(" ") if len(header) <= MAX_HEADER else "", expected)


def _working(access: Access, text: str, expected: str) -> ApiKey:
    """The key with this text, if it is accepted."""
    key = access.find(text)
    if key is None:
        detail = f"the key is not known here, or it is mistyped: {expected}"
        raise ApiProblem(401, "API key not valid", detail, headers=_challenge("invalid_token"))
    _check_state(key)
    return key


def _check_state(key: ApiKey) -> None:
    state = key.state(time.time())
    if state not in WORKING:
        by = f" and was replaced by {key.replaced_by}" if key.replaced_by else ""
        detail = f"key {key.id} is {state}{by}: ask the operator for another one (`rollout keys`)"
        raise ApiProblem(401, "API key not valid", detail, headers=_challenge("invalid_token"))


def register(app: Flask, guard: Guard, start: StartCheck) -> None:
    """Have every call checked before its route sees it, and Redis with the first one."""

    @app.before_request
    def _check() -> None:
        view = current_app.view_functions.get(request.endpoint or "")
        if view is None:  # 404 or 405; which routes there are is no secret
            return
        scopes = scope_of(view, request.method)
        if scopes is None:  # open to everybody, whatever Redis is
            return
        start.require()
        g.checked_at = time.monotonic()
        # A name that is not in the address fails, and opens nothing.
        g.caller = guard.identify([scope.format_map(request.view_args or {}) for scope in scopes])
        structlog.contextvars.bind_contextvars(tenant=g.caller.tenant.name)

    @app.after_request
    def _check_again(response: Response) -> Response:
        # A long-poll whose key was revoked meanwhile must not answer. What a POST did is done.
        me = g.get("caller")
        if me is not None and me.session is not None:  # it may lie in a browser that others use
            response.headers.setdefault("Cache-Control", "no-store")
            response.headers["X-Content-Type-Options"] = "nosniff"
        if me is None or request.method != "GET" or time.monotonic() - g.checked_at < CACHE_S:
            return response
        try:
            if guard.holds(me):
                return response
            detail = "the key ended while the call waited"
        except redis.RedisError:
            detail = "Redis does not say whether the key still holds"
        response.close()  # a stream gives its place back
        problem = Problem(title="API key not valid", status=401, detail=detail)
        return respond(problem, _challenge("invalid_token"))


def scope_of(view: Any, method: str) -> tuple[str, ...] | None:
    """The scopes of which a route needs one; None = it is open."""
    reads = method in ("GET", "HEAD", "OPTIONS")
    scope = getattr(view, "scope", Scope.READ if reads else Scope.ADMIN)
    return (scope,) if isinstance(scope, str) else scope


def caller() -> Caller:
    """Who makes the call under way; of routes that are not open."""
    return g.caller


def holder() -> str | None:
    """The tenant for whom the call under way takes a place that others want; None: there are no others."""
    name, access = caller().tenant.name, current_app.extensions["rollout"].guard.access()
    return name if any(key.tenant != name for key in access.keys.values()) else None


def tenant_filter() -> str | None:
    """Whose rollouts the call is about: the caller's own, or `?tenant=` of an admin; None = everybody's.

    Raises:
        ApiProblem: 403 for another tenant's without the scope `admin`.
    """
    me, asked = caller(), request.args.get("tenant")
    if asked is None or asked == me.tenant.name:
        return me.tenant.name
    if not me.key.may(Scope.ADMIN):
        detail = f"tenant: only a key with the scope 'admin' may name another tenant than {me.tenant.name!r}"
        raise ApiProblem(
            403,
            "Scope missing",
            detail,
            [FieldError(field="tenant", message="needs the scope 'admin'")],
            headers=_challenge("insufficient_scope", Scope.ADMIN),
        )
    return None if asked == ALL_TENANTS else asked
