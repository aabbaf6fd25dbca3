"""What is looked at before any route: whether a web page of another site has its reader's browser call.

A browser sends such a call with whatever the page likes in it, short of a header of ours or a body of JSON:
for those it asks the server first (CORS), and this one allows nobody. So nothing but JSON is taken. A page
whose name was made to point here (DNS rebinding) is of the same site to the browser, and gives itself away by
its name in `Host`.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from flask import Flask, current_app, request

from services.gateway import refusals
from services.gateway.problems import ApiProblem
from services.gateway.waiting import waiter

ELSEWHERE = ("cross-site", "same-site")
"""Values of `Sec-Fetch-Site` (Fetch Metadata Request Headers, 2.2) that mean a page of another origin."""
FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""What a page may send without asking first (Fetch, CORS-safelisted request-header)."""
MAX_OPEN = 4096
"""Bytes of a body that is taken from anybody."""
SHOWN = 200
"""Characters of a header that are repeated."""


def register(app: Flask, *, names: Collection[str] | None) -> None:
    """Have every call looked at.

    Args:
        names: Host names that callers may use, beside addresses and this machine's own; None = any, where a
            key is needed that no page has.
    """

    @app.before_request
    def _look() -> None:
        if names is not None:
            _check_host(names)
        view = current_app.view_functions.get(request.endpoint or "")
        is_open = getattr(view, "scope", "") is None
        if is_open and request.method in ("GET", "HEAD"):
            return  # and says nothing of the service
        _check_origin()
        if request.method not in ("GET", "HEAD", "OPTIONS"):
            _check_type(getattr(getattr(view, "operation", None), "takes", None))
        if is_open and ("Transfer-Encoding" in request.headers or (request.content_length or 0) > MAX_OPEN):
            detail = f"who has no key yet may send {MAX_OPEN} bytes, with a Content-Length"
            raise ApiProblem(413, "Request Entity Too Large", detail)


def register_bodies(app: Flask) -> None:
    """Have bodies come in without a thread, of calls that have been let in."""

    @app.before_request
    def _whole() -> None:
        mine = waiter()
        if request.endpoint is None or not mine.parks:
            return  # another server has its own way to take it
        if "Transfer-Encoding" in request.headers:
            detail = "send a Content-Length: a body whose length nobody knows is not taken"
            raise ApiProblem(411, "Length required", detail, headers={"Connection": "close"})
        length, most = request.content_length or 0, app.config["MAX_CONTENT_LENGTH"]
        if length > most:
            detail = f"the body is larger than {most} bytes; send several calls"
            raise ApiProblem(413, "Request Entity Too Large", detail)
        if length:
            mine.need_body()


def own_names(*hosts: str) -> set[str]:
    """Names of this machine, and those given."""
    machine = socket.gethostname()
    names = (machine, machine.split(".")[0], *hosts)
    return {name.strip().lower().rstrip(".") for name in names if name.strip()}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse(reason: str, title: str, detail: str, status: int = 403) -> ApiProblem:
    refusals.refuse(reason, detail, path=request.path)
    return ApiProblem(status, title, detail)


def _check_host(names: Collection[str]) -> None:
    text, host = request.headers.get("Host", ""), ""
    try:
        host = (urlsplit(f"//{text}").hostname or "").rstrip(".")
        ip_address(host)
        return  # no page can be of this address but one that is served there
    except ValueError:
        if not text or host == "localhost" or host.endswith(".localhost") or host in names:
            return
    detail = (
        f"the Host header names {text[:SHOWN]!r}, which is not known here; if it is yours, add it to "
        "ROLLOUT_GATEWAY_NAMES"
    )
    raise _refuse(refusals.HOST, "Misdirected request", detail, 421)


def _check_origin() -> None:
    site, origin = request.headers.get("Sec-Fetch-Site", ""), request.headers.get("Origin")
    same_site = {f"{scheme}://{request.headers.get('Host', '')}" for scheme in ("http", "https")}
    if (origin is None or origin in same_site) and site.lower() not in ELSEWHERE:
        return
    shown = origin[:SHOWN] if origin is not None else site[:SHOWN]
    raise _refuse(refusals.BROWSER, "Other site", f"web pages of other sites ({shown!r}) may not call")


def _check_type(takes: str | None) -> None:
    if request.mimetype == takes if takes else request.is_json:
        return
    has_body = bool(request.content_length) or "Transfer-Encoding" in request.headers
    # Some clients name a type of bodies that they do not send.
    if has_body or request.mimetype in FORMS:
        detail = f"send Content-Type: {takes or 'application/json'}"
        raise _refuse(refusals.TYPE, "Unsupported media type", detail, 415)
