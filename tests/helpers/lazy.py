"""Modules that take long to import, for tests whose file most processes collect and one runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazy:
    """A module that is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # plug-ins of pytest ask all that a test file has for their marks
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
