"""How throughput grows with nodes, how stages overlap, how fast INIT claims a wave, and what a head costs.

A real head (Redis, gateway) and 1 or 8 virtual nodes on this machine, whose sandboxes, engine and scoring
are sleeps. Weak scaling: work grows with the nodes; strong: the work of the most nodes on one of them.
Efficiency is throughput over that of one node times the nodes. What each key is: docs/scaling.md#measured.
Dispatch is the time from the moment a rollout could be claimed for a stage (queued, ready, evaluating)
until a worker claimed it.

Dispatch is measured with 2,000 live rollouts, what the head costs with 10,000. The wave is 10,000 no-op
rollouts and as many tasks of bare Celery that do nothing, both on one broker, in turns, with as many worker
processes and slots: the time from the first submission until INIT has claimed all, and workers have taken all
tasks.

Weak scaling is done `--rounds` times, the rest once.
"""

from __future__ import annotations

import random
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import harness, pipeline
from benchmarks._nodes import Nodes, cluster
from benchmarks.harness import LIVE_STATES, PATIENCE_S, STAGES, wait_until
from rollout.schema import RolloutRequest
from tests.helpers.waiters import Waiters

# -- the head ------------------------------------------------------------------------------------------


WAITING, SHORT_WAITING = (200, 100, 100), (10, 5, 5)
"""Clients that wait meanwhile: for a rollout each, for results, on streams."""
STRAY = 0.02
"""Share of the wave that may be on its way to RUN when it counts as live: some always are."""
SAMPLE_S = 1.0
MOST_AT_ONCE = 2000
"""Rollouts of one call of submission: a client waits 30 s for its answer, however busy the machine."""
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
    waiting: tuple[int, int, int]


class Trainer:
    """Reads results as they come, acknowledges each and submits another rollout in its place."""

    def __init__(self, nodes: Nodes, load: Load) -> None:
        self._stack, self._load = nodes.stack, load
        self._chance = random.Random(0)
        self._cursor = "0"
        self._tag = f"trained-on-{secrets.token_hex(4)}"
        """Not that of a load before, whose rollouts were cancelled."""
        self.submitted: list[str] = []
        self.read = 0
        """Results read so far."""

    def submit(self, count: int, low: float = 0.5, high: float = 1.5) -> None:
        """Submit rollouts whose RUN takes between `low` and `high` times the mean."""
        task = {"init_s": 0.5, "eval_s": 0.5, "turns": [self._load.tokens]}
        durations = [self._load.run_s * self._chance.uniform(low, high) for _ in range(count)]
        requests = [
            RolloutRequest(handler="simulated", tags=[self._tag], task={**task, "run_s": run_s})
            for run_s in durations
        ]
        for first in range(0, count, MOST_AT_ONCE):  # nearly always one call
            some = requests[first : first + MOST_AT_ONCE]
            self.submitted += [new.id for new in self._stack.client.submit(some)]

    def train(self, is_over: Callable[[], bool]) -> None:
        """Train until it is over; that is asked at least ten times a second."""
        client = self._stack.client
        while not is_over():
            page = client.results(cursor=self._cursor, wait=0.1, tag=self._tag, include="arrays")
            self._cursor = page.cursor
            if not page.rollouts:
                continue
            if any(len(item.arrays.response_ids) != self._load.tokens for item in page.rollouts):
                raise RuntimeError("a result came without its trajectory")
            self.read += len(page.rollouts)
            client.ack([item.id for item in page.rollouts])
            self.submit(len(page.rollouts))


def measure(nodes: Nodes, load: Load) -> dict[str, Any]:
    """Bring the nodes to `live` rollouts in one wave and keep them there; a trainer reads, clients wait.

    Raises:
        RuntimeError: A stage claimed nothing in the time measured.
    """
    stack, trainer = nodes.stack, Trainer(nodes, load)
    head = {"redis": stack.redis.pid, "gateway": stack.gateway.pid}
    rss_mb, live = [], []

    def now() -> float:
        seconds, micros = stack.redis.client.time()
        return seconds + micros / 1e6

    def cpu_s() -> dict[str, float]:
        return {part: harness.cpu_seconds([pid]) for part, pid in head.items()}

    def all_live() -> bool:
        if now() > wave_began + PATIENCE_S:
            raise TimeoutError(f"after {PATIENCE_S:g} s RUN did not have {load.live} rollouts")
        return harness.in_state(stack, *LIVE_STATES[:3]) <= STRAY * load.live

    def enough() -> bool:
        if time.monotonic() > began + SAMPLE_S * len(live):
            rss_mb.append(harness.memory_mb(head.values(), "rss"))
            live.append(harness.in_state(stack, *LIVE_STATES))
        clients.read()
        return time.monotonic() > began + load.seconds and trainer.read - read >= LEAST

    wave_began = now()
    trainer.submit(load.live, 0.05, 1.0)  # as if met at any time of their lives: they do not end together
    trainer.train(all_live)
    wave_ended = now()
    harness.say(f"head: {load.live} live after {wave_ended - wave_began:.1f} s")
    polls, cursors, streams = load.waiting
    running = stack.redis.client.zrange("rollouts:state:running", -polls, -1)
    paths = harness.waiting_paths(running, cursors, streams)
    with Waiters("127.0.0.1", stack.port, paths) as clients:
        cpu_before, began, read = cpu_s(), time.monotonic(), trainer.read
        trainer.train(enough)
        seconds, ended, end = time.monotonic() - began, trainer.read - read, now()
        cores = {part: (used - cpu_before[part]) / seconds for part, used in cpu_s().items()}
    p99_s = {
        "wave_included": dispatch_p99_s(nodes, trainer.submitted, wave_began, end),
        "after_wave": dispatch_p99_s(nodes, trainer.submitted, wave_ended, end),
    }
    for first in range(0, len(trainer.submitted), harness.PER_CALL):
        stack.client.cancel_many(trainer.submitted[first : first + harness.PER_CALL])
    wait_until(lambda: harness.in_state(stack, *LIVE_STATES) == 0, PATIENCE_S, "the end of all rollouts")
    harness.say(f"head: dispatch p99 {p99_s}, {cores}, {max(rss_mb):.0f} MB")
    return {
        "dispatch_p99_s": p99_s,
        "cpu_cores": cores,
        "rss_mb": max(rss_mb),
        "live_least": min(live),
        "wave_s": wave_ended - wave_began,
        "ended_per_s": ended / seconds,
    }


def dispatch_p99_s(nodes: Nodes, ids: list[str], begin: float, end: float) -> dict[str, float]:
    """99th percentile of the seconds from the moment a rollout could be claimed for a stage until it was.

    Of everything that could be claimed from `begin` to `end` by Redis' clock; what still waits at the end
    has waited for so long already.
    """
    waits: dict[str, list[float]] = {stage: [] for stage in STAGES}
    with nodes.stack.redis.client.pipeline(transaction=False) as pipe:
        for rollout_id in ids:
            pipe.lrange(f"rollout:{{{rollout_id}}}:timeline", 0, -1)
        timelines = pipe.execute()
    for lines in timelines:
        # queued, initializing, ready, running, evaluating, evaluating (claimed), completed
        at = [int(line.split()[1]) / 1e3 for line in lines if not line.startswith("note ")]
        for stage, ready, claimed in zip(STAGES, at[::2], [*at[1::2], end], strict=False):
            if begin <= ready < end:
                waits[stage].append(min(claimed, end) - ready)
    if not all(waits.values()):
        counts = {stage: len(values) for stage, values in waits.items()}
        raise RuntimeError(f"too little was dispatched in the time measured: {counts}; measure for longer")
    return {stage: harness.percentile(values, 0.99) for stage, values in waits.items()}


# -- a wave --------------------------------------------------------------------------------------------


PROCESSES, WAVE_SLOTS = 2, 64
"""Workers of each side, and slots of each."""


def wave(count: int, processes: int) -> dict[str, float]:
    """Seconds until INIT has claimed a wave of no-op rollouts, and workers have taken as many bare tasks."""
    with harness.service(ROLLOUT_READY_AHEAD=str(3 * count)) as stack:
        redis = stack.redis.client
        pipeline.app.conf.broker_url = stack.redis.url
        ours = [harness.launch(stack, "init", WAVE_SLOTS) for _ in range(processes)]
        bare = [
            harness.launch(stack, pipeline.QUEUES[0], WAVE_SLOTS, app="benchmarks.pipeline")
            for _ in range(processes)
        ]
        for worker in ours:
            harness.await_worker(stack, "init", worker)

        def seconds(submit: Callable[[int], object], waiting: Callable[[], int], number: int) -> float:
            began = time.monotonic()
            submit(number)
            while waiting():
                if time.monotonic() > began + PATIENCE_S:
                    raise TimeoutError(f"a wave of {number} was not taken in {PATIENCE_S:g} s")
                time.sleep(harness.POLL_S)
            return time.monotonic() - began

        sides = {
            "ours": (lambda n: pipeline.submit_ours(stack, n), lambda: harness.in_state(stack, "queued")),
            "bare": (pipeline.submit_bare, lambda: redis.llen(pipeline.QUEUES[0])),
        }
        for side in sides.values():
            seconds(*side, max(1, count // 10))  # workers still import what they need
        taken = {name: seconds(*side, count) for name, side in sides.items()}
        harness.say(f"wave of {count}: {taken}, {len(bare)} bare workers")
        return taken


# -- all -----------------------------------------------------------------------------------------------


NODES, SHORT_NODES = 8, 2
DISPATCHED = Load(2000, 60.0, 4096, 20.0, WAITING)
HEAD = Load(10_000, 300.0, 4096, 30.0, WAITING)
SHORT_LOAD = Load(30, 1.5, 256, 1.5, SHORT_WAITING)
WAVE, SHORT_WAVE = 10_000, 200
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


def prepare(nodes: Nodes, size: int, **env: str) -> None:
    """Have so many nodes take part, and their workers do their first rollouts, which take longer."""
    nodes.use(size, **env)
    nodes.give(dict.fromkeys(STAGES, SLOTS))
    nodes.rate([{"init_s": 0.001}] * size * SLOTS * 2, f"{size} nodes, to begin with")


def scale(nodes: Nodes, each: int, rounds: int, **env: str) -> dict[str, list[float]]:
    """Rollouts a second of one node and of all; each round goes through the sizes in the other direction.

    Args:
        each: Rollouts for each node.
    """
    sizes = {"one": 1, "all": nodes.count}
    per_s: dict[str, list[float]] = {"one": [], "all": [], "one_with_the_work_of_all": []}
    for number, name in harness.in_turns(sizes, rounds):
        prepare(nodes, sizes[name], **env)
        what = f"round {number + 1}, {name}"
        per_s[name].append(nodes.rate(tasks(sizes[name] * each, number), what))
        if name == "one" and number == 0:
            rate = nodes.rate(tasks(nodes.count * each, number), f"{what}, the work of all")
            per_s["one_with_the_work_of_all"].append(rate)
    return per_s


def overlap(nodes: Nodes, count: int, **env: str) -> float:
    """EVAL takes as long as RUN, on one node: rollouts a second over what RUN alone could do."""
    prepare(nodes, 1, **env)
    pairs = zip(durations(count, OVERLAP_S, 1), durations(count, OVERLAP_S, 2), strict=True)
    work = [{"init_s": INIT_S, "run_s": run_s, "eval_s": eval_s} for run_s, eval_s in pairs]
    return nodes.rate(work, "overlap") * OVERLAP_S / SLOTS


def main(options: harness.Options) -> harness.Report:
    short = options.rounds == 1
    size = SHORT_NODES if short else NODES
    each = max(SLOTS, options.count // size)
    loads = (SHORT_LOAD, SHORT_LOAD) if short else (DISPATCHED, HEAD)
    # As it is by default from 64 slots on: INIT a wave ahead of RUN, no more.
    env = {} if short else {"ROLLOUT_READY_AHEAD": str(SLOTS)}
    under_load = 1 if short else size  # a start takes seconds of a processor
    most = {"init": 32, "run": int(loads[1].live * HEADROOM / under_load) + 1, "eval": 32}
    with cluster(size, most) as nodes:
        per_s = scale(nodes, each, options.rounds, **env)
        overlapped = overlap(nodes, SHORT_OVERLAP if short else OVERLAP, **env)
        if env:
            nodes.use(0)
        nodes.use(under_load)
        nodes.give(most)
        dispatched, of_head = (measure(nodes, load) for load in loads)
    taken_s = wave(SHORT_WAVE, 1) if short else wave(WAVE, PROCESSES)
    weak = [ratio / size for ratio in harness.ratios(per_s["all"], per_s["one"])]
    dispatch_p99_s = {part: max(by_stage.values()) for part, by_stage in dispatched["dispatch_p99_s"].items()}
    return {
        "results": {
            "weak_efficiency_8": statistics.median(weak),
            "strong_efficiency_8": per_s["all"][0] / (size * per_s["one_with_the_work_of_all"][0]),
            "overlap_ratio_to_bound": overlapped,
            "dispatch_p99_s_with_wave": dispatch_p99_s["wave_included"],
            "dispatch_p99_s_after_wave": dispatch_p99_s["after_wave"],
            "wave_10000_init_ratio": taken_s["ours"] / taken_s["bare"],
            "head_cpu_cores": sum(of_head["cpu_cores"].values()),
            "head_rss_mb": of_head["rss_mb"],
        },
        "nodes": size,
        "per_s": {name: harness.summary(values) for name, values in per_s.items()},
        "weak_efficiency": harness.summary(weak),
        "dispatched": {**dispatched, "load": asdict(loads[0])},
        "head": {**of_head, "load": asdict(loads[1])},
        "wave_s": taken_s,
    }


if __name__ == "__main__":
    harness.run(main, count=480, rounds=2)
