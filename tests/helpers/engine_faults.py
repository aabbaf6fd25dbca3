"""Faults of the fake engine, switched on by kind and counted down by call."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

KINDS = {
    "die": "the engine ends in the middle of a call, after `tokens` sampled ids",
    "abort": "the engine ends the call itself after `tokens` sampled ids",
    "hang": "a call is accepted and never answered (a stream: not beyond `tokens` ids), with `health` nor is "
    "/health",
    "error": "a call is answered with `status`",
    "truncated": "the answer's JSON ends in the middle; of a stream the event behind `tokens` ids",
    "cut": "the connection closes in the middle of the answer; of a stream behind `tokens` ids",
    "slow": "every step takes `factor` times as long",
    "unhealthy": "/health answers 503",
    "lie": "an answer is the lie `name` (`engine_lies.LIES`); `*` is each of them in turn",
}


class EngineDied(ConnectionError):
    """The fake engine has died; it answers nothing any more."""


@dataclass
class Fault:
    """One fault that is switched on."""

    kind: str
    calls: int | None = None
    """How many more calls it meets; None = all."""
    tokens: int = 1
    status: int = 500
    factor: float = 10.0
    health: bool = False
    name: str = "*"


class Faults:
    """At most one fault of each kind at a time."""

    def __init__(self) -> None:
        self._active: dict[str, Fault] = {}

    def set(self, kind: str, **options: Any) -> Fault:
        """Switch a fault on; `calls=0` or the kind `none` (all of them) switches off.

        Raises:
            ValueError: Unknown kind or option.
        """
        if kind == "none":
            self._active.clear()
            return Fault(kind)
        allowed = {field.name for field in fields(Fault)} - {"kind"}
        if kind not in KINDS or not set(options) <= allowed:
            raise ValueError(
                f"no fault {kind!r} with {sorted(options)}; kinds: {', '.join(KINDS)}, none; "
                f"options: {', '.join(sorted(allowed))}"
            )
        fault = self._active[kind] = Fault(kind, **options)
        return fault

    def take(self, kind: str) -> Fault | None:
        """The fault, if this call is one that meets it."""
        fault = self.peek(kind)
        if fault is not None and fault.calls is not None:
            fault.calls -= 1
        return fault

    def peek(self, kind: str) -> Fault | None:
        """The fault while it is on, without counting."""
        fault = self._active.get(kind)
        return None if fault is None or fault.calls == 0 else fault
