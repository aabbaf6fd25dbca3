"""LLM backends: who they are, how loaded they are, and which rollout is pinned to which."""

from __future__ import annotations

import hashlib

import redis

from rollout.schema import Backend
from services.state import keys
from services.state.redis import lua_source


class BackendStore:
    """The heap of backends in Redis. A rollout keeps its backend, for the prefix cache is there."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._script = client.register_script(lua_source("backends") + lua_source("backends_ops"))

    @staticmethod
    def id_of(url: str) -> str:
        """The id a URL gets when its owner names none: registering twice is harmless."""
        return "b-" + hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:10]

    def put(self, backend: Backend) -> Backend:
        """Add a backend or replace its description; its load stays."""
        raw = backend.model_dump_json(exclude={"live_rollouts", "load"})
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(keys.BACKENDS, backend.id, raw)
            pipe.zadd(keys.BACKEND_LOAD, {backend.id: 0}, nx=True)
            pipe.execute()
        return backend

    def remove(self, backend_id: str) -> bool:
        """Forget a backend. Rollouts on it go on there while it answers; none is counted any more."""
        return bool(self._script(args=["remove", backend_id]))

    def list(self) -> list[Backend]:
        """All backends, the least loaded first."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(keys.BACKENDS)
            pipe.zrange(keys.BACKEND_LOAD, 0, -1, withscores=True)
            pipe.hvals(keys.BACKEND_PINS)
            described, heap, pins = pipe.execute()
        live: dict[str, int] = {}
        for pin in pins:
            name = pin.split(" ")[0]
            live[name] = live.get(name, 0) + 1
        return [
            Backend.model_validate_json(described[name]).model_copy(
                update={"load": score, "live_rollouts": live.get(name, 0)}
            )
            for name, score in heap
            if name in described
        ]

    def acquire(
        self,
        rollout_id: str,
        *,
        load: float = 1.0,
        policy_version: str | None = None,
        exclude: tuple[str, ...] = (),
    ) -> Backend | None:
        """The rollout's backend: the pinned one, else the least loaded one that may take it.

        Args:
            load: Added to the backend's score until the release.
            policy_version: Only backends with these weights; None = any.
            exclude: Ids not to be used, because they just failed this rollout.

        Returns:
            None when no backend fits.
        """
        raw = self._script(args=["acquire", rollout_id, repr(load), policy_version or "", ",".join(exclude)])
        return Backend.model_validate_json(raw) if raw else None

    def release(self, rollout_id: str) -> bool:
        """Give the rollout's load back. False: there was nothing to give back."""
        return bool(self._script(args=["release", rollout_id]))
