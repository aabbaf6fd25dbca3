"""Results as server-sent events, from `/v1/results/stream`."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import httpx

from rollout.errors import ApiError, Unavailable
from rollout.http import (
    NOT_FOUND,
    RETRIED_STATUS,
    Gateway,
    Polls,
    backoff_s,
    include_of,
    leave_arrays,
    present,
    problem_of,
)
from rollout.schema import Rollout

log = logging.getLogger("rollout")

CALL = "GET /v1/results/stream"


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
        name, place = (fields.get(field, [""])[-1] for field in ("event", "id"))
        yield Event(name, "\n".join(fields.get("data", [])), place)
        fields = {}


class EventReader:
    """Yields results until the time is up, or the gateway gives no stream. Makes a cut connection again."""

    def __init__(self, gateway: Gateway, cursor: str, tag: str | None, include: str, polls: Polls) -> None:
        self.cursor = cursor
        """That of the last event that came whole."""
        self._gateway, self._tag, self._include, self._polls = gateway, tag, include, polls

    async def __aiter__(self) -> AsyncIterator[Rollout]:
        failures, failing_since = 0, 0.0
        while not self._polls.over:
            failure: httpx.TransportError | None = None
            try:
                async with self._open() as response:
                    if response.status_code == NOT_FOUND or response.status_code in RETRIED_STATUS:
                        return
                    if not response.is_success:
                        await response.aread()
                        raise ApiError(response.status_code, problem_of(response), CALL)
                    failures = 0
                    async for event in events(response.aiter_lines()):
                        # Only now: an event that was cut must come again.
                        self.cursor = event.id or self.cursor
                        if (rollout := self._rollout_of(event)) is not None:
                            yield rollout
                        if self._polls.over:
                            return
            except httpx.TransportError as error:
                if isinstance(error, httpx.ReadTimeout) and self._polls.over:
                    return
                failure = error
            failing_since = failing_since if failures else time.monotonic()
            pause = backoff_s(failures)
            failures += 1
            retry_for = self._gateway.retry_for
            if time.monotonic() + pause - failing_since > retry_for:
                raise Unavailable(
                    f"{CALL} failed for {retry_for:g} s (the last: {failure!r}). Is the gateway up?"
                )
            await asyncio.sleep(pause)

    def _open(self) -> AbstractAsyncContextManager[httpx.Response]:
        headers = {"accept": "text/event-stream", "cache-control": "no-store"}
        if self.cursor != "$":  # the header is what goes on after a cut; "$" is only a place to begin
            headers["last-event-id"] = self.cursor
        params = present(tag=self._tag, include=include_of(self._include), cursor=self.cursor)
        return self._gateway.open_stream("/v1/results/stream", params, headers, self._polls.next() + 0.05)

    def _rollout_of(self, event: Event) -> Rollout | None:
        """The rollout that an event brings, if it brings one."""
        if event.name == "completion" and event.data:
            rollout = Rollout.model_validate_json(event.data)
            if self._include == "arrays":
                leave_arrays(rollout)
            return rollout
        if event.name == "expired":
            warn_of_gaps([json.loads(event.data)["id"]], missed=False)
        elif event.name == "missed":
            warn_of_gaps([], missed=True)
        return None


def warn_of_gaps(expired: Iterable[str], missed: bool) -> None:
    """Say what a reader that came too late does not get."""
    if missed:
        log.warning("the cursor is older than what is kept: some results are past their retention")
    for rollout_id in expired:
        log.warning("rollout %s ended, and is past its retention", rollout_id)
