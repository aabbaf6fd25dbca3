"""What is looked at in a submission before anything is enqueued: rights, tasks, sizes, webhooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from flask import current_app
from jsonschema import Draft202012Validator

from rollout.image_names import images_in, is_below, is_path, local_name
from rollout.schema import FieldError, HandlerInfo, RolloutRequest, Stage
from services.gateway.auth import caller
from services.gateway.problems import MAX_ERRORS, MAX_MESSAGE, ApiProblem, refuse, short
from services.settings import Settings
from services.state.api_keys import Scope
from services.state.fleet import FleetStore
from services.webhook_address import AddressRefused, AllowedAddresses

CACHE_S = 1.0
"""Seconds for which the list of handlers is not read again."""
AUTO_RUNTIME, BEST_RUNTIME = "auto", "apptainer"

Named = Sequence[tuple[str, RolloutRequest]]
"""Requests, each with what comes before its fields' names in an error."""


def check_submission(named: Named, n: int | None = None) -> None:
    """Refuse requests of the caller that could not be worked on.

    Args:
        n: Members of each group; None = as the requests say.

    Raises:
        ApiProblem: 403 or 400 naming the fields; 503 when no worker has announced any handler yet.
    """
    gate = current_app.extensions["rollout"]
    # First what the tenant may use: whether another handler exists is none of its business.
    refuse(not_permitted(named, gate.tasks.handlers(), gate.settings), 403, "Not permitted")
    gate.tasks.check(named)
    refuse(gate.policies.unfit(named))
    refuse(_too_large(named, gate.settings.max_group_bytes, n))
    refuse(_undeliverable(named, gate.settings, gate.webhook_addresses))
    refuse(_without_capture(named, gate.tasks.handlers(), gate.settings))
    refuse(_without_forks(named, gate.tasks.handlers()))


class TaskChecker:
    """Refuses unknown handlers, and tasks that do not fit what the workers announced of theirs."""

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

    def check(self, named: Named) -> None:
        """Raise unless every request names a known handler and fits its task schema.

        Raises:
            ApiProblem: 400 naming the fields; 503 when no worker has announced any handler yet.
        """
        handlers = self.handlers()
        if any(request.handler not in handlers for _, request in named):
            # It may have been announced a moment ago.
            handlers = self.handlers(fresh=True)
        if named and not handlers:
            detail = "no worker has announced a handler yet; start the fleets"
            raise ApiProblem(503, "No handlers", detail, retry_after_s=2)
        refuse(self._unfit(named, handlers))

    def _unfit(self, named: Named, handlers: Mapping[str, HandlerInfo]) -> Iterator[FieldError]:
        for prefix, request in named:
            info = handlers.get(request.handler)
            if info is None:
                message = f"unknown handler {request.handler!r}; there are: {', '.join(handlers)}"
                yield FieldError(field=f"{prefix}handler", message=message)
            elif info.task_schema:
                # Lazily: of a list of a million wrong items each would be an error with a text of its own.
                for error in islice(self._validator(info).iter_errors(request.task), MAX_ERRORS):
                    path = "".join(f".{part}" for part in error.absolute_path)
                    yield FieldError(field=f"{prefix}task{path}", message=short(error.message, MAX_MESSAGE))

    def _validator(self, info: HandlerInfo) -> Draft202012Validator:
        known = self._validators.get(info.name)
        if known is None or known[0] != info:
            known = self._validators[info.name] = (info, Draft202012Validator(info.task_schema))
        return known[1]


def not_permitted(
    named: Named, handlers: Mapping[str, HandlerInfo], settings: Settings
) -> Iterator[FieldError]:
    """Handlers, policies, images and runtimes that the caller's tenant, or nobody here, may use.

    The sandbox host decides; here it is said earlier, and which field it is.
    """
    me = caller()

    def require(kind: str, field: str, value: str) -> Iterator[FieldError]:
        if not me.tenant.may_use(kind, value):
            allowed = ", ".join(getattr(me.tenant, kind)) or "none"
            message = f"tenant {me.tenant.name!r} may not use {value!r}; allowed {kind}: {allowed}"
            yield FieldError(field=field, message=message)

    for prefix, request in named:
        yield from require("handlers", f"{prefix}handler", request.handler)
        yield from require("policies", f"{prefix}policy", request.policy)
        info = handlers.get(request.handler)
        if info is not None and info.uses_sandbox:
            images = images_in(request.task)
            for field, image in images.items():
                if is_path(image) and not is_below(image, settings.sandbox_image_roots):
                    yield FieldError(field=f"{prefix}task.{field}", message=_no_path(image, settings))
                else:
                    yield from require("images", f"{prefix}task.{field}", local_name(image))
            if not images:
                yield from require("images", f"{prefix}handler", info.image or settings.sandbox_image)
        runtime, own = request.sandbox_runtime, settings.sandbox_runtime
        if runtime is None:
            continue
        ours = runtime == own or (own == AUTO_RUNTIME and runtime == BEST_RUNTIME)
        if not ours and me.tenant.runtimes is None and not me.key.may(Scope.ADMIN):
            message = f"the deployment runs {own!r}, and tenant {me.tenant.name!r} was not given {runtime!r}"
            yield FieldError(field=f"{prefix}sandbox_runtime", message=message)
        yield from require("runtimes", f"{prefix}sandbox_runtime", runtime)


def _no_path(image: str, settings: Settings) -> str:
    roots = settings.sandbox_image_roots or "none"
    return (
        f"{image!r} is a path, and images have names here or lie below ROLLOUT_SANDBOX_IMAGE_ROOTS={roots}; "
        "give a name (`rollout images build NAME SOURCE` makes the image)"
    )


def _too_large(named: Named, most: int, n: int | None) -> Iterator[FieldError]:
    """Groups of which a reader would get more bytes than that, for each member comes with its request."""
    for prefix, request in named:
        members = n or request.n
        size = len(request.model_dump_json()) if members > 1 else 0
        if size * members > most:
            message = (
                f"{members} rollouts of a request of {size} bytes are {size * members} bytes to read, and "
                f"{most} are allowed: take a smaller n, or have the operator raise ROLLOUT_MAX_GROUP_BYTES"
            )
            yield FieldError(field=f"{prefix}n", message=message)


def _undeliverable(named: Named, settings: Settings, addresses: AllowedAddresses) -> Iterator[FieldError]:
    """Webhooks that could never be delivered."""
    for prefix, request in named:
        if request.webhook is None:
            continue
        message = "this service signs no webhooks: the operator has set no ROLLOUT_WEBHOOK_SECRET"
        if settings.webhook_secret.get_secret_value():
            try:
                addresses.check_url(request.webhook.url)
                continue
            except AddressRefused as error:
                message = str(error)
        yield FieldError(field=f"{prefix}webhook.url", message=message)


def _without_capture(
    named: Named, handlers: Mapping[str, HandlerInfo], settings: Settings
) -> Iterator[FieldError]:
    """Agents whose calls nobody would answer. Whether a harness can be started, only its worker knows."""
    for prefix, request in named:
        if request.agent is None:
            continue
        info = handlers.get(request.handler)
        if not settings.capture_url:
            message = (
                "no program can drive a rollout here: the operator has set no ROLLOUT_CAPTURE_URL; leave "
                "`agent` out for the service's own loop"
            )
        elif info and not info.uses_model:
            message = f"handler {info.name!r} asks no model, so no program can drive it; leave `agent` out"
        else:
            continue
        yield FieldError(field=f"{prefix}agent", message=message)


def _without_forks(named: Named, handlers: Mapping[str, HandlerInfo]) -> Iterator[FieldError]:
    """Checkpoints from which nothing could go on."""
    for prefix, request in named:
        info = handlers.get(request.handler)
        if request.checkpoints == "never":
            continue
        if request.agent is not None:
            message = "the program of `agent` keeps the conversation to itself; leave `checkpoints` out"
        else:
            message = info and why_not_forked(info)
        if message:
            yield FieldError(field=f"{prefix}checkpoints", message=message)


def why_not_forked(info: HandlerInfo) -> str | None:
    """Why nothing goes on from turns of a handler's rollouts; None = something may."""
    if not info.uses_model:
        return f"handler {info.name!r} asks no model, so its rollouts have no turns"
    if Stage.RUN not in info.repeatable:
        return f"RUN of handler {info.name!r} is not repeatable, so nobody can go on with its turns"
    if info.survives != "files":
        return f"to go on with turns of handler {info.name!r} takes more than the files of a sandbox"
    return None
