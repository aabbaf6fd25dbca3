"""Time to k informative groups, ten times in a row, against two other ways to sample them.

Real gateway, Redis, Celery fleets and batches; model and tools are sleeps from a log-normal distribution, the
same ones for all (a prompt's group sleeps what its seed says), and half of the prompts are uninformative. RUN
has the same number of slots for all.

* Ours: one batch after the other; each takes over what the one before left under way.
* Synchronous: a round of 2 k prompts (what is needed on average), waited for to its last rollout, and another
  round while groups are missing. Surplus groups are kept for the next iteration.
* Restart (the reference's scheme): slots are refilled and redundant rollouts ended early, too, but at the end
  of an iteration everything under way is dropped, finished siblings included, and begins again in the next.

Schemes take turns, seed by seed; the ratios are taken seed by seed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._harness import report, summary
from rollout.batch import BatchRequest
from rollout.client import Client
from rollout.schema import RolloutRequest
from rollout.summary import by_group
from tests.helpers.stack import Stack

SIGMA = 1.0
"""Of the log-normal sleeps: the longest of 128 is about eleven times the median."""
LONGEST = 12.0
"""Times the mean: no rollout sleeps longer."""
AHEAD = 8
"""Rollouts in flight beyond RUN's slots, so that INIT and EVAL leave no slot free."""


def make_prompts(seed: int, count: int, n: int, mean_s: float) -> list[RolloutRequest]:
    """Prompts of which every second one, at random, has the same reward for all of its group."""
    chance = random.Random(seed)
    prompts = []
    for number in range(count):
        seconds = [
            min(chance.lognormvariate(0, SIGMA) * mean_s / 2.718281828 ** (SIGMA**2 / 2), LONGEST * mean_s)
            for _ in range(n)
        ]
        same = chance.random() < 0.5
        rewards = [1.0] * n if same else [float(chance.random() < 0.5) for _ in range(n)]
        if not same and len(set(rewards)) == 1:
            rewards[0] = 1.0 - rewards[0]
        task = {"number": number, "seconds": [round(s, 3) for s in seconds], "rewards": rewards}
        prompts.append(RolloutRequest(handler="sleeper", task=task))
    return prompts


class Scheme:
    """What the schemes share: the service, and how much of everything there is."""

    def __init__(self, client: Client, options: argparse.Namespace, prompts: list[RolloutRequest]) -> None:
        self.client, self.options, self.prompts = client, options, prompts
        self.slots = options.slots + AHEAD

    def request(self, prompts: list[RolloutRequest], **more: object) -> BatchRequest:
        options = self.options
        return BatchRequest(
            prompts=prompts,
            n=options.n,
            groups=options.groups,
            max_in_flight=self.slots,
            # Slots are the only limit, as for the others.
            oversample=16.0,
            **more,
        )


def ours(scheme: Scheme) -> list[float]:
    """Seconds of each iteration."""
    took, before = [], None
    for number in range(scheme.options.iterations):
        began = time.perf_counter()
        prompts = [] if number else scheme.prompts
        made = scheme.client.batches.create(scheme.request(prompts, closed=False, carry_from=before))
        found = list(scheme.client.batches.stream(made.id, include="summary"))
        took.append(time.perf_counter() - began)
        assert len(found) == scheme.options.groups
        before = made.id
    scheme.client.batches.cancel(before)
    return took


def synchronous(scheme: Scheme) -> list[float]:
    """Seconds of each iteration."""
    source, surplus, took = iter(scheme.prompts), 0, []
    n, wanted = scheme.options.n, scheme.options.groups
    for _ in range(scheme.options.iterations):
        began = time.perf_counter()
        kept, surplus = surplus, 0
        while kept < wanted:
            requests = [next(source).model_copy(update={"n": n}) for _ in range(2 * wanted)]
            rollouts = scheme.client.run(requests, include="summary")
            kept += sum(max(rewards) > min(rewards) for rewards in by_group(rollouts).values())
        surplus = kept - wanted
        took.append(time.perf_counter() - began)
    return took


def restart(scheme: Scheme) -> list[float]:
    """Seconds of each iteration."""
    left, took = list(scheme.prompts), []
    for _ in range(scheme.options.iterations):
        began = time.perf_counter()
        made = scheme.client.batches.create(scheme.request(left, carry="none"))
        list(scheme.client.batches.stream(made.id, include="summary"))
        took.append(time.perf_counter() - began)
        decided = scheme.client.batches.stream(made.id, include="summary", every=True)
        through = {
            group.rollouts[0].request.task["number"]
            for group in decided
            if group.verdict in ("kept", "filtered") and group.rollouts
        }
        left = [prompt for prompt in left if prompt.task["number"] not in through]
    return took


class Busy:
    """Samples how many of RUN's slots are in use, while it is a context manager."""

    def __init__(self, stack: Stack, slots: int) -> None:
        self._redis, self._slots = stack.redis.client, slots
        self._samples: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self._samples.append(int(self._redis.hget("rollouts:counts", "running") or 0))

    @property
    def share(self) -> float:
        """From the first moment all slots were in use: before that the service fills up."""
        full = next((i for i, used in enumerate(self._samples) if used >= 0.95 * self._slots), 0)
        return statistics.fmean(self._samples[full:]) / self._slots


def wait_until_idle(stack: Stack) -> None:
    """Until nothing runs that an earlier scheme has left."""
    while any(
        stack.client.status()["states"].get(s, 0) for s in ("queued", "initializing", "ready", "running")
    ):
        time.sleep(0.1)


SCHEMES: dict[str, Callable[[Scheme], list[float]]] = {
    "ours": ours,
    "synchronous": synchronous,
    "restart": restart,
}


def main() -> None:
    """Run it; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=640, help="rollouts that each scheme is to keep, in all")
    parser.add_argument("--groups", type=int, default=8, help="informative groups of an iteration")
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--slots", type=int, default=64, help="of RUN")
    parser.add_argument("--mean-s", type=float, default=1.5, help="of a rollout's RUN")
    parser.add_argument("--rounds", type=int, default=3, help="each with a seed of its own")
    options = parser.parse_args()
    options.groups = max(1, min(options.groups, options.count // options.n))
    options.iterations = max(1, options.count // (options.groups * options.n))
    took: dict[str, list[list[float]]] = {name: [] for name in SCHEMES}
    busy: list[float] = []
    env = {"ROLLOUT_HANDLERS": "benchmarks._sampling_handler:Sleeper", "ROLLOUT_LEASE_S": "30"}
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandboxes,
        Stack(Path(directory), Path(sandboxes), env) as stack,
    ):
        for queue in ("init", "eval"):
            stack.start_worker(queue, slots=32)
        stack.start_worker("run", slots=options.slots)
        count = options.iterations * options.groups * 4
        for seed in range(options.rounds):
            prompts = make_prompts(seed, count, options.n, options.mean_s)
            names = list(SCHEMES)
            for name in names[seed % 3 :] + names[: seed % 3]:
                wait_until_idle(stack)
                scheme = Scheme(stack.client, options, prompts)
                if name == "ours":
                    with Busy(stack, options.slots) as slots:
                        took[name].append(ours(scheme))
                    busy.append(slots.share)
                else:
                    took[name].append(SCHEMES[name](scheme))
    totals = {name: [sum(one) for one in runs] for name, runs in took.items()}
    ratios = {
        name: [theirs / our for theirs, our in zip(totals[name], totals["ours"], strict=True)]
        for name in ("synchronous", "restart")
    }
    report(
        "dynamic_sampling",
        {
            "speedup_vs_synchronous": round(statistics.median(ratios["synchronous"]), 3),
            "speedup_vs_restart": round(statistics.median(ratios["restart"]), 3),
            "slots_busy_share": round(statistics.median(busy), 4),
        },
        ratios={name: summary(values) for name, values in ratios.items()},
        busy=summary(busy),
        seconds={name: summary(values) for name, values in totals.items()},
        options=vars(options),
    )


if __name__ == "__main__":
    main()
