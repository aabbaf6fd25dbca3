"""Weak and strong scaling, and the overlap of stages, on virtual nodes."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks._latency import say
from benchmarks._scaling_nodes import STAGES, Nodes, Outcome, Slots

INIT_S, EVAL_S = 0.05, 0.05
SPREAD = 0.5
"""Durations are uniform in 1 ± this times their mean: in lock-step all would want the processor at once."""


@dataclass(frozen=True)
class Work:
    """How much there is to do."""

    slots: int
    """Of each stage on a node."""
    waves: int
    """Rollouts that each slot of RUN works through."""
    run_s: float
    """Mean of RUN."""


def durations(count: int, mean_s: float, seed: int) -> list[float]:
    """Irregular, of exactly that mean."""
    chance = random.Random(seed)
    drawn = [chance.uniform(1 - SPREAD, 1 + SPREAD) for _ in range(count)]
    return [one * mean_s * count / sum(drawn) for one in drawn]


def tasks(nodes: int, work: Work, seed: int) -> list[dict[str, float]]:
    """What `nodes` nodes do in `waves` waves."""
    count = nodes * work.slots * work.waves
    return [
        {"init_s": INIT_S, "run_s": run_s, "eval_s": EVAL_S} for run_s in durations(count, work.run_s, seed)
    ]


def busy_share(outcome: Outcome, nodes: int, work: Work, amount: int) -> float:
    """Of RUN's slots over the whole time; `amount` nodes' worth of work was done."""
    return amount * work.waves * work.run_s / (nodes * outcome.seconds)


class Scaling:
    """Rounds over the sizes; each goes through them in the other direction."""

    def __init__(self, nodes: Nodes, work: Work, full: bool = False) -> None:
        """
        Args:
            full: Strong scaling on every size and not on the least alone, and every size in every round.
        """
        self._nodes, self._work, self._full = nodes, work, full
        self.sizes = [size for size in (1, 2, 4, 8) if size <= nodes.count]
        self.weak: dict[int, list[Outcome]] = {size: [] for size in self.sizes}
        self.strong: dict[int, list[Outcome]] = {size: [] for size in self.sizes}

    def round(self, number: int) -> None:
        """Put the work of each size through; in the first round also that of the most nodes on fewer."""
        most, work = self.sizes[-1], self._work
        sizes = self.sizes if self._full or number == 0 else [1, most]
        for size in sizes if number % 2 == 0 else sizes[::-1]:
            self._nodes.use(size)
            self._nodes.give(Slots(*[work.slots] * len(STAGES)))
            what = f"round {number + 1}, {size} nodes"
            # A worker's first rollouts take longer.
            self._nodes.work([{}] * size * work.slots * 2, f"{what}, to begin with")
            self.weak[size].append(self._nodes.work(tasks(size, work, number), f"{what}, weak"))
            if size == most:
                # The work of the largest size is the same in both.
                self.strong[size].append(self.weak[size][-1])
            elif number == 0 and (self._full or size == 1):
                self.strong[size].append(self._nodes.work(tasks(most, work, number), f"{what}, strong"))

    def weak_efficiencies(self, size: int, steady: bool = False) -> list[float]:
        """Throughput over that of as many single nodes, round by round."""
        pairs = list(zip(self.weak[size], self.weak[1], strict=False))
        if steady:
            return [many.steady_per_s / (size * one.steady_per_s) for many, one in pairs]
        return [many.per_s / (size * one.per_s) for many, one in pairs]

    def strong_efficiencies(self, size: int) -> list[float]:
        """The same for an amount of work that does not grow."""
        pairs = zip(self.strong[size], self.strong[1], strict=False)
        return [one.seconds / (size * many.seconds) for many, one in pairs]


def coupled(work: Work, eval_s: float, count: int) -> float:
    """Rollouts a second of a loop that does INIT, RUN and EVAL in turn, in each of `slots` slots."""

    def whole(run_s: float) -> None:
        for seconds in (INIT_S, run_s, eval_s):
            time.sleep(seconds)

    began = time.monotonic()
    with ThreadPoolExecutor(work.slots) as pool:
        list(pool.map(whole, durations(count, work.run_s, 0)))
    return count / (time.monotonic() - began)


def overlap(nodes: Nodes, work: Work) -> dict[str, float]:
    """EVAL takes as long as RUN, on one node: how near the pipeline comes to what RUN alone could do."""
    nodes.use(1)
    nodes.give(Slots(*[work.slots] * len(STAGES)))
    count = work.slots * work.waves
    run, score = durations(count, work.run_s, 1), durations(count, work.run_s, 2)
    with ThreadPoolExecutor(1) as aside:
        # Threads that sleep: the pipeline does not notice them.
        loop = aside.submit(coupled, work, work.run_s, work.slots * max(2, work.waves // 3))
        outcome = nodes.work(
            [
                {"init_s": INIT_S, "run_s": one, "eval_s": other}
                for one, other in zip(run, score, strict=True)
            ],
            "overlap",
        )
        coupled_per_s = loop.result()
    bound = work.slots / work.run_s
    say(f"overlap: {outcome.per_s / bound:.3f} of the bound, coupled {coupled_per_s / bound:.3f}")
    return {
        "ratio": outcome.per_s / bound,
        "steady_ratio": outcome.steady_per_s / bound,
        "coupled_ratio": coupled_per_s / bound,
        "rollouts": count,
        "slots": work.slots,
        "seconds": outcome.seconds,
    }
