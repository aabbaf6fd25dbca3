"""Checks tasks against what the workers announced of their handlers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import islice

from jsonschema import Draft202012Validator

from rollout.schema import FieldError, HandlerInfo, RolloutRequest
from services.gateway.problems import MAX_ERRORS, MAX_MESSAGE, ApiProblem, short
from services.state.fleet import FleetStore

CACHE_S = 1.0
"""Seconds for which the list of handlers is not read again."""


def check_sizes(requests: Sequence[RolloutRequest], most: int, *, single: bool, n: int | None = None) -> None:
    """Refuse groups of which a reader would get more bytes than that, for each member comes with its request.

    Args:
        n: Members of each group; None = as the requests say.

    Raises:
        ApiProblem: 400 naming the fields.
    """
    errors = []
    for position, request in enumerate(requests):
        members = n or request.n
        size = len(request.model_dump_json()) if members > 1 else 0
        if size * members > most:
            message = (
                f"{members} rollouts of a request of {size} bytes are {size * members} bytes to read, and "
                f"{most} are allowed: take a smaller n, or have the operator raise ROLLOUT_MAX_GROUP_BYTES"
            )
            errors.append(FieldError(field="n" if single else f"requests.{position}.n", message=message))
    if errors:
        raise ApiProblem(400, "Invalid request", f"{errors[0].field}: {errors[0].message}", errors)


class TaskChecker:
    """Refuses unknown handlers and tasks that do not fit, before anything is enqueued."""

    def __init__(self, fleet: FleetStore) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._handlers: dict[str, HandlerInfo] = {}
        self._validators: dict[str, tuple[HandlerInfo, Draft202012Validator]] = {}

    def handlers(self, *, fresh: bool = False) -> dict[str, HandlerInfo]:
        """Known handlers by name."""
        with self._lock:
            if fresh or time.monotonic() - self._read_at > CACHE_S:
                self._handlers = self._fleet.handlers()
                self._read_at = time.monotonic()
            return self._handlers

    def _validator(self, info: HandlerInfo) -> Draft202012Validator:
        known = self._validators.get(info.name)
        if known is None or known[0] != info:
            known = self._validators[info.name] = (info, Draft202012Validator(info.task_schema))
        return known[1]

    def check(self, requests: Iterable[RolloutRequest], *, single: bool) -> None:
        """Raise unless every request names a known handler and fits its task schema.

        Raises:
            ApiProblem: 400 naming the fields; 503 when no worker has announced any handler yet.
        """
        errors: list[FieldError] = []
        handlers = self.handlers()
        for position, request in enumerate(requests):
            prefix = "" if single else f"requests.{position}."
            info = handlers.get(request.handler)
            if info is None:
                # It may have been announced a moment ago.
                handlers = self.handlers(fresh=True)
                info = handlers.get(request.handler)
            if not handlers:
                raise ApiProblem(
                    503,
                    "No handlers",
                    "no worker has announced a handler yet; start the fleets",
                    retry_after_s=2,
                )
            if info is None:
                known = ", ".join(handlers)
                message = f"unknown handler {request.handler!r}; there are: {known}"
                errors.append(FieldError(field=f"{prefix}handler", message=message))
                continue
            if info.task_schema:
                # Lazily: of a list of a million wrong items each would be an error with a text of its own.
                for found in islice(self._validator(info).iter_errors(request.task), MAX_ERRORS):
                    path = "".join(f".{part}" for part in found.absolute_path)
                    errors.append(
                        FieldError(field=f"{prefix}task{path}", message=short(found.message, MAX_MESSAGE))
                    )
            if len(errors) >= MAX_ERRORS:
                break
        if errors:
            raise ApiProblem(400, "Invalid request", f"{errors[0].field}: {errors[0].message}", errors)
