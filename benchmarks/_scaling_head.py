"""What a head costs that has many live rollouts, and how soon it hands out work."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks._harness import cpu_seconds, memory_mb, percentile, say
from benchmarks._scaling_nodes import LIVE, Nodes
from benchmarks._service import PATIENCE_S, STAGES
from rollout.schema import RolloutRequest
from tests.helpers.stack import wait_until
from tests.helpers.waiters import Waiters

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
            page = self._client.completions(cursor=cursor, wait=1.0, tag=TAG, include="arrays")
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
            lambda: training.done() or nodes.in_state(*LIVE[:3]) <= STRAY * load.live,
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
                live.append(nodes.in_state(*LIVE))
                clients.read()
                time.sleep(SAMPLE_S)
            seconds, ended, end = time.monotonic() - began, trainer.read - read, _redis_time(nodes)
            cores = {part: (used - cpu_s[part]) / seconds for part, used in _cpu_s(nodes).items()}
    p99_s = {
        "wave_included": dispatch_p99_s(nodes, trainer.submitted, wave_began, end),
        "in_turnover": dispatch_p99_s(nodes, trainer.submitted, wave_ended, end),
    }
    nodes.client.cancel_many(tag=TAG)
    wait_until(lambda: nodes.in_state(*LIVE) == 0, PATIENCE_S, "the end of all rollouts")
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
    paths += ["/v1/completions?cursor=$&wait=60&tag=nobody-s"] * CURSORS
    return paths + ["/v1/completions/stream?cursor=$&tag=nobody-s"] * STREAMS


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
