"""Who calls, and what they may do: API keys, scopes, tenants.

Without any key configured, the gateway answers this machine alone. Once a key was made, every call needs one,
also when the last of them has been revoked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
import structlog
from flask import Flask, Response, current_app, g, request

from rollout.schema import FieldError, HandlerInfo, Problem, RolloutRequest
from services.gateway.problems import ApiProblem, invalid, respond
from services.settings import Settings, SettingsError
from services.state.api_keys import Access, ApiKey, KeyStore, Scope
from services.state.tenants import DEFAULT_TENANT, Tenant

log = structlog.get_logger("gateway")

CACHE_S = 2.0
"""Keys and tenants are read again after so many seconds: that long a revoked key may still work."""
MAX_HEADER = 200
"""Characters of an Authorization header worth looking at; a key has 81."""
WORKING = ("active", "replaced")
"""States of a key that is accepted."""
UNSAFE_RUNTIME = "local-unsafe"
ALL_TENANTS = "*"
FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")
"""With one of these a proxy passes on a call that may come from anywhere."""
MAKE_KEY = "make one with `rollout keys create TENANT --scope admin`"

F = TypeVar("F", bound=Callable[..., Any])


def needs(scope: Scope | None, *, or_loopback: bool = False) -> Callable[[F], F]:
    """Say what a route needs. A route that says nothing needs `read` to read and `admin` for anything else.

    Args:
        scope: None = open to everybody.
        or_loopback: Also open, without a key, to callers on this machine.
    """

    def mark(view: F) -> F:
        view.scope, view.or_loopback = scope, or_loopback  # type: ignore[attr-defined]
        return view

    return mark


@dataclass(frozen=True)
class Caller:
    """Whose call it is."""

    tenant: Tenant
    key: ApiKey | None
    """None: no key is configured, and the caller is on this machine."""

    def may(self, scope: Scope) -> bool:
        return self.key is None or self.key.may(scope)


class Guard:
    """Checks each call against the keys in Redis, which it reads every `CACHE_S` seconds at most."""

    def __init__(self, store: KeyStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings
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
            self._say(access)
        self._cached = (asked, access)
        return access

    def _say(self, access: Access) -> None:
        if access.configured:
            log.info("calls need an API key", keys=len(access.keys))
        else:
            log.warning(f"no API key is configured: only callers on this machine are answered; {MAKE_KEY}")

    def check_start(self) -> None:
        """Refuse to listen beyond this machine while there is no key.

        Raises:
            SettingsError: There is none, and the address is not loopback.
            redis.RedisError: Whether there is one cannot be read. Each call is checked again, so a gateway
                that starts all the same opens nothing.
        """
        access = self.access()
        host = self._settings.gateway_host
        if not access.configured and not _loopback_name(host):
            raise SettingsError(
                f"ROLLOUT_GATEWAY_HOST={host} is open to other machines and no API key is configured: "
                f"{MAKE_KEY}, or set it to 127.0.0.1"
            )

    def identify(self, scope: Scope, *, or_loopback: bool = False) -> Caller:
        """The caller of the request under way.

        Raises:
            ApiProblem: 401 without a valid key, 403 for one that may not do this; both say what is missing.
        """
        access = self.access()
        header = request.headers.get("Authorization")
        if not access.configured or (or_loopback and header is None):
            obstacle = self._not_local()
            if obstacle is None:
                return Caller(access.tenant(DEFAULT_TENANT), None)
            if not access.configured:
                detail = f"no API key is configured, so only calls from this machine are answered: {obstacle}"
                raise ApiProblem(403, "Calls from this machine only", f"{detail}; {MAKE_KEY}")
        key = _key(access, header)
        if not key.may(scope):
            held = ", ".join(sorted(key.scopes)) or "none"
            raise ApiProblem(
                403,
                "Scope missing",
                f"{request.method} {request.path} needs the scope {scope.value!r}; key {key.id} has: {held}",
                headers=_challenge("insufficient_scope", scope),
            )
        return Caller(access.tenant(key.tenant), key)

    def holds(self, caller: Caller) -> bool:
        """Whether one who was let in would be still: an answer may take minutes, a stream days.

        Raises:
            redis.RedisError: It cannot be told.
        """
        access = self.access()
        if caller.key is None:
            return not access.configured
        key = access.keys.get(caller.key.id)
        return key is not None and key.state(time.time()) in WORKING

    def _not_local(self) -> str | None:
        """Why the call under way does not come from this machine, or None."""
        host = self._settings.gateway_host
        if not _loopback_name(host):
            return f"the gateway is set to listen on {host}"
        if not _loopback_address(request.remote_addr or ""):
            return f"this one comes from {request.remote_addr or 'an unknown address'}"
        for name in FORWARDED:
            if name in request.headers:
                return f"this one was passed on by a proxy (header {name})"
        # A web page whose name was made to point here would have the reader's browser call for it.
        if not _loopback_name(_host_name(request.headers.get("Host", ""))):
            return "its Host header names another machine"
        return None


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _loopback_name(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost") or _loopback_address(host)


def _loopback_address(address: str) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def _challenge(error: str | None = None, scope: Scope | None = None) -> Mapping[str, str]:
    """The header of RFC 6750, section 3."""
    said = 'Bearer realm="rollout"'
    if error:
        said += f', error="{error}"'
    if scope:
        said += f', scope="{scope.value}"'
    return {"WWW-Authenticate": said}


def _key(access: Access, header: str | None) -> ApiKey:
    """The key that a header carries. What it carries is never repeated: it may be a secret."""
    expected = "send `Authorization: Bearer rlt_…`; the client takes the key from ROLLOUT_API_KEY"
    if header is None:
        raise ApiProblem(401, "API key missing", expected, headers=_challenge())
    scheme, _, text = header[: MAX_HEADER + 1].partition(" ")
    if scheme.lower() != "bearer":
        detail = f"the Authorization header has another scheme than Bearer: {expected}"
        raise ApiProblem(401, "API key missing", detail, headers=_challenge())
    key = access.find(text.strip(" ")) if len(header) <= MAX_HEADER else None
    if key is None:
        detail = f"the key is not known here, or it is mistyped: {expected}"
        raise ApiProblem(401, "API key not valid", detail, headers=_challenge("invalid_token"))
    state = key.state(time.time())
    if state not in WORKING:
        by = f" and was replaced by {key.replaced_by}" if key.replaced_by else ""
        detail = f"key {key.id} is {state}{by}: ask the operator for another one (`rollout keys`)"
        raise ApiProblem(401, "API key not valid", detail, headers=_challenge("invalid_token"))
    return key


def register(app: Flask, guard: Guard) -> None:
    """Have every call checked before its route sees it."""

    @app.before_request
    def _check() -> None:
        view = current_app.view_functions.get(request.endpoint or "")
        if view is None:  # 404 or 405; which routes there are is no secret
            return
        reads = request.method in ("GET", "HEAD", "OPTIONS")
        scope = getattr(view, "scope", Scope.READ if reads else Scope.ADMIN)
        if scope is None:
            return
        g.checked_at = time.monotonic()
        g.caller = guard.identify(scope, or_loopback=getattr(view, "or_loopback", False))
        structlog.contextvars.bind_contextvars(tenant=g.caller.tenant.name)

    @app.after_request
    def _check_again(response: Response) -> Response:
        # A long-poll whose key was revoked meanwhile must not answer. What a POST did is done.
        me = g.get("caller")
        if (
            me is None
            or me.key is None
            or request.method != "GET"
            or time.monotonic() - g.checked_at < CACHE_S
        ):
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


def caller() -> Caller:
    """Who makes the call under way; of routes that are not open."""
    return g.caller


def tenant_filter(*, every: bool = True) -> str | None:
    """Whose rollouts the call is about: the caller's own, or `?tenant=` of an admin; None = everybody's.

    Args:
        every: Whether `*`, everybody's, may be asked for.

    Raises:
        ApiProblem: 403 for another tenant's without the scope `admin`; 400 for `*` where it may not be.
    """
    me, asked = caller(), request.args.get("tenant")
    if asked is None or asked == me.tenant.name:
        return me.tenant.name
    if not me.may(Scope.ADMIN):
        detail = f"tenant: only a key with the scope 'admin' may name another tenant than {me.tenant.name!r}"
        raise ApiProblem(
            403,
            "Scope missing",
            detail,
            [FieldError(field="tenant", message="needs the scope 'admin'")],
            headers=_challenge("insufficient_scope", Scope.ADMIN),
        )
    if asked != ALL_TENANTS:
        return asked
    if not every:
        raise invalid("tenant", "name one tenant: groups and tags are each tenant's own")
    return None


def check_permitted(
    requests: Iterable[RolloutRequest],
    handlers: Mapping[str, HandlerInfo],
    default_image: str,
    *,
    single: bool,
) -> None:
    """Refuse handlers, images and runtimes that the caller's tenant may not use.

    Raises:
        ApiProblem: 403 naming the fields.
    """
    me = caller()
    errors: list[FieldError] = []

    def require(kind: str, field: str, value: str) -> None:
        if not me.tenant.may_use(kind, value):
            allowed = ", ".join(getattr(me.tenant, kind)) or "none"
            message = f"tenant {me.tenant.name!r} may not use {value!r}; allowed {kind}: {allowed}"
            errors.append(FieldError(field=field, message=message))

    for position, wanted in enumerate(requests):
        prefix = "" if single else f"requests.{position}."
        require("handlers", f"{prefix}handler", wanted.handler)
        info = handlers.get(wanted.handler)
        if info is not None and info.uses_sandbox:
            field, image = _image(wanted, info, default_image)
            require("images", prefix + field, image)
        runtime = wanted.sandbox_runtime
        if runtime is None:
            continue
        if runtime == UNSAFE_RUNTIME and me.tenant.runtimes is None and not me.may(Scope.ADMIN):
            message = f"{runtime!r} isolates nothing; tenant {me.tenant.name!r} was not given it by name"
            errors.append(FieldError(field=f"{prefix}sandbox_runtime", message=message))
        require("runtimes", f"{prefix}sandbox_runtime", runtime)
    if errors:
        raise ApiProblem(403, "Not permitted", f"{errors[0].field}: {errors[0].message}", errors)


def _image(wanted: RolloutRequest, info: HandlerInfo, default: str) -> tuple[str, str]:
    """The image that a request leads to, and the field that says so: a task's own `image` goes first."""
    chosen = wanted.task.get("image")
    if isinstance(chosen, str) and "image" in info.task_schema.get("properties", {}):
        return "task.image", chosen
    return "handler", info.image or default
