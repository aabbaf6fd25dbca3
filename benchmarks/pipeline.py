"""Three-stage no-op rollouts through the whole service against the same tasks as a bare chain.

Ours: HTTP submission in one call a thousand, record and state in Redis, claim and finish under a
fence, timeline, result; timed from the first submission to the last terminal state. Theirs:
`chain(...).apply_async()` in a loop and three workers; timed to the last task done. Rounds are
interleaved; the ratio is taken round by round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import _bare_chain as bare_chain
from benchmarks._harness import cpu_seconds, report, summary
from rollout.client import Client
from rollout.schema import RolloutRequest
from services.state.fleet import FleetStore
from tests.helpers.keys import accept_key
from tests.helpers.stack import NODE, Process, Stack, wait_until
from workers.handlers.noop import Noop

PER_CALL = 1000


def start_bare_workers(stack: Stack, slots: int, prefix: str = "") -> list[Process]:
    """One worker process a queue, as our fleets have. Prefix `bare_chain.UNACKED`: the second fleet."""
    workers = []
    env = {"BARE_ACK_EMULATION": "0"} if prefix else {}
    for queue in (prefix + name for name in bare_chain.QUEUES):
        argv = [sys.executable, "-m", "celery", "-A", "benchmarks._bare_chain", "worker", "-Q", queue]
        argv += ["-n", f"{queue}@{NODE}", "--without-gossip", "--without-mingle", "-E", "-c", str(slots)]
        workers.append(stack.start(queue, argv, env))
    os.environ["ROLLOUT_REDIS_URL"] = stack.redis.url
    bare_chain.app.conf.broker_url = stack.redis.url
    warm_up_bare(stack, 50, prefix)
    return workers


def bare_done(stack: Stack) -> int:
    return int(stack.redis.client.get(bare_chain.COUNTER) or 0)


def warm_up_bare(stack: Stack, count: int, prefix: str) -> None:
    before = bare_done(stack)
    bare_chain.submit(count, prefix)
    wait_until(lambda: bare_done(stack) >= before + count, 60, "the bare chain")


def time_bare(stack: Stack, count: int, prefix: str = "") -> float:
    """Seconds for `count` bare chains."""
    before = bare_done(stack)
    started = time.perf_counter()
    bare_chain.submit(count, prefix)
    while bare_done(stack) < before + count:
        time.sleep(0.005)
    return time.perf_counter() - started


def completed(stack: Stack) -> int:
    return int(stack.redis.client.hget("rollouts:counts", "completed") or 0)


def time_ours(stack: Stack, client: Client, count: int) -> float:
    """Seconds for `count` rollouts through the service."""
    before = completed(stack)
    started = time.perf_counter()
    for first in range(0, count, PER_CALL):
        client.submit([RolloutRequest(handler="noop") for _ in range(first, min(first + PER_CALL, count))])
    while completed(stack) < before + count:
        time.sleep(0.005)
    return time.perf_counter() - started


def submissions_per_s(stack: Stack, client: Client, count: int) -> float:
    """Rollouts accepted a second, different requests, in calls of a thousand; nobody works on them."""
    calls = [
        [RolloutRequest(handler="noop", task={"reward": float(k)}, tags=["bench"]) for k in range(PER_CALL)]
        for _ in range(count // PER_CALL)
    ]
    started = time.perf_counter()
    for call in calls:
        client.submit(call)
    elapsed = time.perf_counter() - started
    stack.redis.client.flushall()
    accept_key(stack.redis.url)
    return count / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="rollouts a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=64, help="slots of each worker process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        env = {"ROLLOUT_HANDLERS": "", "ROLLOUT_LOG_LEVEL": "WARNING", "ROLLOUT_LEASE_S": "30"}
        with Stack(directory, directory / "sbx", env) as stack:
            run(stack, options)


def run(stack: Stack, options: argparse.Namespace) -> None:
    client = stack.client
    fleet = FleetStore(stack.redis.client)
    submit = []
    for _ in range(options.rounds):
        fleet.put_handlers([Noop().info()])
        submit.append(submissions_per_s(stack, client, 3 * PER_CALL))
        print(f"submit: {submit[-1]:.0f} rollouts/s", file=sys.stderr)
    ours = [stack.start_worker(queue, None, "-E", slots=options.slots) for queue in ("init", "run", "eval")]
    bare = start_bare_workers(stack, options.slots)
    time_ours(stack, client, 50)
    ours_pids = [stack.redis.pid, stack.gateway.pid, *(worker.pid for worker in ours)]
    bare_pids = [stack.redis.pid, *(worker.pid for worker in bare)]
    ratios, ours_per_s, bare_per_s, ours_cpu, bare_cpu = [], [], [], [], []
    for number in range(options.rounds):
        before = cpu_seconds(bare_pids) + time.process_time()
        seconds_bare = time_bare(stack, options.count)
        bare_cpu.append((cpu_seconds(bare_pids) + time.process_time() - before) / options.count * 1e3)
        before = cpu_seconds(ours_pids) + time.process_time()
        seconds_ours = time_ours(stack, client, options.count)
        ours_cpu.append((cpu_seconds(ours_pids) + time.process_time() - before) / options.count * 1e3)
        bare_per_s.append(options.count / seconds_bare)
        ours_per_s.append(options.count / seconds_ours)
        ratios.append(seconds_bare / seconds_ours)
        print(
            f"round {number + 1}: ours {ours_per_s[-1]:.0f}/s, bare chain {bare_per_s[-1]:.0f}/s, "
            f"ratio {ratios[-1]:.2f}",
            file=sys.stderr,
        )
    report(
        "pipeline",
        {
            "throughput_ratio_to_bare_chain": summary(ratios)["median"],
            "submit_per_s": summary(submit)["median"],
            "cpu_ms_per_rollout": summary(ours_cpu)["median"],
        },
        ratio=summary(ratios),
        ours_per_s=summary(ours_per_s),
        bare_chain_per_s=summary(bare_per_s),
        bare_chain_cpu_ms=summary(bare_cpu),
        submit_per_s=summary(submit),
        count=options.count,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
