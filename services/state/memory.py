"""How full Redis is, and what is refused before it is full.

New work is refused while there is room for what is under way to end: a full Redis takes no results.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import redis

REFUSE_AT = 0.8
"""Share of the memory from which on new work is refused, and acknowledged results are freed at once."""
RESULTS_SHARE = 0.5
"""Of the memory, for results of ended rollouts where no limit is set."""
LOOK_EVERY_S = 0.2
COPIES = 2
"""Of what is submitted: as an argument it is held by Lua as well, until its collector comes."""


@dataclass(frozen=True)
class Memory:
    """What Redis uses, and what it may, in bytes."""

    used: int
    limit: int
    """`maxmemory`; without one the memory of its machine, whose kernel ends it. 0 = it does not say."""

    @property
    def scarce(self) -> bool:
        """Whether no new work is to come."""
        return self.limit > 0 and self.used >= REFUSE_AT * self.limit


def read(client: redis.Redis) -> Memory:
    """As Redis says now."""
    info = client.info("memory")
    limit = info.get("maxmemory") or info.get("total_system_memory") or 0
    return Memory(int(info.get("used_memory", 0)), int(limit))


class StoreFull(redis.OutOfMemoryError):
    """New work is refused for want of memory. Not an outage: nothing that was accepted is in danger."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(
            f"Redis uses {memory.used >> 20} of {memory.limit >> 20} MiB, and takes no new work from "
            f"{REFUSE_AT:.0%} on; rollouts under way go on. Acknowledge results that you have read, or give "
            "it more memory (maxmemory, ROLLOUT_REDIS_MAX_MEMORY_MB)"
        )


class Room:
    """Whether there is room for new work; asks Redis a few times a second at most."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._looked = float("-inf")
        self._memory = Memory(0, 0)

    def require(self, size: int) -> None:
        """Take so many bytes, about, if there is room.

        Raises:
            StoreFull: There is none.
        """
        if time.monotonic() - self._looked > LOOK_EVERY_S:
            self._memory, self._looked = read(self._redis), time.monotonic()
        after = replace(self._memory, used=self._memory.used + COPIES * size)
        if after.scarce:
            raise StoreFull(after)
        self._memory = after
