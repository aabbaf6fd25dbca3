"""Turn logs in Redis: a list an attempt, written under the fence of whoever holds the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
from redis.client import NEVER_DECODE

from services.state import keys
from services.state.scripts import Call, Operations, request


class TurnStore:
    """The logs."""

    def __init__(self, client: redis.Redis) -> None:
        self._do = Operations(client, "turns/turns")

    def append(self, rollout_id: str, attempt: int, fence: int, at: int, entries: Sequence[bytes]) -> Call:
        """For `send_many`: add entries from the log's `at`-th on. The answer: see `turns.lua`."""
        return self._do, request("append", *entries, rollout=rollout_id, attempt=attempt, fence=fence, at=at)


def read(client: redis.Redis, rollout_id: str, attempt: int, at: int = 0) -> Any:
    """Entries of an attempt from the `at`-th on, in order; in a pipeline the promise of them."""
    return client.execute_command("LRANGE", keys.turns(rollout_id, attempt), at, -1, **{NEVER_DECODE: True})
