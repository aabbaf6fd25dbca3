"""Counts of what the gateway's door turned away, before or beside its routes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

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
