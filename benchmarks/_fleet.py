"""A simulated fleet of engines under virtual time, the rollouts that it serves, and who places them.

An engine is the timing model that the tests' fake engine has, too. Everything about a rollout is fixed by
the seed before it starts, so that every policy serves the same ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import redis

from rollout.schema import Backend
from services.state.backends.store import PlacementPolicy
from tests.helpers import virtual_time
from tests.helpers.engine_cache import BLOCK
from tests.helpers.engine_model import EngineModel, Timing
from tests.helpers.fake_language import Answer
from tests.helpers.heap import Heap
from workers.agent.placement import SHARE_OF_THE_NEWEST

ENGINES = 8
CAPACITY_TOKENS = 200_000
"""Of one engine's cache."""
GROUP_SIZE = 8
MAX_CONTEXT = 65_536
"""Tokens; a rollout ends before its context would pass it."""
SYSTEM_PROMPT = 256
"""Tokens that all prompts begin with."""
TIMING = Timing(base_s=0.018, per_sequence_s=1e-4, per_cached_token_s=4e-8, prefill_tokens_per_s=12_000.0)
"""About a dense model of 32 billion parameters on two H100: 64 GB of weights and 256 kB of cache a token are
read at half of 6.7 TB/s and more; 64 GFLOP a prompt token at 40 % of their peak."""

# -- the workload ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One model call, the tool it asks for, and what that tool answers."""

    sampled: int
    """Tokens."""
    tool_s: float = 0.0
    observation: Sequence[int] = ()
    """Token ids; empty after the last turn."""


@dataclass(frozen=True)
class SimulatedRollout:
    """One rollout; `turns` is never empty."""

    id: str
    group: str
    prompt: list[int]
    turns: list[Turn]


def workload(count: int, seed: int) -> list[SimulatedRollout]:
    """`count` rollouts in order of arrival, group by group; turns, tokens and latencies have long tails."""
    rng = random.Random(seed)

    def lognormal(median: float, sigma: float, least: int, most: int) -> int:
        return int(min(most, max(least, median * rng.lognormvariate(0.0, sigma))))

    def turns(context: int) -> Iterator[Turn]:
        for rest in range(lognormal(8, 0.8, 1, 60) - 1, -1, -1):
            sampled = lognormal(150, 0.8, 8, 2000)
            observed = lognormal(600, 1.0, 10, 8000)
            tool_s = min(120.0, 0.2 + 0.8 * rng.paretovariate(1.4))
            context += sampled + observed
            if not rest or context + 2000 + 8000 > MAX_CONTEXT:
                yield Turn(sampled)
                return
            yield Turn(sampled, tool_s, rng.choices(range(1000), k=observed))

    system = rng.choices(range(1000), k=SYSTEM_PROMPT)
    rollouts: list[SimulatedRollout] = []
    for number in range(count):
        group, index = f"s{seed}-g{number // GROUP_SIZE}", number % GROUP_SIZE
        if index == 0:
            prompt = system + rng.choices(range(1000), k=lognormal(1800, 0.6, 200, 8000))
        rollouts.append(SimulatedRollout(f"{group}.{index}", group, prompt, list(turns(len(prompt)))))
    return rollouts


def bound_s(rollouts: list[SimulatedRollout], slots: int) -> float:
    """The clairvoyant bound: no placement ends before its longest rollout, nor before all slots have been
    busy to the end, with each rollout as fast as alone on an engine that knows its prompt."""
    alone_s = []
    for rollout in rollouts:
        context = len(rollout.prompt)
        uncached = (context - 1) % BLOCK + 1
        seconds = 0.0
        for turn in rollout.turns:
            read = (turn.sampled - 1) * (context + turn.sampled / 2)
            seconds += turn.sampled * (TIMING.base_s + TIMING.per_sequence_s) + turn.tool_s
            seconds += uncached / TIMING.prefill_tokens_per_s + read * TIMING.per_cached_token_s
            # The last sampled token has never been computed.
            uncached = (context + turn.sampled - 1) % BLOCK + 1 + len(turn.observation)
            context += turn.sampled + len(turn.observation)
        alone_s.append(seconds)
    return max(max(alone_s), sum(alone_s) / min(slots, len(rollouts)))


# -- the policies ------------------------------------------------------------------------------------

Order = Callable[["Peer", SimulatedRollout], list[int]]
"""Engines for a new rollout, the preferred one first."""


class Peer:
    """What ours is compared with: a rollout stays on the first engine of its order that may take it.

    With `admission` the rule for that is ours: the contexts of those on an engine and the new prompt are at
    most three quarters of its cache, or it is empty. Engines are named by number.
    """

    def __init__(self, order: Order, admission: bool = True) -> None:
        self._order = order
        self._room = PlacementPolicy().admit * CAPACITY_TOKENS if admission else float("inf")
        self._pins: dict[str, tuple[int, int]] = {}
        """Engine and context of each live rollout."""
        self._tokens: Counter[int] = Counter()
        """Their contexts, by engine."""
        self.live: Counter[int] = Counter()
        """Rollouts under way, by engine; all engines are keys."""
        self.assigned: Counter[int] = Counter()
        """Rollouts ever."""
        self.latest: Counter[int] = Counter()
        """How many had been assigned in all when an engine was chosen last."""

    def add(self, engine: int) -> None:
        """An engine joins."""
        self.live[engine] = 0

    def admit(self, rollout: SimulatedRollout) -> bool:
        """A rollout wants to start. False: it must wait until another one ends."""
        weight = len(rollout.prompt)
        for engine in self._order(self, rollout):
            if not self.live[engine] or self._tokens[engine] + weight <= self._room:
                self._pins[rollout.id] = (engine, weight)
                self._tokens[engine] += weight
                self.live[engine] += 1
                self.assigned[engine] += 1
                self.latest[engine] = self.assigned.total()
                return True
        return False

    def engine(self, rollout: SimulatedRollout, context: int) -> int:
        """Where the call with so many prompt tokens goes."""
        engine, before = self._pins[rollout.id]
        self._tokens[engine] += context - before
        self._pins[rollout.id] = (engine, context)
        return engine

    def done(self, rollout: SimulatedRollout) -> None:
        """A rollout has ended."""
        engine, weight = self._pins.pop(rollout.id)
        self._tokens[engine] -= weight
        self.live[engine] -= 1


def cumulative(peer: Peer, rollout: SimulatedRollout) -> list[int]:
    """A min-heap of assignments that are never taken back (ProRL Agent's)."""
    return sorted(peer.live, key=lambda engine: peer.assigned[engine])


def inflight_heap(peer: Peer, rollout: SimulatedRollout) -> list[int]:
    """A min-heap of live rollouts; ties go to the least recently chosen."""
    return sorted(peer.live, key=lambda engine: (peer.live[engine], peer.latest[engine]))


def hashing(peer: Peer, rollout: SimulatedRollout) -> list[int]:
    """A consistent-hash ring of rollout ids; past full engines it goes on round the ring (bounded loads)."""
    return _along_ring(len(peer.live), rollout.id)


def group_hashing(peer: Peer, rollout: SimulatedRollout) -> list[int]:
    """The same of group ids: who shares a prompt shares an engine."""
    return _along_ring(len(peer.live), rollout.group)


def _along_ring(engines: int, name: str) -> list[int]:
    place = _place(name)
    ahead = sorted(_ring(engines), key=lambda point: point[0] < place)
    return list(dict.fromkeys(engine for _, engine in ahead))


@lru_cache
def _ring(engines: int) -> list[tuple[int, int]]:
    """Place and engine of 160 points for each engine, so that their shares differ by some percent only."""
    return sorted((_place(f"{engine}/{point}"), engine) for engine in range(engines) for point in range(160))


def _place(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


class RoundRobin(Peer):
    """Each call to the next engine; only what admission counts is kept by engine."""

    def __init__(self, admission: bool = True) -> None:
        super().__init__(inflight_heap, admission)
        self._calls = itertools.count()

    def engine(self, rollout: SimulatedRollout, context: int) -> int:
        super().engine(rollout, context)
        return next(self._calls) % len(self.live)


class Ours:
    """The service's own placement: its scripts in a real Redis."""

    def __init__(self, client: redis.Redis) -> None:
        """`client`: of a Redis that is this object's own; it is emptied."""
        client.flushall()
        self._store = Heap(client)
        self._mean_prompt = 0.0
        """What a RUN worker reserves before it has rendered a prompt: the length that they had so far."""

    def add(self, engine: int) -> None:
        about = {"model": "m", "tokenizer": "t", "max_model_len": MAX_CONTEXT}
        url = f"http://engine-{engine}"
        self._store.put(Backend(id=str(engine), url=url, capacity_tokens=CAPACITY_TOKENS, **about))

    def admit(self, rollout: SimulatedRollout) -> bool:
        tokens = round(self._mean_prompt or len(rollout.prompt))
        placed = self._store.acquire(rollout.id, tokens=tokens, group=rollout.group)
        if placed.word not in ("ok", "full"):
            raise RuntimeError(f"acquire answered {placed.word}: {placed.why}")
        return placed.word == "ok"

    def engine(self, rollout: SimulatedRollout, context: int) -> int:
        placed = self._store.extend(rollout.id, context)
        if placed.backend is None:
            raise RuntimeError(f"extend answered {placed.word}: {placed.why}")
        return int(placed.backend.id)

    def done(self, rollout: SimulatedRollout) -> None:
        self._store.release(rollout.id)
        share = SHARE_OF_THE_NEWEST if self._mean_prompt else 1.0
        self._mean_prompt += share * (len(rollout.prompt) - self._mean_prompt)


# -- the fleet ---------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one policy made of one workload. Times in (virtual) seconds."""

    makespan_s: float = 0.0
    latency_s: list[float] = field(default_factory=list)
    """Of each rollout from its arrival to its end, waiting for admission included."""
    prompt_tokens: int = 0
    """Of all calls of all rollouts."""
    cached_tokens: int = 0
    placed: list[tuple[float, int]] = field(default_factory=list)
    """(time, engine) of each rollout's first call."""

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def p95_s(self) -> float:
        """95th percentile of the rollouts' times."""
        return sorted(self.latency_s)[min(len(self.latency_s) - 1, int(0.95 * len(self.latency_s)))]


class _Told:
    """A language without meaning: `seed` and the numbers after it, as many as are asked for."""

    def answer(self, prompt: Sequence[int], *, max_tokens: int, seed: int, **_: Any) -> Answer:
        return Answer(list(range(seed, seed + max_tokens)), [], "length", None)


class Fleet:
    """`slots` rollouts at once, in order of arrival, on engines that may be added meanwhile."""

    def __init__(self, policy: Peer | Ours, slots: int, engines: int = ENGINES) -> None:
        self._policy = policy
        self._slots = slots
        self._engines: list[EngineModel] = []
        self._line = asyncio.Lock()
        """Held by who waits for admission: first come, first served."""
        self._room = asyncio.Event()
        self._homes: dict[str, int] = {}
        """Of live rollouts: where the latest call went."""
        self._outcome = Outcome()
        for _ in range(engines):
            self.add_engine()

    def add_engine(self) -> None:
        """An engine joins now, empty; its number is the next."""
        self._policy.add(len(self._engines))
        self._engines.append(
            EngineModel(capacity_tokens=CAPACITY_TOKENS, timing=TIMING, language=_Told())  # type: ignore[arg-type]
        )

    def live(self) -> Counter[int]:
        """Rollouts under way by the engine of their latest call."""
        return Counter(self._homes.values())

    async def run(self, rollouts: list[SimulatedRollout]) -> Outcome:
        """Serve them all."""
        queue = deque(rollouts)

        async def slot() -> None:
            while queue:
                await self._serve(queue.popleft())

        await asyncio.gather(*(slot() for _ in range(self._slots)))
        self._outcome.makespan_s = asyncio.get_running_loop().time()
        return self._outcome

    async def _serve(self, rollout: SimulatedRollout) -> None:
        loop, outcome = asyncio.get_running_loop(), self._outcome
        arrived = loop.time()
        async with self._line:
            while not self._policy.admit(rollout):
                self._room.clear()
                await self._room.wait()
        context = list(rollout.prompt)
        first_id = _place(rollout.id) % 2**30
        for number, turn in enumerate(rollout.turns):
            engine = self._homes[rollout.id] = self._policy.engine(rollout, len(context))
            if number == 0:
                outcome.placed.append((loop.time(), engine))
            model = self._engines[engine]
            call = model.submit(context, max_tokens=turn.sampled, seed=first_id + number)
            await model.wait(call)
            outcome.prompt_tokens += len(context)
            outcome.cached_tokens += call.cached_tokens or 0
            await asyncio.sleep(turn.tool_s)
            context += [*call.token_ids, *turn.observation]
        self._policy.done(rollout)
        del self._homes[rollout.id]
        self._room.set()
        outcome.latency_s.append(loop.time() - arrived)


def simulate(
    policy: Callable[[], Peer | Ours], rollouts: list[SimulatedRollout], slots: int, engines: int = ENGINES
) -> Outcome:
    """One policy, one workload, one load; a fleet of its own."""

    async def main() -> Outcome:
        return await Fleet(policy(), slots, engines).run(rollouts)

    return virtual_time.run(main())
