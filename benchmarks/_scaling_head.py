"""What a head costs that has many live rollouts, and how soon it hands out work."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks._harness import cpu_seconds, percentile, say
from benchmarks._scaling_nodes import LIVE, Nodes
from benchmarks._service import PATIENCE_S, STAGES, memory_mb
from rollout.schema import RolloutRequest
from services.state.observations import Observations, stage_totals
from tests.helpers.stack import wait_until
from tests.helpers.waiters import Waiters

TAG = "trained-on"
POLLS, CURSORS, STREAMS = 200, 100, 100
"""Clients that wait meanwhile: for a rollout each, for completions, on streams."""
STRAY = 0.02
"""Share of the wave that may be on their way to RUN when it counts as live: some always are."""
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
    idle_s: float
    """How long to watch the workers idle before."""


class Trainer:
    """Reads results as they come, acknowledges each and submits another rollout in its place."""

    def __init__(self, nodes: Nodes, load: Load) -> None:
        self._client, self._load = nodes.client, load
        self._chance = random.Random(0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer")
        self.error: BaseException | None = None
        self.submitted: list[str] = []
        self.read = 0
        """Results read so far."""

    def submit(self, count: int, *, fresh: bool = True) -> None:
        """Fresh ones, or as if met at any time of their lives, so that they do not end together."""
        low, high = (0.5, 1.5) if fresh else (0.05, 1.0)
        tasks = [
            {
                "init_s": 0.5,
                "run_s": self._load.run_s * self._chance.uniform(low, high),
                "eval_s": 0.5,
                "tokens": self._load.tokens,
            }
            for _ in range(count)
        ]
        requests = [RolloutRequest(handler="simulated", tags=[TAG], task=task) for task in tasks]
        self.submitted += [new.id for new in self._client.submit(requests)]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End; raises what went wrong meanwhile."""
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
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
        except BaseException as error:
            self.error = error


@contextmanager
def head_work(nodes: Nodes) -> Iterator[dict[str, float]]:
    """What Redis and the gateway do in the block: processor seconds, commands, bytes, seconds."""

    def now() -> dict[str, float]:
        info = nodes.redis.info()
        return {
            "seconds": time.monotonic(),
            "redis_cpu_s": cpu_seconds(nodes.redis_pids[:1]),
            "gateway_cpu_s": cpu_seconds(nodes.gateway_pids[:1]),
            "commands": info["total_commands_processed"],
            "bytes": info["total_net_input_bytes"] + info["total_net_output_bytes"],
        }

    before, work = now(), {}
    yield work
    work.update({name: value - before[name] for name, value in now().items()})


def measure(nodes: Nodes, load: Load) -> dict[str, Any]:
    """Bring the nodes to `live` rollouts in one wave and keep them there; a trainer reads, clients wait.

    Raises:
        RuntimeError: A stage claimed nothing in the time measured.
    """
    idle_memory = nodes.redis.info()["used_memory"]
    with head_work(nodes) as idle:
        time.sleep(load.idle_s)
    trainer, before = Trainer(nodes, load), _through_init(nodes)
    wave_began = _redis_time(nodes)
    trainer.submit(load.live, fresh=False)
    trainer.start()
    try:
        wait_until(
            lambda: trainer.error or _through_init(nodes) >= before + load.live,
            PATIENCE_S,
            "INIT of the wave",
        )
        on_their_way = LIVE[:3]
        wait_until(
            lambda: trainer.error or nodes.in_state(*on_their_way) <= STRAY * load.live,
            PATIENCE_S,
            "RUN of it",
        )
        wave_ended = _redis_time(nodes)
        say(f"head: {load.live} live after {wave_ended - wave_began:.1f} s")
        rss_mb, live = [], []
        with (
            Waiters("127.0.0.1", nodes.stack.port, _waiting_paths(nodes)) as clients,
            head_work(nodes) as used,
        ):
            read, submitted = trainer.read, len(trainer.submitted)
            until = time.monotonic() + load.seconds
            while trainer.error is None and (
                time.monotonic() < until
                or min(trainer.read - read, len(trainer.submitted) - submitted) < LEAST
            ):
                rss_mb.append(memory_mb(nodes.redis_pids + nodes.gateway_pids, "rss"))
                live.append(nodes.in_state(*LIVE))
                clients.read()
                time.sleep(SAMPLE_S)
            ended, end = trainer.read - read, _redis_time(nodes)
    finally:
        trainer.stop()
    memory_each = (nodes.redis.info()["used_memory"] - idle_memory) / load.live
    waits = {
        "wave_included": dispatch_waits(nodes, trainer.submitted, wave_began, end),
        "in_turnover": dispatch_waits(nodes, trainer.submitted, wave_ended, end),
    }
    nodes.client.cancel_many(tag=TAG)
    wait_until(lambda: nodes.in_state(*LIVE) == 0, PATIENCE_S, "the end of all rollouts")
    p99_s = {name: max(percentile(values, 0.99) for values in by.values()) for name, by in waits.items()}
    cores = (used["redis_cpu_s"] + used["gateway_cpu_s"]) / used["seconds"]
    say(f"head: dispatch p99 {p99_s}, {cores:.2f} cores, {max(rss_mb):.0f} MB")
    idle_redis_cpu = idle["redis_cpu_s"] / idle["seconds"]
    return {
        "dispatch_p99_s": p99_s,
        "cpu_cores": cores,
        "rss_mb": max(rss_mb),
        "live_least": min(live),
        "wave_s": wave_ended - wave_began,
        "dispatch_s": {
            name: {stage: _quantiles(values) for stage, values in by.items()} for name, by in waits.items()
        },
        "ended_per_s": ended / used["seconds"],
        "each": {
            "redis_cpu_ms": (used["redis_cpu_s"] - idle_redis_cpu * used["seconds"]) / ended * 1e3,
            "gateway_cpu_ms": used["gateway_cpu_s"] / ended * 1e3,
            "redis_commands": used["commands"] / ended,
            "redis_kb": used["bytes"] / ended / 1e3,
            "redis_memory_kb_live": memory_each / 1e3,
        },
        "idle": {
            "workers": nodes.worker_count,
            "redis_cpu_ms_a_worker_s": idle_redis_cpu / nodes.worker_count * 1e3,
            "redis_commands_a_worker_s": idle["commands"] / idle["seconds"] / nodes.worker_count,
        },
    }


def _waiting_paths(nodes: Nodes) -> list[str]:
    """What each of the clients asks for that wait: in vain for as long as is measured."""
    running = nodes.redis.zrange("rollouts:state:running", -POLLS, -1)
    paths = [f"/v1/rollouts/{rollout_id}?wait=60&include=summary" for rollout_id in running]
    paths += ["/v1/completions?cursor=$&wait=60&tag=nobody-s"] * CURSORS
    return paths + ["/v1/completions/stream?cursor=$&tag=nobody-s"] * STREAMS


def _quantiles(waits: list[float]) -> dict[str, float]:
    return {
        "p50": round(statistics.median(waits), 4),
        "p99": round(percentile(waits, 0.99), 4),
        "max": round(max(waits), 4),
        "n": len(waits),
    }


def _through_init(nodes: Nodes) -> int:
    """Rollouts that INIT has done so far."""
    _, count = stage_totals(Observations(nodes.redis).histograms()).get("init", (0.0, 0))
    return count


def dispatch_waits(nodes: Nodes, ids: list[str], begin: float, end: float) -> dict[str, list[float]]:
    """Stage → seconds from the moment a rollout could be claimed for it until it was; by Redis' clock.

    Of every claim between `begin` and `end`; what still waits at the end has waited for so long already.
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
    return waits


def _redis_time(nodes: Nodes) -> float:
    seconds, micros = nodes.redis.time()
    return seconds + micros / 1e6
