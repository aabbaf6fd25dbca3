"""What the workers announce of themselves: that they live, and which handlers they carry."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import redis

from rollout.schema import HandlerInfo
from services.queues import STAGES
from services.state import keys

ANNOUNCE_EVERY_S = 5.0
ALIVE_S = 3 * ANNOUNCE_EVERY_S
"""A worker not heard of for so long does not count as ready."""


class FleetStore:
    """Live workers by stage, and the registry of handlers."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def announce(self, worker: str, stages: Iterable[str]) -> None:
        """Say that a worker lives; call it every `ANNOUNCE_EVERY_S`."""
        now = time.time()
        with self._redis.pipeline(transaction=False) as pipe:
            for stage in stages:
                pipe.zadd(keys.workers(stage), {worker: now})
                pipe.zremrangebyscore(keys.workers(stage), "-inf", now - 100 * ALIVE_S)
            pipe.execute()

    def leave(self, worker: str) -> None:
        """Take a worker that stops off the list."""
        with self._redis.pipeline(transaction=False) as pipe:
            for stage in STAGES:
                pipe.zrem(keys.workers(stage), worker)
            pipe.execute()

    def alive(self) -> dict[str, list[str]]:
        """Names of the live workers of each stage."""
        since = time.time() - ALIVE_S
        with self._redis.pipeline(transaction=False) as pipe:
            for stage in STAGES:
                pipe.zrangebyscore(keys.workers(stage), since, "+inf")
            return dict(zip(STAGES, pipe.execute(), strict=True))

    def put_node(self, node: str, sandboxes: dict[str, Any]) -> None:
        """Pass on what a node's sandbox host says of itself (`HostClient.stats`)."""
        self._redis.hset(keys.NODES, node, json.dumps({"at": time.time(), "sandboxes": sandboxes}))

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What the sandbox hosts said of themselves, of each node heard of lately."""
        since = time.time() - ALIVE_S
        found = {name: json.loads(raw) for name, raw in self._redis.hgetall(keys.NODES).items()}
        return {name: said["sandboxes"] for name, said in sorted(found.items()) if said["at"] >= since}

    def put_handlers(self, handlers: Iterable[HandlerInfo]) -> None:
        """Announce handlers; a name announced before gets its newest description."""
        mapping = {info.name: info.model_dump_json() for info in handlers}
        if mapping:
            self._redis.hset(keys.HANDLERS, mapping=mapping)

    def handlers(self) -> dict[str, HandlerInfo]:
        """Every handler that some worker has announced since Redis was set up."""
        found = self._redis.hgetall(keys.HANDLERS)
        return {name: HandlerInfo.model_validate(json.loads(raw)) for name, raw in sorted(found.items())}
