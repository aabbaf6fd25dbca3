"""Jobs of the compatible APIs: which rollout a caller's own id stands for, and for how long.

Unlike the id of a rollout, a job's id may be used again: trainers number their jobs anew in every epoch. So
it stands for one rollout until that was answered for, or ended, and then for a while in which a retry may
come; for one that was dropped or cancelled no longer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import redis

from services.state import keys
from services.state.redis import now

REPLAY_S = 600.0
"""Seconds for which a job's result is given again to who asks with the same id: a retry of a cut answer."""
SLACK_S = 3600.0
"""Seconds past its deadline for which a job that nobody was answered for is remembered."""


@dataclass(frozen=True)
class Job:
    """A job and its rollout."""

    rollout_id: str
    body: str
    """Digest of what was asked for, to tell a retry from another job with the same id."""
    ended: bool = False
    """Whether its rollout had ended before this call."""


class JobStore:
    """Jobs in Redis, one key each."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    @staticmethod
    def key(tenant: str, *parts: str) -> str:
        """Where a job is kept: by what its id consists of, which may be any text."""
        return keys.job(tenant, digest_of(*parts))

    def claim(self, key: str, rollout_id: str, body: str, deadline_s: float) -> Job:
        """The rollout that the job stands for: the given one if it is new or over.

        It is over some time after somebody was told of its end, or after the end: whoever asked may be gone,
        and a trainer that is started again counts from 0. What was dropped, or is cancelled, is over at once.
        """

        def take(pipe: redis.client.Pipeline) -> Job:
            job: dict[str, str] = pipe.hgetall(key)  # type: ignore[assignment]
            at = now(pipe)
            record = keys.record(job.get("rollout", ""))
            finished, drop, cancel = pipe.hmget(record, "finished", "drop", "cancel")
            pipe.multi()
            until = float(job.get("until") or (int(finished) / 1000 + REPLAY_S if finished else "inf"))
            if job and until > at and not cancel and not (finished and drop == "1"):
                return Job(job["rollout"], job["body"], ended=finished is not None)
            pipe.delete(key)
            pipe.hset(key, mapping={"rollout": rollout_id, "body": body})
            pipe.expire(key, int(deadline_s + SLACK_S))
            return Job(rollout_id, body)

        return self._redis.transaction(take, key, value_from_callable=True)  # type: ignore[return-value]

    def find(self, key: str) -> str | None:
        """The rollout that a job stands for, or None."""
        rollout_id, until = self._redis.hmget(key, "rollout", "until")
        return rollout_id if rollout_id and float(until or "inf") > now(self._redis) else None

    def answered(self, key: str, rollout_id: str, keep_s: float) -> bool:
        """Note that somebody was told how the job ended; it stands for its rollout for so much longer.

        Returns:
            Whether this is the first time that somebody is told.
        """

        def note(pipe: redis.client.Pipeline) -> bool:
            holder, until = pipe.hmget(key, "rollout", "until")
            same = holder == rollout_id
            at = now(pipe)
            pipe.multi()
            if same and keep_s > 0:
                pipe.hset(key, "until", str(at + keep_s))
            elif same:
                pipe.delete(key)
            return same and until is None

        return self._redis.transaction(note, key, value_from_callable=True)  # type: ignore[return-value]


def digest_of(*parts: Any) -> str:
    """A digest of texts, in which no two lists of them are alike."""
    digest = hashlib.sha256()
    for part in parts:
        data = str(part).encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:32]
