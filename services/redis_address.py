"""Addresses of Redis: one URL in the settings, understood by our client and by Celery's broker alike.

* `redis://[USER:PASSWORD@]HOST:PORT/DB`: one server
* `rediss://HOST:PORT/DB?ssl_ca_certs=FILE`: the same over TLS
* `unix:///PATH?db=DB`: a Unix socket
* `sentinel://HOST:PORT,HOST:PORT/MASTER/DB?password=SECRET`: the master that these Sentinels name
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

SENTINEL_PORT = 26379
SCHEMES = ("redis", "rediss", "unix", "sentinel")
SENTINEL_TIMEOUT_S = 2.0
"""Seconds that one Sentinel has to answer; then the next one is asked."""
_SENTINEL_OPTIONS = ("username", "password", "sentinel_username", "sentinel_password")
_SECRETS = re.compile(r"((?:^|[?&])(?:sentinel_)?password=)[^&#\s]*")


class AddressError(ValueError):
    """A URL that cannot be an address of Redis; the message says why and how one looks."""


@dataclass(frozen=True)
class RedisAddress:
    """An address, taken apart."""

    url: str
    db: int
    sentinels: tuple[tuple[str, int], ...] = ()
    """Host and port of each Sentinel; empty for a server that is spoken to directly."""
    master: str | None = None
    """The name by which the Sentinels know the master."""
    credentials: dict[str, str] = field(default_factory=dict)
    """`username` and `password` for the server behind the Sentinels."""
    sentinel_credentials: dict[str, str] = field(default_factory=dict)
    """The same for the Sentinels themselves, which have passwords of their own."""

    def sentinel_options(self) -> dict[str, Any]:
        """Connection options for the Sentinels."""
        times = {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S}
        return self.sentinel_credentials | times

    def broker(self) -> tuple[str, dict[str, Any]]:
        """The URL for Celery and the transport options that belong to it."""
        if self.sentinels:
            user = quote(self.credentials.get("username", ""), safe="")
            secret = self.credentials.get("password")
            login = f"{user}:{quote(secret, safe='')}@" if secret is not None else ""
            # kombu takes the login and the database from the first one.
            hosts = ";".join(
                f"sentinel://{login}{_host(host)}:{port}/{self.db}" for host, port in self.sentinels
            )
            return hosts, {"master_name": self.master, "sentinel_kwargs": self.sentinel_options()}
        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            return f"redis+socket://{parts.netloc}{parts.path}?{urlencode({'virtual_host': self.db})}", {}
        query = dict(parse_qsl(parts.query))
        if parts.scheme == "rediss" and "ssl_cert_reqs" not in query:
            # Our client checks certificates by default, kombu does not.
            query["ssl_cert_reqs"] = "required"
        return parts._replace(path=f"/{self.db}", query=urlencode(query)).geturl(), {}


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def parse(url: str) -> RedisAddress:
    """Take a URL apart.

    Raises:
        AddressError: It is none of the forms above. Secrets are not in the message.
    """
    shown = hide_password(url)
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise AddressError(
            f"{shown!r} is no address of Redis: it must begin with {', '.join(f'{s}://' for s in SCHEMES)}"
        )
    try:
        if scheme == "sentinel":
            return _parse_sentinel(url)
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        if scheme == "unix":
            if not parts.path.strip("/"):
                raise AddressError("the path of the socket is missing: unix:///run/redis.sock?db=0")
            return RedisAddress(url, _db(query.get("db", "0")))
        if not parts.hostname:
            raise AddressError(f"the host is missing: {scheme}://HOST:6379/0")
        _ = parts.port  # raises for what is no port
        return RedisAddress(url, _db(parts.path.strip("/") or query.get("db", "0")))
    except AddressError as error:
        raise AddressError(f"{shown!r}: {error}") from None
    except ValueError as error:
        raise AddressError(f"{shown!r} is no address of Redis: {error}") from None


def _parse_sentinel(url: str) -> RedisAddress:
    form = "sentinel://HOST:26379,HOST:26379/MASTER/0?password=…"
    rest, _, raw_query = url.removeprefix("sentinel://").partition("?")
    hosts, _, path = rest.partition("/")
    if "@" in hosts:
        raise AddressError(f"the password goes to the end: {form}")
    master, _, db = path.partition("/")
    if not hosts or not master:
        raise AddressError(f"the name of the master is missing: {form}")
    sentinels = []
    for host in hosts.split(","):
        parts = urlsplit(f"//{host}")
        if not parts.hostname:
            raise AddressError(f"{host!r} is no host of a Sentinel: {form}")
        sentinels.append((parts.hostname, parts.port or SENTINEL_PORT))
    query = dict(parse_qsl(raw_query, keep_blank_values=True))
    for name in query:
        if name not in _SENTINEL_OPTIONS:
            raise AddressError(f"unknown option {name!r}; there are: {', '.join(_SENTINEL_OPTIONS)}")
    return RedisAddress(
        url,
        _db(db.strip("/") or "0"),
        tuple(sentinels),
        unquote(master),
        {name: query[name] for name in ("username", "password") if name in query},
        {name: query[f"sentinel_{name}"] for name in ("username", "password") if f"sentinel_{name}" in query},
    )


def _db(text: str) -> int:
    if not text.isdecimal():
        raise AddressError(f"{text!r} is no number of a database")
    return int(text)


def hide_password(url: str) -> str:
    """The address without its secrets, to be shown."""
    url = _SECRETS.sub(r"\1***", url)
    scheme, separator, rest = url.partition("://")
    login, at, hosts = rest.partition("@")
    if not at or "/" in login:
        return url
    return f"{scheme}{separator}***@{hosts}"
