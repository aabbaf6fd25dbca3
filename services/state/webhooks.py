"""Webhooks to be delivered: all of it is in Redis, so that any worker can go on where another one died.

A delivery is made from the stream of results, in one transaction with the cursor; it is taken off when
the receiver has it, or when it is given up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import redis

from services.state import keys
from services.state.redis import now
from services.state.rollouts.reading import Skipped, request_texts

_READ = ("tenant", "digest")
FAILURES_KEPT = 1000
"""Deliveries given up that are remembered, for the operator to look at."""


@dataclass
class Delivery:
    """One webhook on its way."""

    rollout_id: str
    url: str
    include: str
    since: float
    """When it was due for the first time, seconds since the epoch."""
    tries: int = 0
    error: str = ""
    """Why the last try failed."""

    def to_json(self) -> str:
        fields = dict(vars(self))
        del fields["rollout_id"]
        return json.dumps(fields)


class WebhookStore:
    """What is due, what was given up, and how far the results were read."""

    def __init__(self, client: redis.Redis, service_url: str = "") -> None:
        """
        Args:
            service_url: Where the rollouts go that name no webhook themselves; empty = nowhere.
        """
        self._redis = client
        self._skipped = Skipped(client)
        self._service_url = service_url

    def collect(self, limit: int = 500) -> int:
        """Turn results after the cursor into deliveries; how many results there were."""
        cursor = self._redis.get(keys.WEBHOOKS_CURSOR) or "0"
        entries = self._redis.xrange(keys.RESULTS, min=f"({cursor}", count=limit)
        if not entries:
            return 0
        at = now(self._redis)
        deliveries = self._deliveries([fields["id"] for _, fields in entries], at)
        with self._redis.pipeline() as pipe:
            for delivery in deliveries:
                pipe.hsetnx(keys.WEBHOOKS, delivery.rollout_id, delivery.to_json())
                pipe.zadd(keys.WEBHOOKS_DUE, {delivery.rollout_id: at}, nx=True)
            pipe.set(keys.WEBHOOKS_CURSOR, entries[-1][0])
            pipe.execute()
        return len(entries)

    def _deliveries(self, ids: list[str], since: float) -> list[Delivery]:
        with self._redis.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hmget(keys.record(rollout_id), *_READ)
            records = [dict(zip(_READ, values, strict=True)) for values in pipe.execute()]
        deliveries = []
        for rollout_id, request in zip(ids, request_texts(self._redis, records), strict=True):
            try:
                hook = json.loads(request).get("webhook") if request else None
            except ValueError as error:
                self._skipped.tell(rollout_id, error)
                continue
            if hook:
                deliveries.append(Delivery(rollout_id, hook["url"], hook["include"], since))
            elif request and self._service_url:
                deliveries.append(Delivery(rollout_id, self._service_url, "summary", since))
        return deliveries

    def due(self, limit: int) -> list[Delivery]:
        """What is to be tried now, the longest waiting first."""
        ids = self._redis.zrangebyscore(keys.WEBHOOKS_DUE, "-inf", now(self._redis), start=0, num=limit)
        if not ids:
            return []
        texts = self._redis.hmget(keys.WEBHOOKS, ids)
        if lost := [rollout_id for rollout_id, text in zip(ids, texts, strict=True) if not text]:
            # Nobody knows where they go; left in place they would be in the way of all others.
            self._redis.zrem(keys.WEBHOOKS_DUE, *lost)
        return [
            Delivery(rollout_id, **json.loads(text))
            for rollout_id, text in zip(ids, texts, strict=True)
            if text
        ]

    def postpone(self, rollout_ids: Iterable[str], at: float) -> None:
        """Try them later; that is not a try."""
        later = dict.fromkeys(rollout_ids, at)
        if later:
            self._redis.zadd(keys.WEBHOOKS_DUE, later, xx=True)

    def delivered(self, delivery: Delivery) -> None:
        """The receiver has it."""
        self._take_off(delivery, "webhooks_delivered")

    def failed(self, delivery: Delivery, at: float) -> None:
        """A try failed; the next one is `at`."""
        with self._redis.pipeline() as pipe:
            pipe.hset(keys.WEBHOOKS, delivery.rollout_id, delivery.to_json())
            pipe.zadd(keys.WEBHOOKS_DUE, {delivery.rollout_id: at}, xx=True)
            pipe.hincrby(keys.RESULTS_TOTALS, "webhooks_failed", 1)
            pipe.execute()

    def give_up(self, delivery: Delivery) -> None:
        """Try no more; it is remembered with its last error."""
        fields = {"id": delivery.rollout_id, "url": delivery.url, "error": delivery.error}
        fields["tries"] = str(delivery.tries)
        self._redis.xadd(keys.WEBHOOKS_FAILED, fields, maxlen=FAILURES_KEPT, approximate=True)
        self._take_off(delivery, "webhooks_given_up")

    def _take_off(self, delivery: Delivery, count: str) -> None:
        with self._redis.pipeline() as pipe:
            pipe.zrem(keys.WEBHOOKS_DUE, delivery.rollout_id)
            pipe.hdel(keys.WEBHOOKS, delivery.rollout_id)
            pipe.hincrby(keys.RESULTS_TOTALS, count, 1)
            pipe.execute()

    def redeliver(self, rollout_ids: Iterable[str]) -> int:
        """Send those of the rollouts once more that have ended and have a webhook; how many do."""
        ids = list(rollout_ids)
        with self._redis.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hexists(keys.record(rollout_id), "completion")
            ended = [rollout_id for rollout_id, there in zip(ids, pipe.execute(), strict=True) if there]
        at = now(self._redis)
        deliveries = self._deliveries(ended, at) if ended else []
        with self._redis.pipeline() as pipe:
            for delivery in deliveries:
                pipe.hset(keys.WEBHOOKS, delivery.rollout_id, delivery.to_json())
                pipe.zadd(keys.WEBHOOKS_DUE, {delivery.rollout_id: at})
            pipe.execute()
        return len(deliveries)

    def pending(self) -> int:
        """Deliveries that are neither made nor given up."""
        return self._redis.zcard(keys.WEBHOOKS_DUE)

    def failures(self, limit: int = 100) -> list[dict[str, Any]]:
        """The latest that were given up: `{"id", "url", "error", "tries", "at"}`."""
        rows = self._redis.xrevrange(keys.WEBHOOKS_FAILED, count=limit)
        return [
            {**fields, "tries": int(fields["tries"]), "at": int(entry.partition("-")[0]) / 1000}
            for entry, fields in rows
        ]
