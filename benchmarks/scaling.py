"""How throughput grows with nodes, how stages overlap, and what a head with 2,000 live rollouts costs.

A real head (Redis, gateway) and 1 or 8 virtual nodes on this machine: each has an INIT, a RUN and an EVAL
worker process of its own, and its own queues for what its sandboxes hold. Sandboxes, engine and scoring are
sleeps, so that 24 workers find room on two cores; a simulated sandbox host speaks the real one's protocol.

* Weak scaling: work grows with the nodes. Strong: the work of the most nodes on one of them. Throughput is
  rollouts over the time from the first submission to the last end: filling up and running dry count.
  Efficiency = throughput / (nodes x throughput of one node).
* Overlap: EVAL as long as RUN. What RUN's slots could do at most is the bound.
* Head: 2,000 rollouts are submitted at once and kept at 2,000 live while a trainer reads each result with its
  trajectory, acknowledges it and submits another one, and 400 clients wait. Dispatch is the time from the
  moment a rollout could be claimed for a stage (queued, ready, evaluating) until a worker claimed it; slots
  are free all the time. The worst stage counts; `dispatch_p99_s_with_wave` is of all claims since the first
  submission, `dispatch_p99_s_in_turnover` of those since the wave lives.

Weak scaling is done `--rounds` times, the rest once.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict

from benchmarks import _scaling_head as head
from benchmarks._harness import make_parser, report, summary
from benchmarks._scaling_nodes import Nodes, Slots, cluster

NODES, SHORT_NODES = 8, 2
LIVE, SHORT_LIVE = 2000, 60
SLOTS = 2
"""Of each stage on a node, where throughput is measured."""
HEADROOM = 1.12
"""Slots of RUN over live rollouts: dispatch is measured where a slot is free."""
INIT_S, EVAL_S = 0.05, 0.05
RUN_S, OVERLAP_S = 0.5, 0.8
"""Mean of RUN in scaling; of RUN and of EVAL where stages overlap."""
OVERLAP, SHORT_OVERLAP = 80, 6
"""Rollouts where stages overlap."""
SPREAD = 0.5
"""Durations are uniform in 1 ± this times their mean: in lock-step all would want the processor at once."""


def durations(count: int, mean_s: float, seed: int) -> list[float]:
    """Irregular ones, of exactly that mean."""
    chance = random.Random(seed)
    drawn = [chance.uniform(1 - SPREAD, 1 + SPREAD) for _ in range(count)]
    return [duration * mean_s * count / sum(drawn) for duration in drawn]


def tasks(count: int, seed: int) -> list[dict[str, float]]:
    """Rollouts whose work is nearly all in RUN."""
    return [{"init_s": INIT_S, "run_s": run_s, "eval_s": EVAL_S} for run_s in durations(count, RUN_S, seed)]


def prepare(nodes: Nodes, size: int) -> None:
    """Have so many nodes take part, and their workers do their first rollouts, which take longer."""
    nodes.use(size)
    nodes.give(Slots(SLOTS, SLOTS, SLOTS))
    nodes.rate([{}] * size * SLOTS * 2, f"{size} nodes, to begin with")


def scale(nodes: Nodes, each: int, rounds: int) -> dict[str, list[float]]:
    """Rollouts a second of one node and of all; each round goes through the sizes in the other direction.

    Args:
        each: Rollouts for each node.
    """
    per_s: dict[str, list[float]] = {"one": [], "all": [], "one_with_the_work_of_all": []}
    for number in range(rounds):
        sizes = {"one": 1, "all": nodes.count}
        for name in sizes if number % 2 == 0 else reversed(sizes):
            size = sizes[name]
            prepare(nodes, size)
            what = f"round {number + 1}, {size} nodes"
            per_s[name].append(nodes.rate(tasks(size * each, number), what))
            if name == "one" and number == 0:
                rate = nodes.rate(tasks(nodes.count * each, number), f"{what}, the work of all")
                per_s["one_with_the_work_of_all"].append(rate)
    return per_s


def overlap(nodes: Nodes, count: int) -> float:
    """EVAL takes as long as RUN, on one node: rollouts a second over what RUN alone could do."""
    prepare(nodes, 1)
    pairs = zip(durations(count, OVERLAP_S, 1), durations(count, OVERLAP_S, 2), strict=True)
    work = [{"init_s": INIT_S, "run_s": run_s, "eval_s": eval_s} for run_s, eval_s in pairs]
    return nodes.rate(work, "overlap") * OVERLAP_S / SLOTS


def main() -> None:
    options = make_parser(__doc__, count=480, rounds=2).parse_args()
    short = options.rounds == 1
    size = SHORT_NODES if short else NODES
    each = max(SLOTS, options.count // size)
    load = head.Load(SHORT_LIVE, 3.0, 256, 3.0) if short else head.Load(LIVE, 60.0, 4096, 30.0)
    most = Slots(32, int(load.live * HEADROOM / size) + 1, 32)
    with cluster(size, most) as nodes:
        if not short:
            # As it is by default from 64 slots on: INIT a wave ahead of RUN, no more.
            nodes.init_env = {"ROLLOUT_READY_AHEAD": str(SLOTS)}
        per_s = scale(nodes, each, options.rounds)
        overlapped = overlap(nodes, SHORT_OVERLAP if short else OVERLAP)
        if not short:
            nodes.use(0)
            nodes.init_env = {}
        nodes.use(size)
        nodes.give(most)
        of_head = head.measure(nodes, load)
    weak = [many / (size * one) for many, one in zip(per_s["all"], per_s["one"], strict=True)]
    report(
        "scaling",
        {
            "weak_efficiency_8": round(statistics.median(weak), 4),
            "strong_efficiency_8": round(per_s["all"][0] / (size * per_s["one_with_the_work_of_all"][0]), 4),
            "overlap_ratio_to_bound": round(overlapped, 4),
            "dispatch_p99_s_with_wave": max(of_head["dispatch_p99_s"]["wave_included"].values()),
            "dispatch_p99_s_in_turnover": max(of_head["dispatch_p99_s"]["in_turnover"].values()),
            "head_cpu_cores": round(sum(of_head["cpu_cores"].values()), 4),
            "head_rss_mb": round(of_head["rss_mb"], 1),
        },
        nodes=size,
        per_s={name: summary(values) for name, values in per_s.items()},
        weak_efficiency=summary(weak),
        head={**of_head, "load": asdict(load)},
        options=vars(options),
    )


if __name__ == "__main__":
    main()
