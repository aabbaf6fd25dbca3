"""Three-stage no-op rollouts through the whole service against the same tasks as a bare Celery chain.

Ours: HTTP submission in one call a thousand, record and state in Redis, claim and finish under a fence,
timeline, result. Theirs: the same messages, sent in batches, and three workers of the same settings
(`benchmarks/_equal_chain.py`). Both are timed from the first submission to the last end. Rounds are
interleaved; a ratio is that of the medians beside it, its spread is taken round by round.

`submit_per_s` counts rollouts that the gateway accepts in calls of a thousand, `equal_chain_submit_per_s`
messages that a process sends; nobody works on either.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks import _equal_chain as equal_chain
from benchmarks._harness import cpu_seconds, make_parser, median_ms, report, say, summary, timed
from benchmarks._service import PATIENCE_S, discard, rest, service, start_fleet
from rollout.schema import RolloutRequest
from services.state.fleet import FleetStore
from tests.helpers.keys import accept_key
from tests.helpers.stack import NODE, Process, Stack
from workers.handlers.noop import Noop

PER_CALL = 1000
SLOTS = 64
"""Of each worker process, on both sides."""
POLL_S = 0.005
WARM_UP = 50
SIDES = ("ours", "equal_chain")


@dataclass
class Race:
    """What each side did, round by round."""

    per_s: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    """User and system time a rollout of all processes: sender, gateway, workers, Redis."""

    def spreads(self, figures: dict[str, list[float]]) -> dict[str, dict[str, float]]:
        """Each side's spread and that of the ratio round by round."""
        ratios = [ours / theirs for ours, theirs in zip(*figures.values(), strict=True)]
        return {side: summary(values) for side, values in figures.items()} | {"ratio": summary(ratios)}


def ratio_of_medians(spreads: dict[str, dict[str, float]]) -> float:
    """Ours over theirs, of the very figures that are printed."""
    ours, theirs = (spreads[side]["median"] for side in SIDES)
    return round(ours / theirs, 3)


def submit_ours(stack: Stack, count: int) -> None:
    """Submit no-op rollouts, different ones, in calls of a thousand."""
    for first in range(0, count, PER_CALL):
        numbers = range(first, min(first + PER_CALL, count))
        stack.client.submit([RolloutRequest(handler="noop", task={"reward": float(k)}) for k in numbers])


def race(stack: Stack, fleet: dict[str, Process], rounds: int, count: int) -> Race:
    """Let both sides work, in turns; `fleet` has `SLOTS` slots a stage."""
    peers = [start_peer(stack, queue) for queue in equal_chain.QUEUES]
    equal_chain.app.conf.broker_url = stack.redis.url
    redis = stack.redis.client
    submits: dict[str, Callable[[int], None]] = {
        "ours": lambda number: submit_ours(stack, number),
        "equal_chain": equal_chain.submit,
    }
    ended: dict[str, Callable[[], int]] = {
        "ours": lambda: int(redis.hget("rollouts:counts", "completed") or 0),
        "equal_chain": lambda: int(redis.get(equal_chain.DONE) or 0),
    }
    pids = {
        "ours": [stack.redis.pid, stack.gateway.pid, *(worker.pid for worker in fleet.values())],
        "equal_chain": [stack.redis.pid, *(worker.pid for worker in peers)],
    }

    def work(side: str, number: int) -> None:
        goal, deadline = ended[side]() + number, time.monotonic() + PATIENCE_S
        submits[side](number)
        while ended[side]() < goal:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{side}: {number} chains had not ended after {PATIENCE_S:g} s")
            time.sleep(POLL_S)

    for side in SIDES:
        work(side, WARM_UP)
    if rounds > 1:
        rest(pids["ours"] + pids["equal_chain"])
    result = Race()
    for number in range(rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            cpu = cpu_seconds(pids[side]) + time.process_time()
            seconds = timed(lambda side=side: work(side, count))
            cpu = cpu_seconds(pids[side]) + time.process_time() - cpu
            result.per_s[side].append(count / seconds)
            result.cpu_ms[side].append(cpu / count * 1e3)
        latest = {side: f"{result.per_s[side][-1]:.0f}/s, {result.cpu_ms[side][-1]:.2f} ms" for side in SIDES}
        say(f"round {number + 1}: {latest}")
    discard(stack, *peers)
    return result


def start_peer(stack: Stack, queue: str) -> Process:
    """A worker of the bare chain."""
    argv = [sys.executable, "-m", "celery", "-A", "benchmarks._equal_chain", "worker", "-Q", queue]
    argv += ["-n", f"{queue}@{NODE}", "--without-gossip", "--without-mingle", "-E", "-c", str(SLOTS)]
    return stack.start(queue, argv)


def submissions(stack: Stack, rounds: int, count: int) -> dict[str, list[float]]:
    """What each side submits a second where nobody works."""
    per_s: dict[str, list[float]] = {side: [] for side in SIDES}
    equal_chain.app.conf.broker_url = stack.redis.url
    for _ in range(rounds):
        FleetStore(stack.redis.client).put_handlers([Noop().info()])
        per_s["ours"].append(count / timed(lambda: submit_ours(stack, count)))
        per_s["equal_chain"].append(count / timed(lambda: equal_chain.submit(count)))
        stack.redis.client.flushall()
        accept_key(stack.redis.url)
    return per_s


def main() -> None:
    options = make_parser(__doc__, count=1000, rounds=5).parse_args()
    with service() as stack:
        short = options.rounds == 1
        submit = submissions(stack, options.rounds, options.count if short else 3 * PER_CALL)
        fleet = start_fleet(stack, SLOTS)
        result = race(stack, fleet, options.rounds, options.count)
        ping_ms = median_ms(stack.redis.client.ping, 200)
    rates, cpu = result.spreads(result.per_s), result.spreads(result.cpu_ms)
    report(
        "pipeline",
        {
            "throughput_ratio_to_equal_chain": ratio_of_medians(rates),
            "rollouts_per_s": rates["ours"]["median"],
            "equal_chain_per_s": rates["equal_chain"]["median"],
            "cpu_ratio_to_equal_chain": ratio_of_medians(cpu),
            "cpu_ms_per_rollout": cpu["ours"]["median"],
            "equal_chain_cpu_ms": cpu["equal_chain"]["median"],
            "submit_per_s": summary(submit["ours"])["median"],
            "equal_chain_submit_per_s": summary(submit["equal_chain"])["median"],
        },
        rates=rates,
        cpu_ms=cpu,
        submit_per_s={side: summary(values) for side, values in submit.items()},
        redis_ping_ms=ping_ms,
        count=options.count,
        rounds=options.rounds,
    )


if __name__ == "__main__":
    main()
