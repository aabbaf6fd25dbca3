"""What the ids of tokenizers stand for, kept for the page."""

from __future__ import annotations

from collections.abc import Callable

import redis

from services.state import keys
from services.state.memory import Room

KEEP_S = 30 * 86400
"""After a process last had the tokenizer; each says so once a day."""


class Vocabularies:
    """The texts of tokenizers' ids, in Redis."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def keep(self, tokenizer: str, make: Callable[[], bytes]) -> None:
        """Keep the texts of a tokenizer's ids; `make()` makes them, where they are not kept.

        Args:
            tokenizer: As `Trajectory.tokenizer` has it, which ends in the digest.

        Raises:
            redis.RedisError: Redis does not answer, or has no room.
        """
        name = keys.vocabulary(tokenizer.rpartition("@")[2])
        if not self._redis.expire(name, KEEP_S):
            texts = make()
            Room(self._redis).require(len(texts))
            self._redis.set(name, texts, ex=KEEP_S)
