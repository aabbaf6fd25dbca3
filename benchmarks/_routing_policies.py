"""Ways to choose an engine for a rollout's calls: ours, and those it is compared with."""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import redis

from benchmarks._routing_workload import SimulatedRollout
from rollout.schema import Backend
from services.state.backends import BackendStore, PlacementPolicy
from workers.agent.placement import SHARE_OF_THE_NEWEST

CAPACITY_TOKENS = 200_000


class Policy(Protocol):
    """Asked by the simulation; engines are named by number."""

    name: str

    def add(self, engine: int) -> None:
        """An engine joins."""

    def admit(self, rollout: SimulatedRollout) -> bool:
        """A rollout wants to start. False: it must wait until another one ends."""

    def engine(self, rollout: SimulatedRollout, context: int) -> int:
        """Where the call with so many prompt tokens goes."""

    def done(self, rollout: SimulatedRollout) -> None:
        """A rollout has ended."""


class RoundRobin:
    """Each call to the next engine."""

    name = "round_robin"

    def __init__(self) -> None:
        self._engines: list[int] = []
        self._turn = itertools.count()

    def add(self, engine: int) -> None:
        self._engines.append(engine)

    def admit(self, rollout: SimulatedRollout) -> bool:
        return True

    def engine(self, rollout: SimulatedRollout, context: int) -> int:
        return self._engines[next(self._turn) % len(self._engines)]

    def done(self, rollout: SimulatedRollout) -> None:
        """Nothing is kept."""


class _Pinned:
    """A rollout keeps the engine that `_choose` gives it."""

    def __init__(self) -> None:
        self._count: Counter[int] = Counter()
        self._chosen: dict[int, int] = {}
        self._pins: dict[str, int] = {}
        self._turn = itertools.count(1)

    def add(self, engine: int) -> None:
        self._count[engine] = self._chosen[engine] = 0

    def admit(self, rollout: SimulatedRollout) -> bool:
        engine = self._pins[rollout.id] = self._choose(rollout)
        self._count[engine] += 1
        self._chosen[engine] = next(self._turn)
        return True

    def engine(self, rollout: SimulatedRollout, context: int) -> int:
        return self._pins[rollout.id]

    def done(self, rollout: SimulatedRollout) -> None:
        self._count[self._pins.pop(rollout.id)] -= 1

    def _choose(self, rollout: SimulatedRollout) -> int:
        # Ties to the least recently chosen: the best that such a heap can do.
        return min(self._count, key=lambda engine: (self._count[engine], self._chosen[engine]))


class InflightHeap(_Pinned):
    """Min-heap of live rollouts, with affinity."""

    name = "inflight_heap"


class Cumulative(_Pinned):
    """Min-heap of assignments that are never taken back, with affinity (ProRL Agent's)."""

    name = "cumulative"

    def done(self, rollout: SimulatedRollout) -> None:
        del self._pins[rollout.id]


class Hashing(_Pinned):
    """A consistent-hash ring of rollout ids."""

    name = "hashing"
    POINTS = 160
    """On the ring for each engine, so that their shares differ by some percent only."""

    def __init__(self) -> None:
        super().__init__()
        self._ring: list[tuple[int, int]] = []

    def add(self, engine: int) -> None:
        super().add(engine)
        self._ring += [(self._place(f"{engine}/{k}"), engine) for k in range(self.POINTS)]
        self._ring.sort()

    def _choose(self, rollout: SimulatedRollout) -> int:
        at = bisect(self._ring, (self._place(rollout.id), -1))
        return self._ring[at % len(self._ring)][1]

    @staticmethod
    def _place(name: str) -> int:
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


Expect = Callable[["Ours", SimulatedRollout], int]
"""Context in tokens that a rollout is expected to need, when it starts."""


def mean_prompt(ours: Ours, rollout: SimulatedRollout) -> int:
    """What a RUN worker reserves before it has rendered the prompt: the length that prompts had so far."""
    return round(ours.mean_prompt or len(rollout.prompt))


class Ours:
    """The service's own placement: its scripts in a real Redis."""

    name = "ours"

    def __init__(
        self,
        client: redis.Redis,
        policy: PlacementPolicy | None = None,
        expect: Expect = mean_prompt,
    ) -> None:
        """`client`: of a Redis that is this object's own; it is emptied."""
        client.flushall()
        self.mean_prompt = 0.0
        self.ended = 0
        self.ended_tokens = 0
        self.moves: Counter[str] = Counter()
        self._store = BackendStore(client, policy)
        self._expect = expect

    def add(self, engine: int) -> None:
        self._store.put(
            Backend(
                id=str(engine),
                url=f"http://engine-{engine}",
                model="m",
                tokenizer="t",
                max_model_len=32_768,
                capacity_tokens=CAPACITY_TOKENS,
            )
        )

    def admit(self, rollout: SimulatedRollout) -> bool:
        tokens = self._expect(self, rollout)
        placed = self._store.acquire(rollout.id, tokens=tokens, group=rollout.group)
        if placed.word == "full":
            return False
        if placed.word != "ok":
            raise RuntimeError(f"acquire answered {placed.word}: {placed.why}")
        return True

    def engine(self, rollout: SimulatedRollout, context: int) -> int:
        placed = self._store.extend(rollout.id, context)
        if placed.backend is None:
            raise RuntimeError(f"extend answered {placed.word}: {placed.why}")
        self.moves[placed.why] += 1
        return int(placed.backend.id)

    def done(self, rollout: SimulatedRollout) -> None:
        self._store.release(rollout.id)
        newest = len(rollout.prompt) - self.mean_prompt
        self.mean_prompt += newest * (SHARE_OF_THE_NEWEST if self.ended else 1.0)
        self.ended += 1
        self.ended_tokens += rollout.final_context
