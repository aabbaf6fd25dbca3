"""Which backend serves a rollout: our placement against four others, and what it costs.

1. A simulated fleet of 8 engines under virtual time, with the service's own scripts in a real Redis:
   makespan, p95 latency and prefix-cache hits (over all turns) of 500 heavy-tailed rollouts, 128 at once
   (moderate) and 320 (more than the caches hold). One seed a round; all policies serve the same rollouts. The
   peers have the same admission as ours (`--every-configuration`: also without it).
2. Two real vLLM servers, 8 conversations of 8 turns: prefix-cache hits against the best possible, p95 latency
   of all turns against round robin's, call by call and pinned. Methods take turns.
3. Acquire and release in a real Redis by 8 client processes, with 256 backends, one and four a round trip,
   beside a PING by the same clients.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import redis

from benchmarks import _routing_fleet as fleet
from benchmarks._harness import make_parser, percentile, report, say, summary
from rollout.schema import Backend
from services.state.backends import BackendStore, placed
from services.state.redis import connect
from tests.helpers.stack import RedisServer

COUNT = 500
LOADS = {"moderate": 16, "over_committed": 40}
"""Rollouts at once for each engine."""
PEERS: dict[str, partial[fleet.Peer] | type[fleet.Peer]] = {
    "round_robin": fleet.RoundRobin,
    "cumulative": partial(fleet.Peer, fleet.cumulative),
    "inflight_heap": partial(fleet.Peer, fleet.inflight_heap),
    "hashing": partial(fleet.Peer, fleet.hashing),
}
"""In the best of their configurations: with our admission, and hashing by rollout."""
OTHERS = {
    "group_hashing": partial(fleet.Peer, fleet.group_hashing),
    **{f"{name}, no admission": partial(peer, admission=False) for name, peer in PEERS.items()},
}
CLIENTS = 8
BACKENDS = 256
STANDING = 4096
"""Rollouts that hold a reservation all the while, as in a fleet at work."""
TOKENS = 8000
WAYS = {"ping": 0, "one_a_round_trip": 1, "four_a_round_trip": 4}
"""Rollouts of a client that ask together; 0: it sends a PING, the floor of any round trip."""


@contextmanager
def private_redis() -> Iterator[RedisServer]:
    """A Redis for one measurement."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        server = RedisServer(Path(directory))
        try:
            yield server
        finally:
            server.stop()


# -- the simulated fleet -----------------------------------------------------------------------------


@lru_cache(maxsize=1)
def rollouts_of(count: int, seed: int) -> list[fleet.SimulatedRollout]:
    """The same rollouts for every policy."""
    return fleet.workload(count, seed)


def simulated(name: str, count: int, seed: int, load: str) -> dict[str, float]:
    """What one policy makes of one workload; times in seconds, hit rate over all turns."""
    rollouts = rollouts_of(count, seed)
    engines = max(2, round(fleet.ENGINES * count / COUNT))
    slots = LOADS[load] * engines
    if name == "ours":
        with private_redis() as server:
            outcome = fleet.simulate(lambda: fleet.Ours(server.client), rollouts, slots, engines)
    else:
        outcome = fleet.simulate((PEERS | OTHERS)[name], rollouts, slots, engines)
    return {
        "makespan_s": outcome.makespan_s,
        "p95_s": outcome.p95_s,
        "hit_rate": outcome.hit_rate,
        "ratio_to_bound": outcome.makespan_s / fleet.bound_s(rollouts, slots),
    }


def compare_policies(count: int, seeds: int, every_configuration: bool) -> dict[str, Any]:
    """Figures of each policy at each load, and under `ratios` ours to each peer's, seed by seed."""
    names = ["ours", *PEERS, *(OTHERS if every_configuration else ())]
    jobs = [(name, count, seed, load) for seed in range(1, seeds + 1) for load in LOADS for name in names]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        outcomes = dict(zip(jobs, pool.starmap(simulated, jobs, chunksize=1), strict=True))
    results: dict[str, Any] = {}
    for load in LOADS:
        runs = {name: [outcomes[name, count, seed, load] for seed in range(1, seeds + 1)] for name in names}
        results[load] = {
            name: {key: summary([run[key] for run in its]) for key in its[0]} for name, its in runs.items()
        }
        results[load]["ratios"] = {
            name: {
                key: summary([a[key] / b[key] for a, b in zip(runs["ours"], runs[name], strict=True)])
                for key in ("makespan_s", "p95_s", "hit_rate")
            }
            for name in names[1:]
        }
        say(f"{load}: {results[load]}")
    return results


# -- acquire and release -----------------------------------------------------------------------------


def compare_round_trips(rounds: int, seconds: float) -> dict[str, Any]:
    """Pairs (or PINGs) a second, and milliseconds of an acquire, in each of `WAYS`.

    Args:
        seconds: Of each measurement.
    """
    values: dict[str, dict[str, list[float]]] = {
        way: {"per_s": [], "p50_ms": [], "p95_ms": []} for way in WAYS
    }
    context = multiprocessing.get_context("spawn")
    with private_redis() as server:
        _fill(server.client)
        with context.Pool(CLIENTS, _start, (server.url, context.Barrier(CLIENTS))) as pool:
            for _ in range(rounds):
                for way, together in WAYS.items():
                    # The barrier sees to it that each process takes one.
                    parts = pool.starmap(_ask, [(seconds, together, k) for k in range(CLIENTS)], chunksize=1)
                    times = [each for part in parts for each in part]
                    values[way]["per_s"].append(len(times) / seconds)
                    values[way]["p50_ms"].append(statistics.median(times) * 1e3)
                    values[way]["p95_ms"].append(percentile(times, 0.95) * 1e3)
    result: dict[str, Any] = {
        way: {key: summary(each) for key, each in its.items()} for way, its in values.items()
    }
    pairs = zip(values["one_a_round_trip"]["p50_ms"], values["ping"]["p50_ms"], strict=True)
    result["ratio_to_ping"] = summary([acquire / ping for acquire, ping in pairs])
    say(f"acquire and release: {result}")
    return result


def _fill(client: redis.Redis) -> None:
    """Enter the backends and their standing load."""
    store = BackendStore(client)
    about = {"model": "m", "tokenizer": "t", "max_model_len": 32_768, "capacity_tokens": 400_000}
    for number in range(BACKENDS):
        store.put(Backend(id=f"b{number}", url=f"http://b{number}", **about))
    for number in range(STANDING):
        store.acquire(f"standing-{number}", tokens=TOKENS + number % 1000, group=f"standing-{number // 8}")


def _start(url: str, barrier: Any) -> None:
    """Begin a client process."""
    global _client, _barrier
    _client, _barrier = connect(url), barrier


def _ask(seconds: float, together: int, number: int) -> list[float]:
    """Seconds of each acquire or PING of one client."""
    store = BackendStore(_client)
    store.acquire(f"warm-{number}", tokens=TOKENS)
    store.release(f"warm-{number}")
    _barrier.wait(120)
    times: list[float] = []
    began = time.monotonic()
    for index in count():
        asked = time.monotonic()
        if asked - began >= seconds:
            break
        if not together:
            _client.ping()
            times.append(time.monotonic() - asked)
            continue
        names = [f"c{number}-{index}-{lane}" for lane in range(together)]
        group = f"c{number}-{index * together // 8}"
        replies = store.many([store.acquire_args(name, tokens=TOKENS, group=group) for name in names])
        words = {placed(reply).word for reply in replies}
        times += [time.monotonic() - asked] * together
        released = store.many([["release", name] for name in names])
        if words != {"ok"} or not all(released):
            raise RuntimeError(f"acquire answered {words} and release {released}, where all should succeed")
    return times


# -- all -------------------------------------------------------------------------------------------


def compare_servers(rounds: int) -> dict[str, Any]:
    """What `_routing_servers.compare` says of two vLLM servers."""
    # Not above: the processes of the other parts import this file, and torch takes each of them seconds.
    from benchmarks import _routing_servers

    with tempfile.TemporaryDirectory(prefix="bench-") as model, private_redis() as server:
        result = _routing_servers.compare(Path(model), server.client, rounds)
    say(f"two servers: {result}")
    return result


def main() -> None:
    """Run it; see the module's text."""
    parser = make_parser(__doc__, count=COUNT, rounds=3)
    parser.add_argument("--simulated-only", action="store_true", help="without the two vLLM servers")
    parser.add_argument(
        "--every-configuration", action="store_true", help="peers also as they were not chosen (slow)"
    )
    options = parser.parse_args()
    policies = compare_policies(options.count, options.rounds, options.every_configuration)
    claims = compare_round_trips(options.rounds, 0.5 if options.rounds == 1 else 3.0)
    results = {
        f"makespan_ratio_to_admitted_{name}": max(
            policies[load]["ratios"][name]["makespan_s"]["median"] for load in LOADS
        )
        for name in PEERS
    }
    results["makespan_ratio_to_bound"] = max(
        policies[load]["ours"]["ratio_to_bound"]["median"] for load in LOADS
    )
    results["hit_rate_ratio_to_best_peer"] = min(
        policies[load]["ratios"][name]["hit_rate"]["median"] for load in LOADS for name in PEERS
    )
    for way in ("one_a_round_trip", "four_a_round_trip"):
        results[f"acquire_release_per_s_{way}"] = claims[way]["per_s"]["median"]
        results[f"acquire_p50_ms_{way}"] = claims[way]["p50_ms"]["median"]
    results["acquire_p50_ratio_to_ping"] = claims["ratio_to_ping"]["median"]
    servers = None if options.simulated_only else compare_servers(options.rounds)
    if servers:
        results["hit_rate_gap"] = servers["hit_rate_gap"]["median"]
        for name, ratio in servers["p95_ratios"].items():
            results[f"turn_p95_ratio_to_{name}"] = ratio["median"]
    report("routing", results, policies=policies, claims=claims, servers=servers, options=vars(options))


if __name__ == "__main__":
    main()
