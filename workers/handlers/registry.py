"""Handlers by name: entry points of the group `rollout.handlers`, and `ROLLOUT_HANDLERS`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

import structlog

from rollout.schema import RolloutRequest
from services.settings import Settings
from workers.errors import HandlerError, UnknownHandler
from workers.handlers.base import AgentHandler

log = structlog.get_logger("handlers")

GROUP = "rollout.handlers"


def _load(target: str) -> list[type[AgentHandler]]:
    module, _, attribute = target.partition(":")
    if not attribute:
        raise HandlerError(f"ROLLOUT_HANDLERS: {target!r} is not of the form 'module:Class'")
    loaded = getattr(importlib.import_module(module), attribute)
    return loaded if isinstance(loaded, list) else [loaded]


class Registry:
    """The handlers of this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._handlers: dict[str, AgentHandler] = {}
        for point in entry_points(group=GROUP):
            try:
                self.add(point.load())
            except Exception:
                # One team's broken handler must not keep the others' from running.
                log.exception("handler could not be loaded", entry_point=point.value)
        for target in filter(None, (part.strip() for part in settings.handlers.split(","))):
            for handler in _load(target):
                self.add(handler)

    def add(self, handler: type[AgentHandler]) -> None:
        """Register a handler class; a later one of the same name replaces an earlier one.

        Raises:
            HandlerError: It is no `AgentHandler`, or has no name.
        """
        if not (isinstance(handler, type) and issubclass(handler, AgentHandler)):
            raise HandlerError(f"{handler!r} is not a subclass of AgentHandler")
        if not getattr(handler, "name", ""):
            raise HandlerError(f"{handler.__qualname__} has no `name`")
        if handler.survives not in ("files", "nothing"):
            raise HandlerError(
                f"{handler.__qualname__}.survives is {handler.survives!r}: not files, not nothing"
            )
        self._handlers[handler.name] = handler()

    def get(self, name: str) -> AgentHandler:
        """The handler of that name.

        Raises:
            UnknownHandler: This worker does not carry it.
        """
        try:
            return self._handlers[name]
        except KeyError:
            known = ", ".join(sorted(self._handlers)) or "none"
            raise UnknownHandler(
                f"this worker has no handler {name!r} (it has: {known}); "
                "install its package here or name it in ROLLOUT_HANDLERS"
            ) from None

    def of(self, request: RolloutRequest) -> AgentHandler:
        """The handler of a request, whose turns a program drives where it says so.

        Raises:
            UnknownHandler: As `get`.
        """
        handler = self.get(request.handler)
        if request.agent is None:
            return handler
        from workers.harnesses.drive import Driven

        return Driven(handler, request, self._settings)

    def all(self) -> list[AgentHandler]:
        return list(self._handlers.values())
