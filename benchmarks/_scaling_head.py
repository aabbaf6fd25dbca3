"""What a head costs that has many live rollouts, and how soon it hands out work."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks._harness import cpu_seconds
from benchmarks._latency import percentile, say
from benchmarks._scaling_nodes import PATIENCE_S, STAGES, Nodes, Slots
from rollout.schema import RolloutRequest
from services.state.observations import Observations, stage_totals
from tests.helpers.stack import wait_until
from tests.helpers.waiters import Waiters

TAG = "trained-on"
HEADROOM = 1.12
"""Slots of RUN over live rollouts: dispatch is measured where a slot is free."""
POLLS, CURSORS, STREAMS = 200, 100, 100
"""Clients that wait meanwhile: for a rollout each, for completions, on streams."""
STRAY = 0.02
"""Share of the live rollouts that may be on their way to RUN when the measuring begins: some always are."""
SAMPLE_S = 1.0
IDLE_S = 10.0
LEAST = 30
"""Rollouts that must have come and gone in the time measured."""


@dataclass(frozen=True)
class Load:
    """How many live rollouts, and how they turn over."""

    live: int
    run_s: float
    """Mean of RUN; `live / run_s` rollouts end a second."""
    tokens: int
    """Of each trajectory."""
    seconds: float
    """How long to measure."""


class Trainer:
    """Reads results as they come, acknowledges each and submits another rollout in its place."""

    def __init__(self, nodes: Nodes, load: Load) -> None:
        self._client, self._load = nodes.client, load
        self._chance = random.Random(0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer")
        self.error: BaseException | None = None
        self.submitted: list[tuple[float, str]] = []
        """Monotonic time and id."""
        self.read: list[tuple[float, str]] = []

    def submit(self, count: int, *, fresh: bool = True) -> list[str]:
        """Fresh ones, or as if met at any time of their lives, so that they do not end together."""
        low, high = (0.5, 1.5) if fresh else (0.05, 1.0)
        mean = self._load.run_s
        requests = [
            RolloutRequest(
                handler="simulated",
                tags=[TAG],
                task={
                    "init_s": 0.5,
                    "run_s": mean * self._chance.uniform(low, high),
                    "eval_s": 0.5,
                    "tokens": self._load.tokens,
                },
            )
            for _ in range(count)
        ]
        ids = [new.id for new in self._client.submit(requests)]
        self.submitted += [(time.monotonic(), rollout_id) for rollout_id in ids]
        return ids

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Raises what went wrong meanwhile."""
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
                ids = [one.id for one in page.rollouts]
                if not ids:
                    continue
                if any(len(one.arrays.response_ids) != self._load.tokens for one in page.rollouts):
                    raise RuntimeError("a result came without its trajectory")
                self.read += [(time.monotonic(), rollout_id) for rollout_id in ids]
                self._client.ack(ids)
                self.submit(len(ids))
        except BaseException as error:
            self.error = error


def memory_mb(pid: int, field: str) -> float:
    """`Rss` or `Pss` of a process, in 10⁶ bytes; 0 when it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (
        next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{field}:")) * 1024 / 1e6
    )


class Watch:
    """Samples the head once a second: memory, live rollouts, the fullest stage of RUN."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.rss: list[float] = []
        self.pss: list[float] = []
        self.live: list[int] = []

    def sample(self) -> None:
        pids = self._nodes.head_pids
        redis = psutil.Process(self._nodes.stack.redis.pid)
        # A child that rewrites the append-only file is memory of the head, too.
        pids += [one.pid for one in redis.children()]
        self.rss.append(sum(memory_mb(pid, "Rss") for pid in pids))
        self.pss.append(sum(memory_mb(pid, "Pss") for pid in pids))
        counts = self._nodes.redis.hgetall("rollouts:counts")
        names = ("queued", "initializing", "ready", "running", "evaluating")
        self.live.append(sum(int(counts.get(name, 0)) for name in names))


@contextmanager
def redis_work(nodes: Nodes) -> Iterator[dict[str, float]]:
    """What Redis and the gateway do in the block: processor seconds, commands, bytes, seconds."""
    redis, gateway = [nodes.stack.redis.pid], [nodes.stack.gateway.pid]

    def now() -> dict[str, float]:
        info = nodes.redis.info()
        return {
            "seconds": time.monotonic(),
            "redis_cpu_s": cpu_seconds(redis),
            "gateway_cpu_s": cpu_seconds(gateway),
            "commands": info["total_commands_processed"],
            "bytes": info["total_net_input_bytes"] + info["total_net_output_bytes"],
        }

    before, found = now(), {}
    yield found
    found.update({name: value - before[name] for name, value in now().items()})


def measure(nodes: Nodes, load: Load) -> dict[str, Any]:
    """Bring the nodes to `live` rollouts and keep them there while a trainer reads and clients wait."""
    nodes.use(nodes.count)
    slots = Slots(32, int(load.live * HEADROOM / nodes.count) + 1, 32)
    nodes.give(slots)
    idle_memory = nodes.redis.info()["used_memory"]
    with redis_work(nodes) as idle:
        time.sleep(min(IDLE_S, load.seconds))
    trainer = Trainer(nodes, load)
    before = _through_init(nodes)
    wave_began = _redis_time(nodes)
    first = trainer.submit(load.live, fresh=False)
    began = time.monotonic()
    trainer.start()
    try:
        wait_until(
            lambda: trainer.error or _through_init(nodes) >= before + load.live,
            PATIENCE_S,
            f"INIT of {load.live} rollouts",
        )
        wait_until(
            lambda: trainer.error or _waiting(nodes) <= STRAY * load.live, PATIENCE_S, "RUN to have them"
        )
        ramp_s = time.monotonic() - began
        wave = dispatch_waits(nodes, first, wave_began, _redis_time(nodes), every=False)
        say(f"head: {load.live} live after {ramp_s:.1f} s")
        live = nodes.redis.zrange("rollouts:state:running", -POLLS, -1)
        paths = [f"/v1/rollouts/{one}?wait=60&include=summary" for one in live]
        paths += ["/v1/completions?cursor=$&wait=60&tag=nobody-s"] * CURSORS
        paths += ["/v1/completions/stream?cursor=$&tag=nobody-s"] * STREAMS
        watch = Watch(nodes)
        with Waiters("127.0.0.1", nodes.stack.port, paths) as waiters:
            window, begin = time.monotonic(), _redis_time(nodes)
            with redis_work(nodes) as used:
                while _measures(trainer, window, load.seconds):
                    watch.sample()
                    waiters.read()
                    time.sleep(SAMPLE_S)
            end = time.monotonic()
    finally:
        trainer.stop()
    bytes_each = (nodes.redis.info()["used_memory"] - idle_memory) / load.live
    ended = [one for at, one in trainer.read if window <= at <= end]
    waits = dispatch_waits(nodes, [one for _, one in trainer.submitted], begin, begin + end - window)
    nodes.client.cancel_many(tag=TAG)
    wait_until(lambda: _live(nodes) == 0, PATIENCE_S, "the end of all rollouts")
    p99 = {stage: percentile(values, 0.99) for stage, values in waits.items()}
    cores = (used["redis_cpu_s"] + used["gateway_cpu_s"]) / used["seconds"]
    say(f"head: dispatch p99 {p99}, {cores:.2f} cores, {max(watch.rss):.0f} MB")
    each = max(len(ended), 1)
    return {
        "dispatch_p99_s": max(p99.values()),
        "cpu_cores": cores,
        "rss_mb": max(watch.rss),
        "pss_mb": max(watch.pss),
        "live_least": min(watch.live),
        # All at once, which is another question than the turnover of those that live.
        "first_wave": {"rollouts": len(first), "seconds": ramp_s, "dispatch_s": _quantiles(wave)},
        "dispatch_s": _quantiles(waits),
        "ended_per_s": len(ended) / used["seconds"],
        "waiting_clients": len(paths),
        "each": {
            "redis_cpu_ms": (used["redis_cpu_s"] - idle["redis_cpu_s"] / idle["seconds"] * used["seconds"])
            / each
            * 1e3,
            "gateway_cpu_ms": used["gateway_cpu_s"] / each * 1e3,
            "redis_commands": used["commands"] / each,
            "redis_kb": used["bytes"] / each / 1e3,
            "redis_memory_kb_live": bytes_each / 1e3,
        },
        "idle": {
            "workers": len(nodes.worker_pids),
            "redis_cpu_ms_a_worker_s": idle["redis_cpu_s"] / idle["seconds"] / len(nodes.worker_pids) * 1e3,
            "redis_commands_a_worker_s": idle["commands"] / idle["seconds"] / len(nodes.worker_pids),
        },
    }


def _quantiles(waits: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        stage: {
            "p50": round(statistics.median(values), 4),
            "p99": round(percentile(values, 0.99), 4),
            "max": round(max(values), 4),
            "n": len(values),
        }
        for stage, values in waits.items()
        if values
    }


def _measures(trainer: Trainer, since: float, seconds: float) -> bool:
    """For so long, and on a machine that is busy with other things until there is something to count."""
    passed = time.monotonic() - since
    if trainer.error is not None:
        return False
    counted = min(sum(at > since for at, _ in seen) for seen in (list(trainer.submitted), list(trainer.read)))
    return passed < seconds or (counted < LEAST and passed < PATIENCE_S)


def _through_init(nodes: Nodes) -> int:
    """Rollouts that INIT has done so far."""
    _, count = stage_totals(Observations(nodes.redis).histograms()).get("init", (0.0, 0))
    return count


def _waiting(nodes: Nodes) -> int:
    """Rollouts that wait for INIT or RUN, or are in INIT."""
    counts = nodes.redis.hgetall("rollouts:counts")
    return sum(int(counts.get(name, 0)) for name in ("queued", "initializing", "ready"))


def _live(nodes: Nodes) -> int:
    counts = nodes.redis.hgetall("rollouts:counts")
    return sum(
        int(counts.get(name, 0)) for name in ("queued", "initializing", "ready", "running", "evaluating")
    )


def dispatch_waits(
    nodes: Nodes, ids: list[str], begin: float, end: float, *, every: bool = True
) -> dict[str, list[float]]:
    """Stage → seconds from the moment a rollout could be claimed for it until it was; by Redis' clock.

    Of every claim between `begin` and `end`; what still waits at the end has waited for so long already.

    Raises:
        RuntimeError: With `every`, where a stage claimed nothing.
    """
    waits: dict[str, list[float]] = {stage: [] for stage in STAGES}
    with nodes.redis.pipeline(transaction=False) as pipe:
        for rollout_id in ids:
            pipe.lrange(f"rollout:{{{rollout_id}}}:timeline", 0, -1)
        timelines = pipe.execute()
    for lines in timelines:
        at = [int(line.split()[1]) / 1e3 for line in lines if not line.startswith("note ")]
        for stage, number in zip(STAGES, (0, 2, 4), strict=True):
            if len(at) > number and at[number] < end:
                claimed = at[number + 1] if len(at) > number + 1 else end
                if begin <= claimed:
                    waits[stage].append(min(claimed, end) - at[number])
    if every and not all(waits.values()):
        counts = {stage: len(values) for stage, values in waits.items()}
        raise RuntimeError(f"too little was dispatched in the time measured: {counts}; measure for longer")
    return waits


def _redis_time(nodes: Nodes) -> float:
    seconds, micros = nodes.redis.time()
    return seconds + micros / 1e6
