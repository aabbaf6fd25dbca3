"""The stream of results: what ended, in order, since a cursor."""

from __future__ import annotations

import re
from collections.abc import Mapping

import redis

from services.state import keys

_CURSOR = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?")
_SCAN = 1000
"""Entries read at once while looking for those of a tenant or with a tag."""


def is_cursor(text: str) -> bool:
    """Whether Redis takes it for a place in a stream: one or two numbers of 64 bits."""
    place = _CURSOR.fullmatch(text)
    return place is not None and all(int(number) < 2**64 for number in place.groups("0"))


def matches(entry: Mapping[str, str], *, tag: str | None, tenant: str | None) -> bool:
    """Whether an entry of the stream is of this tenant and has this tag; None = any."""
    return tenant in (None, entry["tenant"]) and (tag is None or tag in entry["tags"].split(","))


class ResultStream:
    """Reads the stream that `finish` and its like append to."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def tail(self, stream: str = keys.RESULTS) -> str:
        """The cursor of "from now on"."""
        last = self._redis.xrevrange(stream, count=1)
        return last[0][0] if last else "0"

    def length(self) -> int:
        """Results that a cursor can still read."""
        return self._redis.xlen(keys.RESULTS)

    def archive_lag(self) -> int | None:
        """Results after the archive's cursor, counted up to 10,000; None: nobody archives."""
        cursor = self._redis.get(keys.ARCHIVE_CURSOR)
        if cursor is None:
            return None
        return len(self._redis.xrange(keys.RESULTS, min=f"({cursor}", count=10_000))

    def missed(self, cursor: str) -> bool:
        """Whether results after the cursor are forgotten already: their records are past retention."""
        if cursor == "0":
            # From the beginning of what there is: nothing was promised.
            return False
        trimmed = self._redis.get(keys.RESULTS_TRIMMED)
        return trimmed is not None and int(cursor.partition("-")[0]) < int(trimmed)

    def since(
        self, cursor: str, *, limit: int, tag: str | None = None, tenant: str | None = None
    ) -> tuple[list[str], str]:
        """Ids that ended after the cursor, and the cursor after them.

        With a tag or a tenant, entries of others are passed over (and the cursor moves past them).
        """
        ids: list[str] = []
        count = limit
        while len(ids) < limit:
            entries = self._redis.xrange(keys.RESULTS, min=f"({cursor}", count=count)
            for entry_id, fields in entries:
                cursor = entry_id
                if matches(fields, tag=tag, tenant=tenant):
                    ids.append(fields["id"])
                    if len(ids) == limit:
                        break
            if len(entries) < count:
                break
            # Most are somebody else's: fewer and larger reads.
            count = max(limit, _SCAN)
        return ids, cursor
