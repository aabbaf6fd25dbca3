"""Three-stage no-op rollouts through the whole service against the same tasks as a bare Celery chain.

What the chain has of Celery and what is timed: docs/benchmarks.md#pipeline. Rounds are interleaved; a ratio
is that of the medians beside it, its spread is taken round by round.

`submit_per_s` counts rollouts that the gateway accepts in calls of a thousand, `equal_chain_submit_per_s`
messages that a process sends; nobody works on either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis
from celery import signals

from benchmarks import harness
from benchmarks.harness import Process, Stack
from rollout.schema import RolloutRequest
from services.queues import make_celery
from services.settings import settings
from services.state.fleet import FleetStore
from tests.helpers.keys import accept_key
from workers import events
from workers.handlers.noop import Noop

# -- the peer ------------------------------------------------------------------------------------------


DONE = "equal_chain:done"
"""Counts the chains that have ended."""
QUEUES = ("equal_init", "equal_run", "equal_eval")
MESSAGES_AT_ONCE = 64
"""In one round trip, as the service has it."""

app = make_celery(settings())
events.bundle(app)
_redis = redis.from_url(settings().redis_url)


@signals.setup_logging.connect
def _quiet(**_: object) -> None:
    """As quiet as our own workers: two log lines a task would slow the comparison down."""


@app.task(queue=QUEUES[0], name="equal_chain.init")
def init(ref: dict) -> dict:
    return ref


@app.task(queue=QUEUES[1], name="equal_chain.run")
def run(ref: dict) -> dict:
    return ref


@app.task(queue=QUEUES[2], name="equal_chain.evaluate")
def evaluate(ref: dict) -> dict:
    # The one thing it does: somebody must see that it is done.
    _redis.incr(DONE)
    return ref


def submit(count: int) -> None:
    """Send the messages that `chain(init.s(ref), run.s(), evaluate.s())` sends, `count` times."""
    following = [dict(evaluate.s()), dict(run.s())]  # the last one goes next
    with app.producer_or_acquire() as producer, producer.batch(MESSAGES_AT_ONCE):
        for number in range(count):
            ref = {"id": str(number), "attempt": 1, "node": None, "handler": "noop"}
            init.apply_async((ref,), chain=following, producer=producer)


def submit_bare(count: int) -> None:
    """Send the messages of so many tasks that do nothing and that nothing follows."""
    with app.producer_or_acquire() as producer, producer.batch(MESSAGES_AT_ONCE):
        for number in range(count):
            init.apply_async(({"id": str(number)},), producer=producer)


# -- the race ------------------------------------------------------------------------------------------


SLOTS = 64
"""Of each worker process, on both sides."""
WARM_UP = 50


@dataclass
class Side:
    """One of the two that are compared, and what it did round by round."""

    submit: Callable[[int], object]
    """Sends so many rollouts or chains."""
    ended: Callable[[], int]
    pids: list[int]
    """All processes that work for this side, but the one that submits: this one."""
    per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """User and system time a rollout, of the submitter too."""

    def work(self, count: int) -> float:
        """Submit so many; seconds until all have ended."""
        return harness.seconds_of(lambda: self.submit(count), count, self.ended)

    def round(self, count: int) -> None:
        """Work and take the time, on the clock and of the processors."""
        cpu_s = harness.cpu_seconds(self.pids) + time.process_time()
        self.per_s.append(count / self.work(count))
        self.cpu_ms.append((harness.cpu_seconds(self.pids) + time.process_time() - cpu_s) / count * 1e3)


def compare(ours: list[float], equal_chain: list[float]) -> dict[str, Any]:
    """Both sides' spread, the ratio of the printed medians, and the spread of the ratio round by round."""
    spreads = {"ours": harness.summary(ours), "equal_chain": harness.summary(equal_chain)}
    ratio = spreads["ours"]["median"] / spreads["equal_chain"]["median"]
    return {
        **spreads,
        "ratio": ratio,
        "ratio_by_round": harness.summary(harness.ratios(ours, equal_chain)),
    }


def submit_ours(stack: Stack, count: int) -> None:
    """Submit no-op rollouts, different ones, in calls of a thousand."""
    harness.submit(stack, [RolloutRequest(handler="noop", task={"reward": float(k)}) for k in range(count)])


def race(stack: Stack, fleet: dict[str, Process], rounds: int, count: int) -> dict[str, dict[str, Any]]:
    """Let both sides work, in turns, with workers of `SLOTS` slots. What `compare` says of each figure."""
    peers = [
        harness.launch(stack, queues, SLOTS, app="benchmarks.pipeline")
        for queues in harness.split(QUEUES, short=rounds == 1)
    ]
    app.conf.broker_url = stack.redis.url
    sides = {
        "theirs": Side(
            submit,
            lambda: int(stack.redis.client.get(DONE) or 0),
            [stack.redis.pid, *(worker.pid for worker in peers)],
        ),
        "ours": Side(
            lambda number: submit_ours(stack, number),
            lambda: harness.in_state(stack, "completed"),
            [stack.redis.pid, stack.gateway.pid, *(worker.pid for worker in fleet.values())],
        ),
    }
    for side in sides.values():
        side.work(WARM_UP if rounds == 1 else count)  # workers still import what they need
    for number, name in harness.in_turns(sides, rounds):
        sides[name].round(count)
        harness.say(f"round {number + 1}, {name}: {sides[name].per_s[-1]:.0f}/s")
    harness.discard(stack, peers)
    ours, theirs = sides["ours"], sides["theirs"]
    return {"per_s": compare(ours.per_s, theirs.per_s), "cpu_ms": compare(ours.cpu_ms, theirs.cpu_ms)}


def submissions(stack: Stack, rounds: int, count: int) -> dict[str, Any]:
    """What each side submits a second where nobody works."""
    ours, theirs = [], []
    app.conf.broker_url = stack.redis.url
    for _ in range(rounds):
        FleetStore(stack.redis.client).put_handlers([Noop().info()])
        ours.append(count / harness.timed(lambda: submit_ours(stack, count)))
        theirs.append(count / harness.timed(lambda: submit(count)))
        stack.redis.client.flushall()
        accept_key(stack.redis.url)
    return compare(ours, theirs)


def main(options: harness.Options) -> harness.Report:
    count, rounds = options.count, options.rounds
    short = rounds == 1
    with harness.service() as stack:
        submits = submissions(stack, rounds, count if short else 3 * harness.PER_CALL)
        figures = race(stack, harness.start_fleet(stack, SLOTS, short), rounds, count)
        ping_ms = harness.median_ms(stack.redis.client.ping, 200)
    return {
        "results": {
            "throughput_ratio_to_equal_chain": figures["per_s"]["ratio"],
            "rollouts_per_s": figures["per_s"]["ours"]["median"],
            "equal_chain_per_s": figures["per_s"]["equal_chain"]["median"],
            "cpu_ratio_to_equal_chain": figures["cpu_ms"]["ratio"],
            "cpu_ms_per_rollout": figures["cpu_ms"]["ours"]["median"],
            "equal_chain_cpu_ms": figures["cpu_ms"]["equal_chain"]["median"],
            "submit_per_s": submits["ours"]["median"],
            "equal_chain_submit_per_s": submits["equal_chain"]["median"],
        },
        **figures,
        "submit_per_s": submits,
        "redis_ping_ms": ping_ms,
    }


if __name__ == "__main__":
    harness.run(main, count=1000, rounds=5)
