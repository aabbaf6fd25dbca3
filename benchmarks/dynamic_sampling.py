"""Time to k informative groups, six weight updates in a row, against two other ways to sample them.

Real gateway, Redis, Celery fleets, batches and weight updates; each rollout makes one call to a fake
engine, whose token carries the weights that it began with, and sleeps. Half of the prompts are
uninformative. What is timed, and how old a group may be: docs/benchmarks.md#dynamic_sampling. Schemes take
turns, seed by seed.

* Ours: one batch after the other; each takes over what the one before left under way.
* Synchronous: a round of 5 prompts for each group that is missing, waited for to its last rollout, and more
  rounds while groups are missing. Surplus is kept for the next iteration.
* Restart (the reference's scheme): slots are refilled and redundant rollouts ended early, too, but at the end
  of an iteration all that is under way is dropped, finished siblings included; the next one draws anew.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

from pydantic import BaseModel

from benchmarks import harness
from benchmarks.harness import Stack, wait_until
from rollout.batch import BatchRequest
from rollout.client import Client
from rollout.schema import RolloutRequest
from rollout.summary import by_group
from rollout.trajectory import FinishReason, Message
from tests.helpers.fake_engine import fake_engine
from workers.handlers.base import AgentHandler, EvalContext, Reward, RunContext

SIGMA = 1.0
"""Of the log-normal sleeps: the longest of 128 is about eleven times the median."""
LONGEST = 12.0
"""Times the mean: no rollout sleeps longer."""
AHEAD = 8
"""Rollouts in flight beyond RUN's slots, so that INIT and EVAL leave no slot free."""
MAX_STALENESS = 1
"""Updates of the weights between the oldest token of a group and its use."""
PROMPTS_A_GROUP = 5
"""Of the synchronous scheme."""
ENOUGH = 100
"""Prompts for any iteration of eight groups."""


class SleepTask(BaseModel):
    seconds: list[float]
    """Of RUN, one for each member of the group."""
    rewards: list[float]


class Sleeper(AgentHandler[SleepTask]):
    """Samples a token, sleeps as long as its place in the group is told, and gets that place's reward."""

    name = "sleeper"
    Task = SleepTask

    async def run(self, ctx: RunContext[SleepTask]) -> FinishReason:
        await ctx.agent.start([Message(role="user", content="1")])
        await ctx.agent.query(1)
        await asyncio.sleep(ctx.task.seconds[ctx.index])
        return FinishReason.STOP

    async def evaluate(self, ctx: EvalContext[SleepTask]) -> Reward:
        return Reward(ctx.task.rewards[ctx.index])


def make_prompts(seed: int, count: int, n: int, mean_s: float) -> list[RolloutRequest]:
    """Prompts of which every second one, at random, has the same reward for all of its group."""
    chance = random.Random(seed)
    median_s = mean_s / 2.718281828 ** (SIGMA**2 / 2)
    prompts = []
    for _ in range(count):
        seconds = [min(chance.lognormvariate(0, SIGMA) * median_s, LONGEST * mean_s) for _ in range(n)]
        rewards = [1.0] * n
        if chance.random() < 0.5:
            rewards = [0.0] + [float(chance.random() < 0.5) for _ in range(n - 2)] + [1.0]
        task = {"seconds": [round(s, 3) for s in seconds], "rewards": rewards}
        prompts.append(RolloutRequest(handler="sleeper", task=task))
    return prompts


class Run:
    """One scheme on one seed: what the schemes share, and what they count."""

    def __init__(self, client: Client, options: harness.Options, prompts: list[RolloutRequest]) -> None:
        self.client, self.options, self.prompts = client, options, prompts
        self.stale = 0
        """Informative groups thrown away because they were too old."""

    def batch(self, prompts: list[RolloutRequest], **more: object) -> str:
        """Wait for the groups of one iteration; the batch's id."""
        request = BatchRequest(
            prompts=prompts,
            n=self.options.n,
            groups=self.options.groups,
            max_in_flight=self.options.slots + AHEAD,
            # Slots are the only limit, as for the others.
            oversample=16.0,
            max_staleness=MAX_STALENESS,
            **more,
        )
        batch = self.client.batches.create(request)
        kept = len(list(self.client.batches.stream(batch.id, include="summary")))
        if kept != self.options.groups:
            raise RuntimeError(f"batch {batch.id} kept {kept} groups of {self.options.groups}")
        self.stale += self.client.batches.get(batch.id).reasons.get("stale", 0)
        return batch.id

    def iterations(self) -> Iterator[int]:
        """Their numbers; between two the trainer updates the weights, which takes it no time here."""
        for number in range(self.options.iterations):
            yield number
            version = f"step-{time.monotonic_ns()}"
            state = self.client.update_policy(version).state
            if state != "done":
                raise RuntimeError(f"the update to {version} is {state}, not done")


def ours(run: Run) -> None:
    """See the module's text, also below."""
    before = None
    for number in run.iterations():
        before = run.batch([] if number else run.prompts, closed=False, carry_from=before)
    run.client.batches.cancel(before)


def synchronous(run: Run) -> None:
    source = iter(run.prompts)
    surplus: list[int] = []
    for number in run.iterations():
        fresh = [born for born in surplus if number - born <= MAX_STALENESS]
        run.stale += len(surplus) - len(fresh)
        while (missing := run.options.groups - len(fresh)) > 0:
            prompts = islice(source, PROMPTS_A_GROUP * missing)
            requests = [prompt.model_copy(update={"n": run.options.n}) for prompt in prompts]
            groups = by_group(run.client.run(requests, include="summary")).values()
            fresh += [number] * sum(max(rewards) > min(rewards) for rewards in groups)
        surplus = fresh[run.options.groups :]


def restart(run: Run) -> None:
    prompts = run.prompts
    for _ in run.iterations():
        batch_id = run.batch(prompts[:ENOUGH], carry="none")
        prompts = prompts[run.client.batches.get(batch_id).started :]


SCHEMES: dict[str, Callable[[Run], None]] = {"ours": ours, "synchronous": synchronous, "restart": restart}


def measure(scheme: Callable[[Run], None], run: Run, stack: Stack) -> dict[str, float]:
    """Seconds from the first submission to an idle service, and the share of RUN's slots in use meanwhile."""
    used: list[int] = []
    idle = threading.Event()

    def look() -> None:
        while not idle.wait(0.05):
            used.append(harness.in_state(stack, "running"))

    watch = threading.Thread(target=look)
    watch.start()
    began = time.monotonic()
    try:
        scheme(run)
        wait_until(lambda: harness.in_state(stack, *harness.LIVE_STATES) == 0, 60, "the service to be idle")
        seconds = time.monotonic() - began
    finally:
        idle.set()
        watch.join()
    busy_share = statistics.fmean(used) / run.options.slots
    return {"seconds": seconds, "busy_share": busy_share, "stale_groups": run.stale}


def main(options: harness.Options) -> harness.Report:
    """Run it; see the module's text."""
    options.groups = max(1, min(options.groups, options.count // (2 * options.n)))
    options.iterations = max(1, options.count // (options.groups * options.n))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEMES}
    handlers = "benchmarks.dynamic_sampling:Sleeper"
    with fake_engine() as engine, harness.service(ROLLOUT_HANDLERS=handlers) as stack:
        for queues in harness.split(harness.STAGES, short=options.rounds == 1):
            stack.start_worker(queues, slots=options.slots if "run" in queues else 32)
        stack.client.add_backend(engine.url)
        stack.client.run([RolloutRequest(handler="sleeper", task={"seconds": [0.0], "rewards": [1.0]})])
        count = options.iterations * options.groups * 2 * PROMPTS_A_GROUP + ENOUGH
        for seed, name in harness.in_turns(SCHEMES, options.rounds):
            prompts = make_prompts(seed, count, options.n, options.mean_s)
            runs[name].append(measure(SCHEMES[name], Run(stack.client, options, prompts), stack))
            harness.say(f"seed {seed}, {name}: {runs[name][-1]}")
    seconds = {name: [figures["seconds"] for figures in rounds] for name, rounds in runs.items()}
    ratios = {
        name: harness.summary(harness.ratios(seconds[name], seconds["ours"]))
        for name in ("synchronous", "restart")
    }
    schemes = {name: harness.summaries(rounds) for name, rounds in runs.items()}
    return {
        "results": {
            **{f"speedup_vs_{name}_one_update_old": spread["median"] for name, spread in ratios.items()},
            "slots_busy_share_filling_up_included": schemes["ours"]["busy_share"]["median"],
        },
        "ratios": ratios,
        "schemes": schemes,
    }


if __name__ == "__main__":
    harness.run(
        main,
        count=384,
        rounds=3,
        groups={"type": int, "default": 8, "help": "informative groups of an iteration"},
        n={"type": int, "default": 8},
        slots={"type": int, "default": 64, "help": "of RUN"},
        mean_s={"type": float, "default": 1.0, "help": "of a rollout's sleep"},
    )
