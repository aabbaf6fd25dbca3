"""A reader of `GET /v1/live`, in a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.helpers.keys import HEADERS
from tests.helpers.stack import wait_until

PATIENCE_S = 60.0


class Live:
    """A stream that is read until it is closed: (when, name, data) of each event; comments have no name."""

    def __init__(self, url: str, headers: dict[str, str] = HEADERS, **params: str) -> None:
        self.events: list[tuple[float, str, Any]] = []
        self.over = False
        self._client = httpx.Client(timeout=httpx.Timeout(PATIENCE_S, read=None))
        request = self._client.build_request("GET", f"{url}/v1/live", params=params, headers=headers)
        self.response = self._client.send(request, stream=True)
        self.response.raise_for_status() if self.response.is_success else self.response.read()
        self._thread = threading.Thread(target=self._read, daemon=True)
        if self.response.is_success:
            self._thread.start()

    def _read(self) -> None:
        name = ""
        try:
            for line in self.response.iter_lines():
                kind, _, text = line.partition(": ")
                if kind == "event":
                    name = text
                elif kind == "data":
                    self.events.append((time.time(), name, json.loads(text)))
                elif not kind and text:
                    self.events.append((time.time(), "", text))
        except (httpx.HTTPError, OSError):
            pass
        self.over = True

    def all(self, name: str) -> list[Any]:
        """What events of a name said."""
        return [data for _, one, data in list(self.events) if one == name]

    def until(self, name: str, fits: Callable[[Any], bool] = lambda data: True) -> Any:
        """Wait for an event that fits; what it says."""

        def look() -> list[Any]:
            return [data for data in self.all(name) if fits(data)]

        try:
            wait_until(look, PATIENCE_S, f"an event {name}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}; there were {self.events}") from None
        return look()[0]

    def text(self) -> str:
        """What the output events said together."""
        return "".join(data["text"] for data in self.all("output"))

    def close(self) -> None:
        self.response.close()
        self._client.close()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
