"""How throughput grows with nodes, how stages overlap, and what a head with 2,000 live rollouts costs.

A real head (Redis, gateway) and 1, 2, 4, 8 virtual nodes on this machine: each has an INIT, a RUN and an EVAL
worker process of its own, and its own queues for what its sandboxes hold. Sandboxes, engine and scoring are
sleeps, so that 24 workers find room on two cores; a simulated sandbox host speaks the real one's protocol.

* Weak scaling: work grows with the nodes. Strong: the work of the most nodes on fewer of them. Throughput is
  rollouts over the time from the first submission to the last end: filling up and running dry count. That of
  the steady state stands beside it. Efficiency = throughput / (nodes x throughput of one node).
* Overlap: EVAL as long as RUN. What RUN's slots could do at most is the bound; beside it a loop that does
  INIT, RUN and EVAL in turn, in as many slots.
* Head: rollouts are kept at 2,000 live while a trainer reads each result with its trajectory, acknowledges it
  and submits another one, and 400 clients wait. Dispatch is the time from the moment a rollout could be
  claimed for a stage (queued, ready, evaluating) until a worker claimed it; slots are free all the time. The
  worst stage counts.

Weak scaling of 1 and 8 nodes is done `--rounds` times, the rest once. --full does strong scaling on 2 and 4
nodes as well, and all sizes in all rounds; --real adds 1 and 2 nodes with real Apptainer sandboxes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import _scaling_head as head
from benchmarks import _scaling_real as real
from benchmarks._harness import report, summary
from benchmarks._latency import end_in_order_on_sigterm, private_directory
from benchmarks._scaling_nodes import Nodes, Slots
from benchmarks._scaling_work import Scaling, Work, busy_share, overlap

LIVE = 2000
SHORT_LIVE = 60
NODES, SHORT_NODES = 8, 2


@contextmanager
def cluster(count: int, most: Slots) -> Iterator[Nodes]:
    """Virtual nodes in private directories."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        private_directory() as sandboxes,
        Nodes(Path(directory), sandboxes, count, most) as nodes,
    ):
        yield nodes


def scaling_details(scaling: Scaling, work: Work) -> dict[str, Any]:
    """What each size did, round by round."""
    most = scaling.sizes[-1]
    return {
        "weak": {
            size: {
                "per_s": summary([one.per_s for one in outcomes]),
                "efficiency": summary(scaling.weak_efficiencies(size)),
                "steady_efficiency": summary(scaling.weak_efficiencies(size, steady=True)),
                "slots_busy": summary([busy_share(one, size, work, size) for one in outcomes]),
                "rollouts": outcomes[0].count,
            }
            for size, outcomes in scaling.weak.items()
        },
        "strong": {
            size: {
                "seconds": summary([one.seconds for one in outcomes]),
                "efficiency": summary(scaling.strong_efficiencies(size)),
                "slots_busy": summary([busy_share(one, size, work, most) for one in outcomes]),
                "rollouts": outcomes[0].count,
            }
            for size, outcomes in scaling.strong.items()
            if outcomes
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=640, help="rollouts of the strong scaling")
    parser.add_argument("--rounds", type=int, default=2, help="of weak scaling")
    parser.add_argument("--slots", type=int, default=2, help="of each stage on a node")
    parser.add_argument("--run-s", type=float, default=0.5, help="mean of RUN")
    parser.add_argument("--full", action="store_true", help="everything, at every size, in every round")
    parser.add_argument("--real", action="store_true", help="add nodes with real Apptainer sandboxes")
    options = parser.parse_args()
    end_in_order_on_sigterm()
    short = options.rounds == 1
    count = SHORT_NODES if short else NODES
    run_s = min(options.run_s, 0.3) if short else options.run_s
    work = Work(options.slots, max(1, options.count // (count * options.slots)), run_s)
    load = head.Load(SHORT_LIVE, 3.0, 256, 4.0) if short else head.Load(LIVE, 60.0, 4096, 40.0)
    overlap_work = Work(options.slots, 5, run_s) if short else Work(options.slots, 75, 0.8)
    most = Slots(32, int(load.live * head.HEADROOM / count) + 1, 32)
    with cluster(count, most) as nodes:
        if not short:
            # As it is by default from 64 slots on: INIT a wave ahead of RUN, no more.
            nodes.init_env = {"ROLLOUT_READY_AHEAD": str(options.slots)}
        scaling = Scaling(nodes, work, options.full)
        for number in range(options.rounds):
            scaling.round(number)
        overlapped = overlap(nodes, overlap_work)
        if not short:
            nodes.use(0)
            nodes.init_env = {}
        of_head = head.measure(nodes, load)
    largest = scaling.sizes[-1]
    details: dict[str, Any] = scaling_details(scaling, work)
    if options.real:
        details["real"] = real.measure()
    report(
        "scaling",
        {
            "weak_efficiency_8": round(statistics.median(scaling.weak_efficiencies(largest)), 4),
            "strong_efficiency_8": round(statistics.median(scaling.strong_efficiencies(largest)), 4),
            "overlap_ratio_to_bound": round(overlapped["ratio"], 4),
            "dispatch_p99_s": round(of_head["dispatch_p99_s"], 4),
            "head_cpu_cores": round(of_head["cpu_cores"], 4),
            "head_rss_mb": round(of_head["rss_mb"], 1),
        },
        nodes=largest,
        **details,
        overlap=overlapped,
        head={**of_head, "load": asdict(load)},
        options=vars(options),
    )


if __name__ == "__main__":
    main()
