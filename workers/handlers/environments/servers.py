"""Servers of environments: which ones tasks may name, and how they are asked."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from services.settings import settings
from workers.handlers.environments.base import EnvironmentFault, EnvironmentLost

MAX_ANSWER_BYTES = 16 << 20


def address(name: str) -> str:
    """URL of a server of `ROLLOUT_ENVIRONMENT_SERVERS`, without a slash at its end.

    Raises:
        EnvironmentFault: The deployment has none of that name.
    """
    pairs = (pair.partition("=") for pair in settings().environment_servers.split(",") if pair.strip())
    servers = {given.strip(): url.strip().rstrip("/") for given, _, url in pairs}
    if name not in servers:
        known = ", ".join(servers) or "none"
        raise EnvironmentFault(
            f"task.server: there is no server {name!r} (there are: {known}); the operator names servers in "
            "ROLLOUT_ENVIRONMENT_SERVERS"
        )
    return servers[name]


def session(timeout_s: float, **headers: str) -> aiohttp.ClientSession:
    """Connections of one episode, with the cookies that its server gave it."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    jar = aiohttp.CookieJar(unsafe=True)
    return aiohttp.ClientSession(timeout=timeout, cookie_jar=jar, headers=headers)


async def request(
    http: aiohttp.ClientSession, method: str, url: str, body: Any = None, timeout_s: float | None = None
) -> tuple[int, bytes]:
    """Status and body of an answer.

    Raises:
        EnvironmentLost: The server does not answer, or not in time.
        EnvironmentFault: It answers with too much.
    """
    limit = aiohttp.ClientTimeout(total=timeout_s) if timeout_s else http.timeout
    try:
        async with http.request(method, url, json=body, timeout=limit, allow_redirects=False) as reply:
            data = bytearray()
            async for part in reply.content.iter_chunked(1 << 16):
                data += part
                if len(data) > MAX_ANSWER_BYTES:
                    raise EnvironmentFault(f"{url} answers with more than {MAX_ANSWER_BYTES} bytes")
            return reply.status, bytes(data)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EnvironmentLost(f"{url}: {type(error).__name__}: {error}") from error


async def asked(http: aiohttp.ClientSession, method: str, url: str, body: Any = None, **more: Any) -> dict:
    """The JSON object that a server answers with.

    Raises:
        EnvironmentLost: It fails, or does not answer.
        EnvironmentFault: It refuses what the task asks, or answers with something else.
    """
    status, data = await request(http, method, url, body, **more)
    shown = data[:500].decode(errors="replace")
    if status >= 500 or status == 429:
        raise EnvironmentLost(f"{url} answered {status}: {shown}")
    if status != 200:
        raise EnvironmentFault(f"{url} answered {status}: {shown}")
    return object_of(data, url)


def object_of(data: bytes | str, url: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        EnvironmentFault: It is none.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EnvironmentFault(f"{url} answered with no JSON: {error}") from error
    if not isinstance(value, dict):
        raise EnvironmentFault(f"{url} answered with {value!r:.200}, not with an object")
    return value
