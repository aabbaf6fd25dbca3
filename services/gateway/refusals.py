"""What the gateway's door turned away, before or beside its routes: counted, and said once in a while."""

from __future__ import annotations

import socket
import time
from http import HTTPStatus

import structlog
from gunicorn.util import write_nonblock
from prometheus_client import CollectorRegistry, Counter

from rollout.schema import Problem
from services.gateway.problems import MAX_DETAIL, short

log = structlog.get_logger("gateway")
registry = CollectorRegistry()
REFUSED = Counter(
    "rollout_gateway_refused_total",
    "Calls and connections turned away at the door.",
    ["reason"],
    registry=registry,
)

SLOW = "slow"
"""Head or body did not come in time."""
ADDRESS = "address"
"""One address had as many connections as it may."""
FULL = "full"
"""Idle or half-sent, and closed to make room for others."""
HEAD = "head"
"""The head of a request was too large."""
KEY = "key"
"""No key, or none that is valid."""
SCOPE = "scope"
"""A key that may not do this."""
BROWSER = "browser"
"""A web page of another site had a browser make the call."""
HOST = "host"
"""The Host header names somebody else."""
TYPE = "type"
"""A body that is not JSON."""

for _reason in (SLOW, ADDRESS, FULL, HEAD, KEY, SCOPE, BROWSER, HOST, TYPE):
    REFUSED.labels(_reason)
QUIET_S = 10.0
"""Seconds between two lines of a reason: who attacks must not fill the log."""
_logged_at: dict[str, float] = {}


def refuse(reason: str, detail: str, **shown: str) -> None:
    """Count a refusal, and log it unless one for the same reason was just before."""
    REFUSED.labels(reason).inc()
    now = time.monotonic()
    if now - _logged_at.get(reason, float("-inf")) >= QUIET_S:
        _logged_at[reason] = now
        log.warning("refused", reason=reason, detail=detail, **shown)


def answer(status: int, detail: str) -> bytes:
    """A whole answer to what no route will see: a problem document, behind which the connection ends."""
    phrase = HTTPStatus(status).phrase
    body = Problem(title=phrase, status=status, detail=short(detail, MAX_DETAIL)).model_dump_json().encode()
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/problem+json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def write_error(sock: socket.socket, status: int, reason: str, message: str) -> None:
    """What gunicorn calls when it refuses a request by itself; its own function of this name writes HTML."""
    write_nonblock(sock, answer(status, message or reason))
