"""Rollouts by what their records say: a few fields of many are looked at, and what fits is read whole.

An index holds the newest first, a million of them perhaps, and what fits may be rare. So each call looks at
so many and says where the next one is to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import redis
from pydantic_core import from_json

from rollout.schema import Blame, Rollout, State
from services.state import keys
from services.state.rollouts.reading import RolloutReader

MOST_LOOKED = 20_000
"""Records that one call looks at."""
MOST_S = 0.25
"""Seconds after which it looks at no more."""
AT_ONCE = 1000

Check = Callable[[str | None], bool]


@dataclass(frozen=True)
class Filter:
    """What a listing is to hold; None = any."""

    tenant: str | None = None
    state: State | None = None
    handler: str | None = None
    group_id: str | None = None
    tag: str | None = None
    policy_version: str | None = None
    """One of the versions that sampled it."""
    blame: Blame | None = None
    drop: bool | None = None
    reward_min: float | None = None
    """Without a reward it is in no range."""
    reward_max: float | None = None

    def checks(self) -> Mapping[str, Check]:
        """What is asked of fields of a record, by their names."""
        same = {"tenant": self.tenant, "state": self.state, "handler": self.handler, "group": self.group_id}
        same["blame"] = self.blame
        checks: dict[str, Check] = {
            name: (lambda value, wanted=str(wanted): value == wanted)
            for name, wanted in same.items()
            if wanted is not None
        }
        checks.setdefault("state", lambda value: value is not None)  # else the record is gone
        if (tag := self.tag) is not None:
            checks["tags"] = lambda value: tag in (value or "").split(",")
        if (version := self.policy_version) is not None:
            checks["policy_versions"] = lambda value: version in (value or "") and version in from_json(value)
        if (drop := self.drop) is not None:
            checks["drop"] = lambda value: (value == "1") == drop
        if self.reward_min is not None or self.reward_max is not None:
            checks["reward"] = self._has_reward
        return checks

    def _has_reward(self, value: str | None) -> bool:
        if not value:
            return False
        low = self.reward_min if self.reward_min is not None else float("-inf")
        high = self.reward_max if self.reward_max is not None else float("inf")
        return low <= float(value) <= high


def _fit(checks: Mapping[str, Check], values: list[str | None]) -> bool:
    try:
        return all(check(value) for check, value in zip(checks.values(), values, strict=True))
    except (TypeError, ValueError):  # a damaged record fits nothing
        return False


def page(
    client: redis.Redis, reader: RolloutReader, wanted: Filter, cursor: int, limit: int
) -> tuple[list[Rollout], int | None]:
    """At most `limit` summaries that fit, and where to go on.

    There may be fewer, or none, before the end; only without a cursor that is it.
    """
    found, end = _ids(client, reader, wanted, cursor, limit)
    # Whose it is was looked at; records that cannot be read are passed over.
    return list(reader.get_many(found, trajectory=False, tenant=wanted.tenant)), end


def _ids(
    client: redis.Redis, reader: RolloutReader, wanted: Filter, offset: int, limit: int
) -> tuple[list[str], int | None]:
    checks, began = wanted.checks(), time.monotonic()
    found: list[str] = []
    end, size = offset + MOST_LOOKED, min(limit, AT_ONCE)
    while True:
        size = min(size, end - offset)
        ids = reader.ids(
            state=wanted.state,
            group_id=wanted.group_id,
            tag=wanted.tag,
            tenant=wanted.tenant,
            offset=offset,
            limit=size,
        )
        with client.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hmget(keys.record(rollout_id), list(checks))
            records = pipe.execute()
        for rollout_id, values in zip(ids, records, strict=True):
            # One by one: the cursor must not pass what did not fit into this page.
            offset += 1
            if _fit(checks, values):
                found.append(rollout_id)
                if len(found) == limit:
                    return found, offset
        if len(ids) < size:
            return found, None
        if offset >= end or time.monotonic() - began > MOST_S:
            return found, offset
        size = AT_ONCE
