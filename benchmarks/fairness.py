"""Fair waiting for room on the backends: shares by weight, small rollouts beside a giant, a place's cost.

1. Three tenants of weights 1, 2 and 4 always have rollouts waiting, of 1 to 100 shares of size and in three
   mixes, for 60 s on 8 backends. Redis and its scripts are real, time is simulated.
2. The same with small rollouts of one tenant, beside another whose rollouts are as large as three quarters of
   a backend, or the same load in small ones.
3. Placements a second, in real time: 8 processes with 64 rollouts each, of which a quarter has room, beside
   the acquire and release of `benchmarks.routing`, one a round trip.

More in docs/benchmarks.md#fairness.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks import harness, routing
from services.state import keys
from services.state.backends.store import BackendStore, placed
from services.state.redis import connect
from services.state.scripts import Call
from tests.helpers.heap import backend
from tests.helpers.room_world import World, set_clock

BACKENDS = [f"b{number}" for number in range(8)]
CAPACITY = 1000
MEAN_S = 5.0
"""Of a rollout, exponentially distributed."""
WARM_S = 15.0
WEIGHTS = {"light": 1, "middle": 2, "heavy": 4}
Size = Callable[[random.Random], int]
MIXES: dict[str, tuple[Size, Size, Size]] = {
    "large_for_light": (
        lambda r: r.randint(50, 100),
        lambda r: r.randint(1, 100),
        lambda r: r.randint(1, 10),
    ),
    "large_for_heavy": (
        lambda r: r.randint(1, 10),
        lambda r: r.randint(1, 100),
        lambda r: r.randint(50, 100),
    ),
    "alike": (lambda r: r.randint(1, 100),) * 3,
}


def lasts(rng: random.Random) -> float:
    """Seconds of a rollout."""
    return rng.expovariate(1 / MEAN_S)


# -- shares --------------------------------------------------------------------------------------------


def shares(mix: str, seed: int, seconds: float) -> dict[str, float]:
    """Relative error of each tenant's share of token-seconds, against its weight."""
    with harness.private_redis() as server, set_clock():
        world = World(server.client, seed)
        for tenant, weight in WEIGHTS.items():
            world.tenant(tenant, weight)
        world.add(*BACKENDS, capacity=CAPACITY)
        backlog = {tenant: (20, size) for tenant, size in zip(WEIGHTS, MIXES[mix], strict=True)}
        world.play(WARM_S, backlog, lasts)
        world.served.clear()
        world.play(WARM_S + seconds, backlog, lasts)
        every = sum(world.served.values()) / sum(WEIGHTS.values())
        return {tenant: world.served[tenant] / every / weight - 1 for tenant, weight in WEIGHTS.items()}


# -- beside a giant ------------------------------------------------------------------------------------

GIANT = CAPACITY * 3 // 4


def small_wait(giants: bool, seed: int, seconds: float) -> float:
    """99th percentile of seconds that small rollouts of one tenant wait."""
    with harness.private_redis() as server, set_clock():
        world = World(server.client, seed)
        world.add(*BACKENDS, capacity=CAPACITY)
        other = (1, lambda rng: GIANT) if giants else (GIANT // 10, lambda rng: 10)
        backlog = {"small": (100, lambda rng: rng.randint(1, 10)), "other": other}
        world.play(WARM_S, backlog, lasts)
        world.waits.clear()
        world.play(WARM_S + seconds, backlog, lasts)
        return harness.percentile(world.waits["small"], 0.99)


# -- what a place costs --------------------------------------------------------------------------------

ROLLOUTS = 64
"""Of a process."""
ROOM = routing.CLIENTS * ROLLOUTS // 4
"""Rollouts that all backends have room for together."""


def contended(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Placements a second through the line, and of acquire and release one a round trip, in turns."""
    figures: dict[str, list[float]] = {"line": [], "one_a_round_trip": []}
    for _ in range(rounds):
        with harness.private_redis() as server:
            routing.fill(BackendStore(server.client))
            with routing.PROCESSES.Pool(
                routing.CLIENTS, routing.start, (server.url, routing.PROCESSES.Barrier(routing.CLIENTS))
            ) as pool:
                parts = pool.starmap(
                    routing.ask, [(seconds, 1, k) for k in range(routing.CLIENTS)], chunksize=1
                )
                figures["one_a_round_trip"].append(sum(map(len, parts)) / seconds)
        with harness.private_redis() as server:
            store = BackendStore(server.client)
            for name in BACKENDS:
                store.put(backend(name, capacity_tokens=1_000_000, max_rollouts=ROOM // len(BACKENDS)))
            with routing.PROCESSES.Pool(
                routing.CLIENTS, _start, (server.url, routing.PROCESSES.Barrier(routing.CLIENTS))
            ) as pool:
                placed = pool.starmap(_work, [(seconds, k) for k in range(routing.CLIENTS)], chunksize=1)
                figures["line"].append(sum(placed) / seconds)
    harness.say(f"placements a second: {figures}")
    return figures


def _start(url: str, barrier: Any) -> None:
    """Begin a worker process."""
    global _url, _barrier
    _url, _barrier = url, barrier


def _work(seconds: float, number: int) -> int:
    """How many rollouts of one process got room, and gave it back: each asks, is told, asks, and releases.

    What is to be asked meanwhile shares a round trip, as in a worker.
    """
    client = connect(_url)
    store, process = BackendStore(client), f"p{number}"
    numbers, count = itertools.count(), 0

    def ask(name: str) -> Call:
        return store.acquire(name, tokens=routing.TOKENS, process=process)

    def fresh(n: int) -> list[str]:
        return [f"c{number}-{next(numbers)}" for _ in range(n)]

    with client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(keys.room_of(process))
        channel.get_message(timeout=1.0)
        asking, ending = fresh(ROLLOUTS), []
        _barrier.wait(120)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            calls = [*map(store.release, ending), *map(ask, asking)]
            replies = store.many(calls)[len(ending) :]
            ending = [name for name, reply in zip(asking, replies, strict=True) if placed(reply).word == "ok"]
            count += len(ending)
            asking = fresh(len(ending))
            message = channel.get_message(timeout=0 if ending else 0.01)
            while message:
                asking += message["data"].split()
                message = channel.get_message(timeout=0)
    return count


# -- all -----------------------------------------------------------------------------------------------


def main(options: harness.Options) -> harness.Report:
    """Run it; see the module's text."""
    seeds = range(1, options.rounds + 1)
    seconds = float(options.count)
    errors = {mix: [shares(mix, seed, seconds) for seed in seeds] for mix in MIXES}
    harness.say(f"errors of shares: {errors}")
    waits = {
        way: [small_wait(way == "giants", seed, seconds) for seed in seeds] for way in ("giants", "small")
    }
    harness.say(f"small rollouts' p99 wait: {waits}")
    placements = contended(options.rounds, 0.5 if options.rounds == 1 else 3.0)
    ratio = {
        "small_wait_p99_ratio": harness.ratios(waits["giants"], waits["small"]),
        "placements_ratio": harness.ratios(placements["line"], placements["one_a_round_trip"]),
    }
    results = {name: harness.summary(values)["median"] for name, values in ratio.items()}
    results["share_error_max"] = max(
        abs(error) for rounds in errors.values() for each in rounds for error in each.values()
    )
    return {"results": results, "errors": errors, "waits": waits, "placements": placements}


if __name__ == "__main__":
    harness.run(main, count=60, rounds=3)
