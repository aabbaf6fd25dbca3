"""Completions over server-sent events: one connection, taken up again where it was cut.

Like `rollout.calls` without I/O, so that the sync and the async client share every line of logic: a
`Follower` says what to ask for, is fed the lines of the answer, and says how long to pause after a cut.
"""

from __future__ import annotations

import json
import logging
import time

import httpx

from rollout.answers import leave_arrays
from rollout.calls import RETRIED_STATUS, Call, backoff_s, problem_of
from rollout.errors import ApiError, Unavailable
from rollout.operations import Include, asked, warn_of_gaps
from rollout.schema import Rollout

log = logging.getLogger("rollout")

NOT_FOUND = 404
SILENCE_S = 60.0
"""Seconds without even a comment after which a connection counts as dead; the gateway sends one every 15."""


class Follower:
    """Where a reader of completions is, whatever becomes of its connections."""

    def __init__(
        self, cursor: str | None, tag: str | None, include: Include, timeout: float | None, retry_for: float
    ) -> None:
        """
        Args:
            timeout: Seconds after which the reader wants no more; None = no end.
            retry_for: Seconds during which a gateway that cannot be reached is tried again.
        """
        self.cursor = cursor or "0"
        self._params = {"tag": tag, "include": asked(include)}
        self._arrays_only = include == "arrays"
        self._end = None if timeout is None else time.monotonic() + timeout
        self._retry_for = retry_for
        self._failing_since: float | None = None
        self._failures = 0
        self._event, self._data, self._id = "", [], ""

    def left(self) -> float | None:
        """Seconds left; None = no end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def call(self) -> Call:
        """The request to send next."""
        params = {name: value for name, value in self._params.items() if value is not None}
        return Call("GET", "/v1/completions/stream", params | {"cursor": self.cursor})

    def headers(self) -> dict[str, str]:
        """To be sent with it."""
        # The header is what goes on after a cut; "$" is only a place to begin.
        going_on = {} if self.cursor == "$" else {"last-event-id": self.cursor}
        return {"accept": "text/event-stream", "cache-control": "no-store", **going_on}

    def read_timeout(self) -> float:
        """Seconds to wait for the next line."""
        left = self.left()
        return SILENCE_S if left is None else min(SILENCE_S, left + 0.05)

    def refused(self, response: httpx.Response) -> bool:
        """Whether the gateway gives no stream now, so that long-polls must do.

        Raises:
            ApiError: It refuses for another reason.
        """
        self._event, self._data, self._id = "", [], ""
        if response.status_code in RETRIED_STATUS or response.status_code == NOT_FOUND:
            return True
        if not response.is_success:
            raise ApiError(response.status_code, problem_of(response), str(self.call()))
        self._failing_since = None
        self._failures = 0
        return False

    def cut(self, error: httpx.TransportError | None) -> float:
        """Seconds to pause before the next try; `error` is None where the gateway ended the stream.

        Raises:
            Unavailable: The gateway cannot be reached for too long.
        """
        if isinstance(error, httpx.ReadTimeout) and self.over:
            return 0.0
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        seconds = backoff_s(self._failures)
        self._failures += 1
        if now + seconds - self._failing_since > self._retry_for:
            raise Unavailable(
                f"{self.call()} failed for {self._retry_for:g} s (the last: {error!r}). Is the gateway up?"
            )
        return seconds

    def line(self, text: str) -> Rollout | None:
        """Take one line of the answer; the rollout that it completes, if it does."""
        if text:
            name, _, value = text.partition(":")
            value = value.removeprefix(" ")
            if name == "id":
                self._id = value
            elif name == "event":
                self._event = value
            elif name == "data":
                self._data.append(value)
            return None
        event, data, last = self._event, "\n".join(self._data), self._id
        self._event, self._data, self._id = "", [], ""
        # Only now: an event that was cut must come again.
        if last:
            self.cursor = last
        if not data:
            return None
        if event == "completion":
            found = Rollout.model_validate_json(data)
            if self._arrays_only:
                leave_arrays(found)
            return found
        if event == "expired":
            warn_of_gaps([json.loads(data)["id"]], missed=False)
        elif event == "missed":
            warn_of_gaps([], missed=True)
        return None
