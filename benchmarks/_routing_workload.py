"""Rollouts of a simulated training step: heavy-tailed turns and tool latencies, groups that share a prompt.

Everything about a rollout is fixed by the seed before it starts, so that every policy serves the same ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.helpers.engine_cache import BLOCK
from tests.helpers.engine_model import Timing

GROUP_SIZE = 8
MAX_CONTEXT = 65_536
"""Tokens; a rollout ends before its context would pass it."""
TIMING = Timing(base_s=0.018, per_sequence_s=1e-4, per_cached_token_s=4e-8, prefill_tokens_per_s=12_000.0)
"""About a dense model of 32 billion parameters on two H100: 64 GB of weights and 256 kB of cache a token are
read at half of 6.7 TB/s and more; 64 GFLOP a prompt token at 40 % of their peak."""
SYSTEM_PROMPT = 256
"""Tokens that all prompts begin with."""


@dataclass(frozen=True)
class Turn:
    """One model call, the tool it asks for, and what that tool answers."""

    sampled: int
    """Tokens."""
    tool_s: float
    observation: list[int]
    """Token ids; empty after the last turn."""


@dataclass(frozen=True)
class SimulatedRollout:
    """One rollout; `turns` is never empty."""

    id: str
    group: str
    prompt: list[int]
    turns: list[Turn]

    @property
    def final_context(self) -> int:
        return len(self.prompt) + sum(turn.sampled + len(turn.observation) for turn in self.turns)


def workload(count: int, seed: int) -> list[SimulatedRollout]:
    """`count` rollouts in order of arrival, group by group."""
    rng = random.Random(seed)
    system = rng.choices(range(1000), k=SYSTEM_PROMPT)
    rollouts = []
    while len(rollouts) < count:
        group = f"s{seed}-g{len(rollouts) // GROUP_SIZE}"
        prompt = system + rng.choices(range(1000), k=_lognormal(rng, 1800, 0.6, 200, 8000))
        for index in range(min(GROUP_SIZE, count - len(rollouts))):
            rollouts.append(SimulatedRollout(f"{group}.{index}", group, prompt, _turns(rng, len(prompt))))
    return rollouts


def _lognormal(rng: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return int(min(most, max(least, median * rng.lognormvariate(0.0, sigma))))


def _turns(rng: random.Random, context: int) -> list[Turn]:
    turns: list[Turn] = []
    wanted = _lognormal(rng, 8, 0.8, 1, 60)
    for number in range(wanted):
        sampled = _lognormal(rng, 150, 0.8, 8, 2000)
        observed = _lognormal(rng, 600, 1.0, 10, 8000)
        tool_s = min(120.0, 0.2 + 0.8 * rng.paretovariate(1.4))
        context += sampled + observed
        last = number == wanted - 1 or context + 2000 + 8000 > MAX_CONTEXT
        if last:
            turns.append(Turn(sampled, 0.0, []))
            break
        turns.append(Turn(sampled, tool_s, rng.choices(range(1000), k=observed)))
    return turns


@dataclass(frozen=True)
class Bound:
    """Seconds that no placement can beat, each for its own reason. The makespan is at least the largest."""

    work_s: float
    """All engines busy to the end, every reusable block hit, decoding spread as evenly as can be."""
    slots_s: float
    """Every slot busy to the end, each rollout as fast as alone on an engine that knows its prompt."""
    longest_s: float
    """The longest rollout as fast as alone."""

    @property
    def makespan_s(self) -> float:
        return max(self.work_s, self.slots_s, self.longest_s)


def bound(rollouts: list[SimulatedRollout], engines: int, slots: int) -> Bound:
    """The clairvoyant bound for `slots` rollouts at once."""
    timing = TIMING
    seen: set[str] = set()
    prefill = decoded = 0
    reading_s = 0.0
    alone = []
    for rollout in rollouts:
        context = len(rollout.prompt)
        # Of a group, one computes the prompt; the others find it, but for the block that is not whole.
        whole = (context - 1) // BLOCK * BLOCK
        if rollout.group not in seen:
            seen.add(rollout.group)
            prefill += whole
        uncached = context - whole
        seconds = 0.0
        for turn in rollout.turns:
            prefill += uncached
            decoded += turn.sampled - 1
            reading = timing.per_cached_token_s * (turn.sampled - 1) * (context + turn.sampled / 2)
            reading_s += reading
            seconds += uncached / timing.prefill_tokens_per_s + reading + turn.tool_s
            seconds += turn.sampled * (timing.base_s + timing.per_sequence_s)
            context += turn.sampled
            # The last sampled token has never been computed.
            uncached = (context - 1) % BLOCK + 1 + len(turn.observation)
            context += len(turn.observation)
        alone.append(seconds)
    # The more sequences share a step the cheaper is each of their tokens, and at most all slots share one.
    per_token = timing.base_s * engines / slots + timing.per_sequence_s
    work_s = (prefill / timing.prefill_tokens_per_s + decoded * per_token + reading_s) / engines
    return Bound(work_s, sum(alone) / min(slots, len(rollouts)), max(alone))
