"""Which backend serves a rollout: our placement against four others, and what it costs.

1. A simulated fleet of 8 engines under virtual time, with the service's own scripts in a real Redis:
   makespan, p95 latency and prefix-cache hits of 500 heavy-tailed rollouts, 128 at once (moderate) and 320
   (more than the caches hold). One seed a round; all policies serve the same rollouts.
2. Two real vLLM servers, 8 conversations of 8 turns: prefix-cache hits against the best possible, p95 turn
   latency against round robin's. Rounds take turns.
3. Acquire and release in a real Redis by 8 client processes, with 256 backends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks import _routing_claims as claims
from benchmarks._harness import report, summary
from benchmarks._latency import say
from benchmarks._routing_fleet import ENGINES, Outcome, simulate
from benchmarks._routing_policies import Cumulative, Hashing, InflightHeap, Ours, Policy, RoundRobin
from benchmarks._routing_workload import SimulatedRollout, bound, workload
from tests.helpers.stack import RedisServer

COUNT = 500
LOADS = {"moderate": 16, "over_committed": 40}
"""Rollouts at once for each engine."""
OTHERS: dict[str, Callable[[], Policy]] = {
    policy.name: policy for policy in (RoundRobin, Cumulative, InflightHeap, Hashing)
}
PROCESSES = 2
ROLLOUTS_A_CLIENT = 64
CLAIM_S = 5.0
SHORT_CLAIM_S = 2.0
"""For each measurement; the second in the short form."""


@lru_cache(maxsize=1)
def rollouts_of(count: int, seed: int) -> list[SimulatedRollout]:
    """The same rollouts for every policy."""
    return workload(count, seed)


def one(name: str, count: int, seed: int, load: str) -> dict[str, float]:
    """What one policy makes of one workload."""
    rollouts = rollouts_of(count, seed)
    engines = max(2, round(ENGINES * count / COUNT))
    slots = LOADS[load] * engines
    if name != Ours.name:
        outcome = simulate(OTHERS[name], rollouts, slots, engines)
    else:
        with tempfile.TemporaryDirectory(prefix="bench-") as directory, ExitStack() as stack:
            server = RedisServer(Path(directory))
            stack.callback(server.stop)
            outcome = simulate(lambda: Ours(server.client), rollouts, slots, engines)
    return figures(outcome) | {
        "ratio_to_bound": outcome.makespan_s / bound(rollouts, engines, slots).makespan_s
    }


def figures(outcome: Outcome) -> dict[str, float]:
    """What is reported of a simulation; times in seconds."""
    return {
        "makespan_s": outcome.makespan_s,
        "p95_s": outcome.p95_s(),
        "p95_from_admission_s": outcome.p95_s(waiting=False),
        "mean_s": statistics.mean(outcome.latency_s),
        "hit_rate": outcome.hit_rate,
        "preemptions": outcome.preemptions,
        "busy_share": outcome.busy_share,
    }


def fleet(count: int, seeds: int) -> dict[str, Any]:
    """Every policy at every load on every seed: medians, and ratios taken seed by seed."""
    names = [*OTHERS, Ours.name]
    jobs = [(name, count, seed, load) for seed in range(1, seeds + 1) for load in LOADS for name in names]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        done = dict(zip(jobs, pool.starmap(one, jobs, chunksize=1), strict=True))
    results: dict[str, Any] = {}
    for load in LOADS:
        each = {name: [done[name, count, seed, load] for seed in range(1, seeds + 1)] for name in names}
        ours = each[Ours.name]
        results[load] = {
            "policies": {
                name: {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
                for name, runs in each.items()
            },
            "ratios": {
                name: {
                    key: summary([mine[key] / its[key] for mine, its in zip(ours, each[name], strict=True)])
                    for key in ("makespan_s", "p95_s")
                }
                for name in OTHERS
            },
            "ratio_to_bound": summary([run["ratio_to_bound"] for run in ours]),
        }
        say(f"{load}: {results[load]['policies']}")
    return results


def servers(rounds: int) -> dict[str, Any]:
    """The two vLLM servers."""
    # Not above: the processes of the other parts import this file, and torch takes each of them seconds.
    from benchmarks import _routing_vllm as vllm

    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as stack:
        directory = Path(name)
        (directory / "model").mkdir()
        (directory / "redis").mkdir()
        server = RedisServer(directory / "redis")
        stack.callback(server.stop)
        urls = stack.enter_context(vllm.two_servers(vllm.make_model(directory / "model")))
        played = vllm.compare(urls, server.client, rounds)
    ours, theirs = played["ours"], played["round_robin"]
    results: dict[str, Any] = {
        method: {
            "hit_rate": summary([run.hit_rate for run in runs]),
            "best_hit_rate": summary([run.best_hit_rate for run in runs]),
            "p95_s": summary([vllm.p95(run.latency_s) for run in runs]),
            "p95_after_first_turn_s": summary([vllm.p95(run.later_s) for run in runs]),
            "p50_s": summary([statistics.median(run.latency_s) for run in runs]),
        }
        for method, runs in played.items()
    }
    results["hit_rate_gap"] = statistics.median(run.best_hit_rate - run.hit_rate for run in ours)
    pairs = list(zip(ours, theirs, strict=True))
    results["p95_ratio"] = summary([vllm.p95(a.latency_s) / vllm.p95(b.latency_s) for a, b in pairs])
    results["p95_ratio_after_first_turn"] = summary(
        [vllm.p95(a.later_s) / vllm.p95(b.later_s) for a, b in pairs]
    )
    say(f"two servers: {results}")
    return results


def heap(rounds: int, seconds: float) -> dict[str, Any]:
    """Acquire and release by eight clients, of which each has one rollout, four, or a whole worker's."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, ExitStack() as stack:
        server = RedisServer(Path(directory))
        stack.callback(server.stop)
        claims.fill(server.client)
        ways = {
            "one_a_round_trip": (1, False),
            "four_a_round_trip": (4, False),
            "worker": (ROLLOUTS_A_CLIENT, True),
        }
        rates: dict[str, list[claims.Rate]] = {way: [] for way in ways}
        clients = stack.enter_context(claims.Clients(server.url))
        for _ in range(rounds):
            for way, (rollouts, asynchronous) in ways.items():
                rates[way].append(clients.measure(seconds, rollouts, asynchronous=asynchronous))
    results = {
        way: {
            key: summary([getattr(rate, key) for rate in its])
            for key in ("per_s", "acquire_p50_ms", "acquire_p95_ms")
        }
        for way, its in rates.items()
    }
    say(f"acquire and release: {results}")
    return results


def measured(real: dict[str, Any]) -> dict[str, float]:
    """The results that come from real servers."""
    return {
        "hit_rate_gap": round(real["hit_rate_gap"], 4),
        # Of the turns that have something to find in a cache, as in what this is held against.
        "p95_ratio_to_round_robin": real["p95_ratio_after_first_turn"]["median"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count",
        type=int,
        default=COUNT,
        help=f"rollouts of a simulation (default {COUNT}); with fewer the fleet shrinks in proportion",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="seeds, and rounds of the other two parts (default 5)"
    )
    parser.add_argument(
        "--simulated-only",
        action="store_true",
        help="without the two vLLM servers (nor the results `hit_rate_gap`, `p95_ratio_to_round_robin`)",
    )
    options = parser.parse_args()
    simulated = fleet(options.count, options.rounds)
    real = None if options.simulated_only else servers(options.rounds)
    claimed = heap(options.rounds, SHORT_CLAIM_S if options.rounds == 1 else CLAIM_S)

    def worst(name: str) -> float:
        return max(simulated[load]["ratios"][name]["makespan_s"]["median"] for load in LOADS)

    report(
        "routing",
        {
            **(measured(real) if real else {}),
            "makespan_ratio_to_round_robin": worst("round_robin"),
            "makespan_ratio_to_inflight_heap": worst("inflight_heap"),
            "makespan_ratio_to_hashing": worst("hashing"),
            "makespan_ratio_to_cumulative": worst("cumulative"),
            "makespan_ratio_to_bound": max(simulated[load]["ratio_to_bound"]["median"] for load in LOADS),
            "acquire_release_per_s": claimed["four_a_round_trip"]["per_s"]["median"],
            "acquire_p50_ms": claimed["four_a_round_trip"]["acquire_p50_ms"]["median"],
        },
        fleet=simulated,
        two_servers=real,
        acquire_release=claimed,
        count=options.count,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
