"""The key of the gateways under test: in the environment of whoever imports this, and for calls by hand."""

from __future__ import annotations

import os
import re
from typing import Any

import httpx
from flask import Flask
from flask.testing import FlaskClient

from rollout.client import KEY_VARIABLE
from services.gateway.context import EXTENSION
from services.state.api_keys import KeyStore, Scope
from services.state.redis import connect
from services.state.tenants import DEFAULT_TENANT

KEY = f"rlt_{'7e57' * 3}_{'7e57' * 16}"
"""Of the scope admin, of the tenant `default`."""
HEADERS = {"Authorization": f"Bearer {KEY}"}
HEADER = f"Authorization: Bearer {KEY}\r\n"
"""For requests written by hand."""

os.environ[KEY_VARIABLE] = KEY


def accept_key(redis_url: str) -> None:
    """Have gateways on that Redis accept the key."""
    with connect(redis_url, max_connections=1) as client:
        KeyStore(client).create(DEFAULT_TENANT, [Scope.ADMIN], text=KEY)


def keyed(app: Flask) -> FlaskClient:
    """A client of a gateway in this process that sends the key, which the gateway accepts from now on."""
    gate = app.extensions[EXTENSION]
    KeyStore(gate.redis).create(DEFAULT_TENANT, [Scope.ADMIN], text=KEY)
    gate.guard.forget()
    client = app.test_client()
    client.environ_base["HTTP_AUTHORIZATION"] = HEADERS["Authorization"]
    return client


PATIENCE_S = 120.0
"""For an answer; `httpx` has five seconds, which a gateway beside other tests may take to begin with one."""


class http:
    """`httpx`'s calls, with the key."""

    @staticmethod
    def request(method: str, url: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        more.setdefault("timeout", PATIENCE_S)
        return httpx.request(method, url, headers={**HEADERS, **(headers or {})}, **more)

    @staticmethod
    def get(url: str, **more: Any) -> httpx.Response:
        return http.request("GET", url, **more)

    @staticmethod
    def post(url: str, **more: Any) -> httpx.Response:
        return http.request("POST", url, **more)

    @staticmethod
    def delete(url: str, **more: Any) -> httpx.Response:
        return http.request("DELETE", url, **more)

    @staticmethod
    def stream(method: str, url: str, headers: dict[str, str] | None = None, **more: Any) -> Any:
        return httpx.stream(method, url, headers={**HEADERS, **(headers or {})}, **more)


def metric(url: str, line: str) -> float | None:
    """The value of one line of `/metrics`, which begins with the name and labels; None = it is not there."""
    text = http.get(f"{url}/metrics").text
    value = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    return float(value[1]) if value else None
