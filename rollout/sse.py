"""Server-sent events, as `/v1/results/stream` gives them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple


class Event(NamedTuple):
    """One server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    name: str
    data: str
    id: str
    """Where a reader goes on after it; empty = where it was."""


async def events(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    """The events of an answer; also empty ones, which are comments that keep the connection alive."""
    fields: dict[str, list[str]] = {}
    async for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
            continue
        last = {name: fields.get(name, [""])[-1] for name in ("event", "id")}
        yield Event(last["event"], "\n".join(fields.get("data", [])), last["id"])
        fields = {}
