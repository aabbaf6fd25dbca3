"""The datasets that are known: what they are, where they come from, and what of them was tried here."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Known(BaseModel):
    """A dataset of the catalogue. Nothing of it comes along but this."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    handler: str
    form: str
    """`rows`, `directories`, `registry`, `generated` or `environment`."""
    origin: str
    licence: str
    """As its authors say; look yourself before you train on it."""
    checked: str
    """What of it was tried here, and how."""
    get: list[str]
    """Commands, or words where there is none."""
    fields: dict[str, str] = Field(default_factory=dict)
    sample: dict[str, Any] = Field(default_factory=dict)
    """A row as the set has it."""
    map: str | None = None
    """The field map that its rows are read through; None = they are taken as they are."""
    images: str | None = None
    """Which images its tasks need; None = none of their own."""


@cache
def catalogue() -> tuple[Known, ...]:
    """All datasets that are known, in the order of the page."""
    entries = json.loads(Path(__file__).with_name("catalogue.json").read_text("utf-8"))
    return tuple(map(Known.model_validate, entries))
