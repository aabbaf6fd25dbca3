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
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks._nodes import LIVE_STATES, Nodes, Slots, cluster
from benchmarks.harness import (
    PATIENCE_S,
    STAGES,
    cpu_seconds,
    make_parser,
    memory_mb,
    percentile,
    report,
    say,
    summary,
)
from rollout.schema import RolloutRequest
from tests.helpers.stack import wait_until
from tests.helpers.waiters import Waiters

# -- the head ------------------------------------------------------------------------------------------


TAG = "trained-on"
POLLS, CURSORS, STREAMS = 200, 100, 100
"""Clients that wait meanwhile: for a rollout each, for completions, on streams."""
STRAY = 0.02
"""Share of the wave that may be on its way to RUN when it counts as live: some always are."""
SAMPLE_S = 1.0
LEAST = 30
"""Rollouts that must have come and gone in the time measured."""


@dataclass(frozen=True)
class Load:
    """How many live rollouts, and how they turn over."""

    live: int
    run_s: float
    """Mean of RUN; `live / run_s` rollouts end a second."""
    tokens: int
    """Sampled tokens of each trajectory."""
    seconds: float
    """How long to measure once they live."""


class Trainer:
    """Reads results as they come, acknowledges each and submits another rollout in its place."""

    def __init__(self, nodes: Nodes, load: Load) -> None:
        self._client, self._load = nodes.client, load
        self._chance = random.Random(0)
        self._stop = threading.Event()
        self.submitted: list[str] = []
        self.read = 0
        """Results read so far."""

    def submit(self, count: int, *, fresh: bool = True) -> None:
        """Submit fresh rollouts, or as if met at any time of their lives: they do not end together."""
        low, high = (0.5, 1.5) if fresh else (0.05, 1.0)
        durations = [self._load.run_s * self._chance.uniform(low, high) for _ in range(count)]
        task = {"init_s": 0.5, "eval_s": 0.5, "tokens": self._load.tokens}
        requests = [
            RolloutRequest(handler="simulated", tags=[TAG], task={**task, "run_s": run_s})
            for run_s in durations
        ]
        self.submitted += [new.id for new in self._client.submit(requests)]

    @contextmanager
    def training(self) -> Iterator[Future[None]]:
        """Train in a thread until the end of the block; the future ends early only by an error."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(self._train)
            try:
                yield future
            finally:
                self._stop.set()
            future.result()

    def _train(self) -> None:
        cursor = "0"
        while not self._stop.is_set():
            page = self._client.results(cursor=cursor, wait=1.0, tag=TAG, include="arrays")
            cursor = page.cursor
            if not page.rollouts:
                continue
            if any(len(item.arrays.response_ids) != self._load.tokens for item in page.rollouts):
                raise RuntimeError("a result came without its trajectory")
            self.read += len(page.rollouts)
            self._client.ack([item.id for item in page.rollouts])
            self.submit(len(page.rollouts))


def measure(nodes: Nodes, load: Load) -> dict[str, Any]:
    """Bring the nodes to `live` rollouts in one wave and keep them there; a trainer reads, clients wait.

    Raises:
        RuntimeError: A stage claimed nothing in the time measured.
    """
    trainer, wave_began = Trainer(nodes, load), _redis_time(nodes)
    trainer.submit(load.live, fresh=False)
    with trainer.training() as training:
        wait_until(
            lambda: training.done() or nodes.in_state(*LIVE_STATES[:3]) <= STRAY * load.live,
            PATIENCE_S,
            f"RUN of {load.live} rollouts",
        )
        wave_ended = _redis_time(nodes)
        say(f"head: {load.live} live after {wave_ended - wave_began:.1f} s")
        rss_mb, live = [], []
        with Waiters("127.0.0.1", nodes.stack.port, _waiting_paths(nodes)) as clients:
            cpu_s, began, read = _cpu_s(nodes), time.monotonic(), trainer.read
            while not training.done() and (
                time.monotonic() < began + load.seconds or trainer.read - read < LEAST
            ):
                rss_mb.append(memory_mb(nodes.head_pids.values(), "rss"))
                live.append(nodes.in_state(*LIVE_STATES))
                clients.read()
                time.sleep(SAMPLE_S)
            seconds, ended, end = time.monotonic() - began, trainer.read - read, _redis_time(nodes)
            cores = {part: (used - cpu_s[part]) / seconds for part, used in _cpu_s(nodes).items()}
    p99_s = {
        "wave_included": dispatch_p99_s(nodes, trainer.submitted, wave_began, end),
        "in_turnover": dispatch_p99_s(nodes, trainer.submitted, wave_ended, end),
    }
    nodes.client.cancel_many(tag=TAG)
    wait_until(lambda: nodes.in_state(*LIVE_STATES) == 0, PATIENCE_S, "the end of all rollouts")
    say(f"head: dispatch p99 {p99_s}, {cores}, {max(rss_mb):.0f} MB")
    return {
        "dispatch_p99_s": p99_s,
        "cpu_cores": cores,
        "rss_mb": max(rss_mb),
        "live_least": min(live),
        "wave_s": wave_ended - wave_began,
        "ended_per_s": ended / seconds,
    }


def _cpu_s(nodes: Nodes) -> dict[str, float]:
    """Processor seconds that each part of the head has used so far."""
    return {part: cpu_seconds([pid]) for part, pid in nodes.head_pids.items()}


def _waiting_paths(nodes: Nodes) -> list[str]:
    """What each of the clients asks for that wait: in vain for as long as is measured."""
    running = nodes.redis.zrange("rollouts:state:running", -POLLS, -1)
    paths = [f"/v1/rollouts/{rollout_id}?wait=60&include=summary" for rollout_id in running]
    paths += ["/v1/results?cursor=$&wait=60&tag=nobody-s"] * CURSORS
    return paths + ["/v1/results/stream?cursor=$&tag=nobody-s"] * STREAMS


def dispatch_p99_s(nodes: Nodes, ids: list[str], begin: float, end: float) -> dict[str, float]:
    """99th percentile of the seconds from the moment a rollout could be claimed for a stage until it was.

    Of every claim between `begin` and `end` by Redis' clock; what still waits at the end has waited for so
    long already.
    """
    waits: dict[str, list[float]] = {stage: [] for stage in STAGES}
    with nodes.redis.pipeline(transaction=False) as pipe:
        for rollout_id in ids:
            pipe.lrange(f"rollout:{{{rollout_id}}}:timeline", 0, -1)
        timelines = pipe.execute()
    for lines in timelines:
        # queued, initializing, ready, running, evaluating, evaluating (claimed), completed
        at = [int(line.split()[1]) / 1e3 for line in lines if not line.startswith("note ")]
        for stage, number in zip(STAGES, (0, 2, 4), strict=True):
            if len(at) > number and at[number] < end:
                claimed = at[number + 1] if len(at) > number + 1 else end
                if begin <= claimed:
                    waits[stage].append(min(claimed, end) - at[number])
    if not all(waits.values()):
        counts = {stage: len(values) for stage, values in waits.items()}
        raise RuntimeError(f"too little was dispatched in the time measured: {counts}; measure for longer")
    return {stage: round(percentile(values, 0.99), 4) for stage, values in waits.items()}


def _redis_time(nodes: Nodes) -> float:
    seconds, micros = nodes.redis.time()
    return seconds + micros / 1e6


# -- all -----------------------------------------------------------------------------------------------


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
    load = Load(SHORT_LIVE, 3.0, 256, 3.0) if short else Load(LIVE, 60.0, 4096, 30.0)
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
        of_head = measure(nodes, load)
    weak = [
        all_nodes / (size * one_node) for all_nodes, one_node in zip(per_s["all"], per_s["one"], strict=True)
    ]
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
