"""What losing nothing costs: recovery of a killed worker's rollouts, CPU time a rollout, clients that wait.

Recovery: a worker that holds 55 rollouts gets SIGKILL; seconds until each of them has another worker, less
the lease (5 s here). A round for each stage in turn.

CPU: user and system seconds of gateway, workers, Redis and client, a no-op rollout, less those of a bare
Celery chain of three no-op tasks with the same pool, slots, prefetch and events. Rounds are interleaved, the
difference is taken round by round. `bare_unacked` is the same chain without kombu's copies of messages in
hand, which ours has not either.

Waiting: 800 long-polls of a rollout each, 100 of completions, 100 streams, all open at one gateway process
that answers another client's requests meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks import _bare_chain as bare_chain
from benchmarks import _waiting
from benchmarks._harness import cpu_seconds, report, summary
from benchmarks._latency import end_in_order_on_sigterm, percentile, private_directory, say
from benchmarks._recovery import HELD, KILLED, SLOTS, Service
from benchmarks.pipeline import start_bare_workers, time_bare, time_ours

REST_CPU_SHARE = 0.1
"""Of a processor: workers that use less have done with what they import when they start."""
REST_PATIENCE_S = 60.0
LONG_S, SHORT_S = 20.0, 1.0
"""For which clients wait while others are answered; the short form, a single round, is for tests."""
LEASE_S, SHORT_LEASE_S = 5.0, 3.0


def cpu(service: Service, rounds: int, count: int) -> dict[str, list[float]]:
    """Milliseconds of CPU time a rollout: ours, the bare chain, the one without acknowledgements."""
    stack = service.stack
    bare = start_bare_workers(stack, SLOTS)
    unacked = start_bare_workers(stack, SLOTS, bare_chain.UNACKED) if rounds > 1 else []
    redis, client = stack.redis.pid, stack.client
    fleets = {
        "ours": (
            [stack.gateway.pid, *(one.pid for one in service.workers.values())],
            lambda: time_ours(stack, client, count),
        ),
        "bare": ([one.pid for one in bare], lambda: time_bare(stack, count)),
        "bare_unacked": (
            [one.pid for one in unacked],
            lambda: time_bare(stack, count, bare_chain.UNACKED),
        ),
    }
    if rounds == 1:
        del fleets["bare_unacked"]
    found: dict[str, list[float]] = {name: [] for name in (*fleets, "redis_ours", "redis_bare")}
    time_ours(stack, client, 50)
    if rounds > 1:
        rest([pid for pids, _ in fleets.values() for pid in pids])
    for number in range(rounds):
        for name, (pids, work) in fleets.items():
            before, before_redis = cpu_seconds(pids) + time.process_time(), cpu_seconds([redis])
            work()
            used_redis = cpu_seconds([redis]) - before_redis
            used = cpu_seconds(pids) + time.process_time() - before + used_redis
            found[name].append(used / count * 1e3)
            if f"redis_{name}" in found:
                found[f"redis_{name}"].append(used_redis / count * 1e3)
        latest = ", ".join(f"{name} {found[name][-1]:.2f}" for name in fleets)
        say(f"cpu, round {number + 1}: {latest} ms a rollout")
    for worker in (*bare, *unacked):
        worker.stop()
        stack.processes.remove(worker)
    return found


def rest(pids: list[int]) -> None:
    """Wait until the processes have done with their start."""
    deadline = time.monotonic() + REST_PATIENCE_S
    while time.monotonic() < deadline:
        before = cpu_seconds(pids)
        time.sleep(1.0)
        if cpu_seconds(pids) - before < REST_CPU_SHARE * len(pids) / 3:
            return


def differences(ours: list[float], theirs: list[float]) -> list[float]:
    return [one - other for one, other in zip(ours, theirs, strict=True)]


def recover(service: Service, rounds: int) -> dict[str, list[float]]:
    """Seconds over the lease, by the stage whose worker was killed; one round = one kill."""
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        stage = KILLED[number % len(KILLED)]
        found.setdefault(stage, []).append(service.seconds_over_lease(stage))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="rollouts a round of the CPU measurement")
    parser.add_argument("--rounds", type=int, default=9, help="kills, and rounds of the CPU measurement")
    options = parser.parse_args()
    end_in_order_on_sigterm()
    short = options.rounds == 1
    lease_s = SHORT_LEASE_S if short else LEASE_S
    with private_directory() as directory:
        waiting = _waiting.measure(directory, SHORT_S if short else LONG_S)
    with private_directory() as directory, Service(directory, lease_s) as service:
        used = cpu(service, options.rounds, options.count)
        recovery = recover(service, options.rounds)
    over = [value for values in recovery.values() for value in values]
    every = waiting.pop("others_ms")
    cpu_ms = {name: summary(values) for name, values in used.items()}
    over_bare = {
        name: differences(used["ours"], used[name]) for name in ("bare", "bare_unacked") if name in used
    }
    report(
        "control_plane",
        {
            "recovery_s_over_lease": round(statistics.median(over), 3),
            "cpu_ms_over_bare_chain": summary(over_bare["bare"])["median"],
            "waiters_1000_pss_mb": waiting["pss_mb"]["worker"],
            "other_request_p99_ms": round(percentile(every, 0.99), 2),
        },
        recovery={
            "lease_s": lease_s,
            "held": HELD,
            "worst_s_over_lease": round(max(over), 3),
            **{stage: summary(values) for stage, values in recovery.items()},
        },
        cpu_ms=cpu_ms,
        cpu_ms_over={name: summary(values) for name, values in over_bare.items()},
        waiting={**waiting, "others": {"n": len(every), "p50_ms": round(statistics.median(every), 2)}},
        count=options.count,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
