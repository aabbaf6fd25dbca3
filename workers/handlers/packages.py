"""Packages that only some handlers need: a clear word where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from workers.errors import HandlerError


def require(package: str, *, extra: str, handler: str) -> None:
    """Make sure that a package is installed, without the cost of its import.

    Raises:
        HandlerError: It is not; the message says how to get it.
    """
    if find_spec(package) is None:
        raise HandlerError(
            f"the handler {handler!r} needs the package {package!r}, which this worker does not have: "
            f"pip install 'rollout-service[{extra}]'"
        )
