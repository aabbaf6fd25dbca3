"""A fleet of simulated engines under virtual time: the real wire format, the real placement, no waiting."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks._routing_policies import CAPACITY_TOKENS, Policy
from benchmarks._routing_workload import MAX_CONTEXT, TIMING, SimulatedRollout
from rollout.schema import Backend, SamplingParams
from services.engines.base import Asked
from services.engines.select import engine_of
from tests.helpers import virtual_time
from tests.helpers.engine_model import EngineModel
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.fake_language import FakeLanguage

ENGINES = 8
LANGUAGE = FakeLanguage(first_id=1000, vocab_size=9999)
SAMPLING = SamplingParams()
TEXT_EVERY = 20
"""Of so many calls one goes through JSON text; for all it would take as long as the whole simulation."""


@dataclass
class Outcome:
    """What one policy made of one workload. Times in (virtual) seconds."""

    makespan_s: float = 0.0
    latency_s: list[float] = field(default_factory=list)
    """Of each rollout from its arrival to its end, waiting for admission included."""
    service_s: list[float] = field(default_factory=list)
    """Of each rollout from its admission to its end."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    placed: list[tuple[float, int]] = field(default_factory=list)
    """(time, engine) of each rollout's first call."""
    calls: Counter[int] = field(default_factory=Counter)
    busy_share: float = 0.0
    """Of the engines' time until the end."""

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def p95_s(self, *, waiting: bool = True) -> float:
        """95th percentile of the rollouts' times."""
        values = sorted(self.latency_s if waiting else self.service_s)
        return values[min(len(values) - 1, int(0.95 * len(values)))]


class Fleet:
    """`slots` rollouts at once, in order of arrival, on engines that may be added meanwhile."""

    def __init__(self, policy: Policy, slots: int, engines: int = ENGINES) -> None:
        self._policy = policy
        self._slots = slots
        self._engines: list[FakeEngine] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._homes: dict[str, int] = {}
        """Of live rollouts: where the latest call went."""
        self.outcome = Outcome()
        for _ in range(engines):
            self.add_engine()

    def add_engine(self) -> int:
        """The number of an engine that joins now, empty."""
        number = len(self._engines)
        model = EngineModel(capacity_tokens=CAPACITY_TOKENS, timing=TIMING, language=LANGUAGE)
        self._engines.append(FakeEngine(model, max_model_len=MAX_CONTEXT))
        self._policy.add(number)
        return number

    def live(self) -> Counter[int]:
        """Rollouts under way by the engine of their latest call."""
        return Counter(self._homes.values())

    async def run(self, rollouts: list[SimulatedRollout]) -> Outcome:
        """Serve them all."""
        queue = deque(rollouts)

        async def slot() -> None:
            while queue:
                await self._serve(queue.popleft())

        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._slots, len(rollouts))):
                group.create_task(slot())
        outcome = self.outcome
        outcome.makespan_s = loop.time() - began
        outcome.preemptions = sum(engine.model.preemptions for engine in self._engines)
        busy = sum(engine.model.busy_s for engine in self._engines)
        outcome.busy_share = busy / outcome.makespan_s / len(self._engines)
        return outcome

    async def _serve(self, rollout: SimulatedRollout) -> None:
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        await self._admitted(rollout)
        started = loop.time()
        buffer = list(rollout.prompt)
        for number, turn in enumerate(rollout.turns):
            engine = self._policy.engine(rollout, len(buffer))
            self._homes[rollout.id] = engine
            if number == 0:
                self.outcome.placed.append((loop.time(), engine))
            buffer += await self._call(engine, f"{rollout.id}-{number}", buffer, turn.sampled)
            await asyncio.sleep(turn.tool_s)
            buffer += turn.observation
        self._policy.done(rollout)
        del self._homes[rollout.id]
        self._wake()
        self.outcome.latency_s.append(loop.time() - arrived)
        self.outcome.service_s.append(loop.time() - started)

    async def _admitted(self, rollout: SimulatedRollout) -> None:
        """First come, first served; who has just been let in lets the next one look as well."""
        if self._waiting or not self._policy.admit(rollout):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            while True:
                await turn
                if self._policy.admit(rollout):
                    break
                turn = self._waiting[0] = asyncio.get_running_loop().create_future()
            self._waiting.popleft()
            self._wake()

    def _wake(self) -> None:
        if self._waiting and not self._waiting[0].done():
            self._waiting[0].set_result(None)

    async def _call(self, number: int, call_id: str, prompt: list[int], sampled: int) -> list[int]:
        """The ids of one call, asked for and read by the real engine class."""
        wire = engine_of(_BACKEND)
        sent = _through_text if self.outcome.calls.total() % TEXT_EVERY == 0 else _as_is
        call = wire.generate(
            prompt,
            SAMPLING,
            max_tokens=sampled,
            seed=1,
            stop_token_ids=[],
            call_id=call_id,
            cache_salt="step-1",
        )
        body = sent(call.body)
        status, answer = await self._engines[number].request("POST", call.path, body)
        if status != 200:
            raise RuntimeError(f"engine {number} answered {status}: {answer}")
        completion = wire.read(sent(answer), Asked(call_id, prompt, sampled))
        self.outcome.calls[number] += 1
        self.outcome.prompt_tokens += len(prompt)
        self.outcome.cached_tokens += completion.cached_tokens or 0
        return completion.token_ids


def _as_is(body: dict[str, Any]) -> dict[str, Any]:
    return body


def _through_text(body: dict[str, Any]) -> dict[str, Any]:
    """Raises RuntimeError when JSON would change it."""
    read = json.loads(json.dumps(body))
    if read != body:
        raise RuntimeError(f"JSON changes {body!r:.200}")
    return read


_BACKEND = Backend(id="engine", url="http://engine", model="fake", tokenizer="t", max_model_len=MAX_CONTEXT)


def simulate(
    policy: Callable[[], Policy], rollouts: list[SimulatedRollout], slots: int, engines: int = ENGINES
) -> Outcome:
    """One policy, one workload, one load; a fleet of its own."""

    async def main() -> Outcome:
        return await Fleet(policy(), slots, engines).run(rollouts)

    return virtual_time.run(main())
