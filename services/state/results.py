"""The stream of completions: what ended, in order, since a cursor."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import redis

from services.state import keys

CURSOR = re.compile(r"\d{1,20}(-\d{1,20})?")
_SCAN = 1000
"""Entries read at once while looking for those with a tag."""


class CompletionStore:
    """Reads the stream that `finish` and its like append to."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def tail(self) -> str:
        """The cursor of "from now on"."""
        last = self._redis.xrevrange(keys.COMPLETIONS, count=1)
        return last[0][0] if last else "0"

    def since(self, cursor: str, *, limit: int, tag: str | None = None) -> tuple[list[str], str]:
        """Ids that ended after the cursor, and the cursor after them.

        With a tag, entries without it are passed over (and the cursor moves past them).
        """
        found: list[str] = []
        while len(found) < limit:
            count = limit if tag is None else _SCAN
            entries = self._redis.xrange(keys.COMPLETIONS, min=f"({cursor}", count=count)
            for entry_id, fields in entries:
                cursor = entry_id
                if tag is None or tag in fields["tags"].split(","):
                    found.append(fields["id"])
                    if len(found) == limit:
                        break
            if len(entries) < count:
                break
        return found, cursor


class CompletionWatcher:
    """Wakes waiting threads when something ends: one Redis connection for all waiters of a process."""

    BLOCK_MS = 1000

    def __init__(self, connect: Callable[[], redis.Redis]) -> None:
        self._connect = connect
        self._changed = threading.Condition()
        self._generation = 0
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        with self._changed:
            if self._thread is None:
                # Started by the first waiter and not at construction: gunicorn forks after that.
                self._thread = threading.Thread(target=self._run, name="completions", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        client = self._connect()
        last = "$"
        while True:
            try:
                reply = client.xread({keys.COMPLETIONS: last}, block=self.BLOCK_MS, count=1000)
                if reply:
                    last = reply[0][1][-1][0]
            except redis.RedisError:
                # Waiters look for themselves once a second, so nothing is missed meanwhile.
                time.sleep(1.0)
            # Also without news: between two reads with "$" an entry can slip through.
            with self._changed:
                self._generation += 1
                self._changed.notify_all()

    def wait_for(self, look: Callable[[], object], timeout_s: float) -> object:
        """Call `look` until it answers something true or the time is up; returns its last answer."""
        deadline = time.monotonic() + timeout_s
        generation = self._generation
        answer = look()
        if answer or timeout_s <= 0:
            return answer
        self._start()
        while True:
            with self._changed:
                left = deadline - time.monotonic()
                if left > 0 and self._generation == generation:
                    self._changed.wait(left)
                generation = self._generation
            answer = look()
            if answer or time.monotonic() >= deadline:
                return answer
