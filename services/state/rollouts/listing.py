"""Rollouts by what their records say: a few fields of many are looked at, and what fits is read whole.

An index holds the newest first, a million of them perhaps, and what fits may be rare. So each call looks at
so many and says where the next one is to go on.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis
from pydantic_core import from_json

from rollout.schema import Rollout
from services.state import keys
from services.state.rollouts.reading import RolloutReader

MOST_LOOKED = 20_000
"""Records that one call looks at."""
MOST_S = 0.25
"""Seconds after which it looks at no more."""
AT_ONCE = 1000
INDEXED = ("state", "group_id", "tag", "tenant")
"""Filters of which the reader may have an index."""

Checks = dict[str, Callable[[str | None], bool]]
"""What is asked of fields of a record, by their names."""


def page(
    client: redis.Redis, reader: RolloutReader, cursor: int, limit: int, **filters: Any
) -> tuple[list[Rollout], int | None]:
    """At most `limit` summaries that fit, and where to go on.

    There may be fewer, or none, before the end; only without a cursor that is it.

    Args:
        filters: As `GET /v1/rollouts` has them; None = any.
    """
    checks, began = _checks(**filters), time.monotonic()
    indexed = {name: filters[name] for name in INDEXED}
    fitting: list[str] = []
    end, size = cursor + MOST_LOOKED, min(limit, AT_ONCE, MOST_LOOKED)
    while True:
        ids = reader.ids(**indexed, offset=cursor, limit=size)
        with client.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hmget(keys.record(rollout_id), list(checks))
            records = pipe.execute()
        for rollout_id, values in zip(ids, records, strict=True):
            # One by one: the cursor must not pass what did not fit into this page.
            cursor += 1
            if _fit(checks, values):
                fitting.append(rollout_id)
                if len(fitting) == limit:
                    break
        at_end = len(ids) < size and len(fitting) < limit
        if at_end or len(fitting) == limit or cursor >= end or time.monotonic() - began > MOST_S:
            # Whose it is was looked at; records that cannot be read are passed over.
            rollouts = reader.get_many(fitting, trajectory=False, tenant=filters["tenant"])
            return list(rollouts), None if at_end else cursor
        size = min(AT_ONCE, end - cursor)


def _checks(*, tag=None, policy_version=None, drop=None, reward_min=None, reward_max=None, **same) -> Checks:
    checks: Checks = {"state": lambda value: value is not None}  # else the record is gone
    for name, wanted in same.items():
        if wanted is not None:
            checks[name.removesuffix("_id")] = partial(operator.eq, str(wanted))
    if tag is not None:
        checks["tags"] = lambda value: tag in (value or "").split(",")
    if policy_version is not None:
        checks["policy_versions"] = lambda value: policy_version in from_json(value or "[]")
    if drop is not None:
        checks["drop"] = lambda value: (value == "1") == drop
    if reward_min is not None or reward_max is not None:
        low = -math.inf if reward_min is None else reward_min
        high = math.inf if reward_max is None else reward_max
        checks["reward"] = lambda value: low <= float(value or "nan") <= high
    return checks


def _fit(checks: Checks, values: list[str | None]) -> bool:
    try:
        return all(check(value) for check, value in zip(checks.values(), values, strict=True))
    except (TypeError, ValueError):  # a damaged record fits nothing
        return False
