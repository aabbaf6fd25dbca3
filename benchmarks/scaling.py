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

Weak scaling is done `--rounds` times, the rest once. `--real` adds 1 and 2 nodes with real sandboxes.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import _scaling_head as head
from benchmarks._harness import make_parser, report, summary
from benchmarks._scaling_nodes import Nodes, Slots, cluster
from tests.helpers.sandboxes import leftovers

NODES, SHORT_NODES = 8, 2
LIVE, SHORT_LIVE = 2000, 60
HEADROOM = 1.12
"""Slots of RUN over live rollouts: dispatch is measured where a slot is free."""
INIT_S, EVAL_S = 0.05, 0.05
OVERLAP_S, OVERLAP_WAVES, SHORT_WAVES = 0.8, 40, 3
"""Mean of RUN and of EVAL, and rollouts that each slot works through, where stages overlap."""
SPREAD = 0.5
"""Durations are uniform in 1 ± this times their mean: in lock-step all would want the processor at once."""
REAL_SLOTS, REAL_WAVES, REAL_RUN_S = 4, 8, 4.0
"""With real sandboxes: two cores start and end those of both nodes beside RUN."""
COMMAND = "echo $((6 * 7)) > answer && cat answer"


def durations(count: int, mean_s: float, seed: int) -> list[float]:
    """Irregular ones, of exactly that mean."""
    chance = random.Random(seed)
    drawn = [chance.uniform(1 - SPREAD, 1 + SPREAD) for _ in range(count)]
    return [duration * mean_s * count / sum(drawn) for duration in drawn]


@dataclass(frozen=True)
class Work:
    """What each node does, and in how many slots of each stage."""

    slots: int
    waves: int
    """Rollouts that each slot of RUN works through."""
    run_s: float
    """Mean of RUN."""

    def tasks(self, nodes: int, seed: int) -> list[dict[str, float]]:
        """As much as is right for so many nodes."""
        run = durations(nodes * self.slots * self.waves, self.run_s, seed)
        return [{"init_s": INIT_S, "run_s": run_s, "eval_s": EVAL_S} for run_s in run]


def prepare(nodes: Nodes, size: int, slots: int) -> None:
    """Have so many nodes take part, and their workers do their first rollouts, which take longer."""
    nodes.use(size)
    nodes.give(Slots(slots, slots, slots))
    nodes.rate([{}] * size * slots * 2, f"{size} nodes, to begin with")


def scale(nodes: Nodes, work: Work, rounds: int) -> dict[str, list[float]]:
    """Rollouts a second of one node and of all; each round goes through the sizes in the other direction."""
    sizes = {1: "one", nodes.count: "weak"}
    per_s: dict[str, list[float]] = {"one": [], "weak": [], "strong_one": []}
    for number in range(rounds):
        for size in sorted(sizes, reverse=number % 2 == 1):
            prepare(nodes, size, work.slots)
            rate = nodes.rate(work.tasks(size, number), f"round {number + 1}, {size} nodes")
            per_s[sizes[size]].append(rate)
            if size == 1 and number == 0:
                # The work of all nodes is the same in weak and strong scaling.
                rate = nodes.rate(work.tasks(nodes.count, number), "one node, the work of all")
                per_s["strong_one"].append(rate)
    return per_s


def overlap(nodes: Nodes, slots: int, waves: int) -> float:
    """EVAL takes as long as RUN, on one node: rollouts a second over what RUN alone could do."""
    prepare(nodes, 1, slots)
    count = slots * waves
    run, score = durations(count, OVERLAP_S, 1), durations(count, OVERLAP_S, 2)
    tasks = [
        {"init_s": INIT_S, "run_s": run_s, "eval_s": eval_s} for run_s, eval_s in zip(run, score, strict=True)
    ]
    return nodes.rate(tasks, "overlap") * OVERLAP_S / slots


def measure_real() -> dict[str, Any]:
    """Weak scaling from one node to two, each with a sandbox host of its own.

    Raises:
        RuntimeError: A sandbox was left over.
    """
    per_s = {}
    with cluster(2, Slots(REAL_SLOTS, REAL_SLOTS, REAL_SLOTS), real=True) as nodes:
        nodes.init_env = {"ROLLOUT_READY_AHEAD": str(REAL_SLOTS)}
        for size in (1, 2):
            nodes.use(size)
            # The first ones unpack the image and bring the pools up.
            nodes.rate([{"command": COMMAND}] * REAL_SLOTS * size, f"{size} real nodes, first")
            run = durations(size * REAL_SLOTS * REAL_WAVES, REAL_RUN_S, 0)
            tasks = [{"run_s": run_s, "command": COMMAND} for run_s in run]
            per_s[size] = nodes.rate(tasks, f"{size} real nodes")
        nodes.end(real=True)
        if left_over := [path for number in range(2) for path in leftovers(nodes.state(number))]:
            raise RuntimeError(f"sandboxes left something: {left_over}")
    return {"weak_efficiency_2": round(per_s[2] / (2 * per_s[1]), 4), "per_s": per_s}


def main() -> None:
    parser = make_parser(__doc__, count=480, rounds=2)
    parser.add_argument("--slots", type=int, default=2, help="of each stage on a node")
    parser.add_argument("--run-s", type=float, default=0.5, help="mean of RUN")
    parser.add_argument("--real", action="store_true", help="add nodes with real Apptainer sandboxes")
    options = parser.parse_args()
    short = options.rounds == 1
    size = SHORT_NODES if short else NODES
    run_s = min(options.run_s, 0.3) if short else options.run_s
    work = Work(options.slots, max(1, options.count // (size * options.slots)), run_s)
    load = head.Load(SHORT_LIVE, 3.0, 256, 4.0, 1.0) if short else head.Load(LIVE, 60.0, 4096, 30.0, 5.0)
    most = Slots(32, int(load.live * HEADROOM / size) + 1, 32)
    with cluster(size, most) as nodes:
        if not short:
            # As it is by default from 64 slots on: INIT a wave ahead of RUN, no more.
            nodes.init_env = {"ROLLOUT_READY_AHEAD": str(options.slots)}
        per_s = scale(nodes, work, options.rounds)
        overlapped = overlap(nodes, options.slots, SHORT_WAVES if short else OVERLAP_WAVES)
        if not short:
            nodes.use(0)
            nodes.init_env = {}
        nodes.use(size)
        nodes.give(most)
        of_head = head.measure(nodes, load)
    details = {"real": measure_real()} if options.real else {}
    weak = [many / (size * one) for many, one in zip(per_s["weak"], per_s["one"], strict=True)]
    report(
        "scaling",
        {
            "weak_efficiency_8": round(statistics.median(weak), 4),
            "strong_efficiency_8": round(per_s["weak"][0] / (size * per_s["strong_one"][0]), 4),
            "overlap_ratio_to_bound": round(overlapped, 4),
            "dispatch_p99_s_with_wave": round(of_head["dispatch_p99_s"]["wave_included"], 4),
            "dispatch_p99_s_in_turnover": round(of_head["dispatch_p99_s"]["in_turnover"], 4),
            "head_cpu_cores": round(of_head["cpu_cores"], 4),
            "head_rss_mb": round(of_head["rss_mb"], 1),
        },
        nodes=size,
        per_s={name: summary(values) for name, values in per_s.items()},
        weak_efficiency=summary(weak),
        head={**of_head, "load": asdict(load)},
        options=vars(options),
        **details,
    )


if __name__ == "__main__":
    main()
