"""What the gateway's door turned away, before or beside its routes: counted, and said once in a while."""

from __future__ import annotations

import time

import structlog
from prometheus_client import CollectorRegistry, Counter

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
