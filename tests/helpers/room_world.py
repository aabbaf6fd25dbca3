"""Tenants that always have rollouts waiting for room, on the service's own scripts, under a set clock.

Redis is real. Only what its scripts take for the time is a key that the world writes.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import redis

from rollout.schema import Backend
from services.state import keys, scripts
from services.state.backends.store import BackendStore, placed
from services.state.tenants import Tenant, TenantStore

CLOCK = """-- a clock that is set
local now = tonumber(redis.call('GET', 'world:clock'))
local clock = {math.floor(now / 1000), (now * 1000) % 1000003}
local operations = {}
"""
START_MS = 1_800_000_000_000


@contextmanager
def set_clock() -> Iterator[None]:
    """Let scripts that are made meanwhile read the world's clock."""
    real = scripts._CLOCK
    scripts._CLOCK = CLOCK
    try:
        yield
    finally:
        scripts._CLOCK = real


@dataclass
class Asked:
    """A rollout of the world."""

    id: str
    tenant: str
    tokens: int
    since: float
    options: dict


class World:
    """Rollouts that wait, run and end."""

    def __init__(self, client: redis.Redis, seed: int) -> None:
        """`client`: of a Redis that is the world's own; it is emptied."""
        client.flushall()
        self.client, self.random = client, random.Random(seed)
        self.store = BackendStore(client)
        self.now = 0.0
        self.waiting: dict[str, Asked] = {}
        self.running: dict[str, Asked] = {}
        self.served: Counter[str] = Counter()
        """Token-seconds by tenant."""
        self.waits: defaultdict[str, list[float]] = defaultdict(list)
        self.grants = 0
        self._ends: list[tuple[float, str]] = []
        self._numbers = itertools.count()
        self._move(0.0)

    def add(self, *names: str, capacity: int) -> None:
        """Backends that join."""
        for name in names:
            about = {"model": "m", "tokenizer": "t", "max_model_len": 1000}
            self.store.put(Backend(id=name, url=f"http://{name}", capacity_tokens=capacity, **about))

    def tenant(self, name: str, weight: float) -> None:
        TenantStore(self.client).set(Tenant(name=name, weight=weight))

    def ask(self, tenant: str, tokens: int, **options: object) -> Asked:
        """A rollout that a worker holds asks for room."""
        asked = Asked(f"{tenant}-{next(self._numbers)}", tenant, tokens, self.now, options)
        about = {"state": "running", "fence": 1, "owner": "w", "attempt": 1, "tenant": tenant}
        self.client.hset(keys.record(asked.id), mapping=about)
        self.waiting[asked.id] = asked
        self._placed(asked, self.look(asked))
        return asked

    def look(self, asked: Asked) -> str:
        """What it is told when it asks again."""
        call = self.store.acquire(
            asked.id, tenant=asked.tenant, tokens=asked.tokens, fence=1, **asked.options
        )
        return placed(*self.store.many([call])).word

    def end(self, name: str) -> None:
        """One gives back what it has, or leaves the line."""
        self.store.many([self.store.release(name)])
        self.running.pop(name, None)
        self.waiting.pop(name, None)
        self.client.delete(keys.record(name), keys.timeline(name))

    def crash(self, name: str) -> None:
        """Its worker is gone, and it is nobody's."""
        self.client.hdel(keys.record(name), "owner")
        self.running.pop(name, None)
        self.waiting.pop(name, None)

    def granted(self) -> list[Asked]:
        """Those that have got room since this was asked last."""
        names = list(self.waiting)
        pins = self.client.hmget(keys.BACKEND_PINS, names) if names else []
        new = [self.waiting[name] for name, pin in zip(names, pins, strict=True) if pin]
        for asked in new:
            self._placed(asked, "ok")
        return new

    def _placed(self, asked: Asked, word: str) -> None:
        if word == "ok":
            self.running[asked.id] = self.waiting.pop(asked.id)
            self.waits[asked.tenant].append(self.now - asked.since)
            self.grants += 1

    # -- time --------------------------------------------------------------------------------

    def _move(self, now: float) -> None:
        for asked in self.running.values():
            self.served[asked.tenant] += asked.tokens * (now - self.now)
        self.now = now
        self.client.set("world:clock", START_MS + round(1000 * now))

    def play(
        self,
        until_s: float,
        backlog: dict[str, tuple[int, Callable[[random.Random], int]]],
        duration_s: Callable[[random.Random], float],
    ) -> None:
        """Let rollouts run and end, while each tenant has so many of such sizes waiting."""
        known: set[str] = set()
        while True:
            for tenant, (count, size) in backlog.items():
                short = count - sum(asked.tenant == tenant for asked in self.waiting.values())
                for _ in range(max(0, short)):
                    self.ask(tenant, size(self.random))
            self.granted()
            for name in self.running.keys() - known:
                known.add(name)
                heapq.heappush(self._ends, (self.now + duration_s(self.random), name))
            ends, name = self._ends[0]
            if ends >= until_s:
                self._move(until_s)
                return
            heapq.heappop(self._ends)
            self._move(ends)
            known.discard(name)
            self.end(name)
