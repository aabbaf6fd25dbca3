"""What Harbor tasks cost beside their own work.

overhead_s   EVAL of a task by the service's stage (the agent's files into a fresh sandbox of a pool that is
             full, tests, reward) over `bash /tests/test.sh` by hand in the agent's sandbox. They take turns
             with each rollout, first one and then the other; the figure is the median of their differences.
build_…      an image of a Dockerfile, from its base on, and again with nothing changed (`_dockerfile.py`)
check_…      small tasks that `rollout tasks check` gets through in a minute (`_task_checks.py`): all that
             there are, or two in the short form

Each is a function of `MEASURES`: it gives results by key, and what else is worth knowing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from benchmarks import harness
from benchmarks._dockerfile import builds
from benchmarks._task_checks import check_tasks_per_min
from rollout.schema import RolloutRequest
from sandbox.host_client import HostClient
from tests.helpers.harbor_agents import LIMITS, OFFLINE
from tests.helpers.harbor_tasks import request, write_task
from tests.helpers.stack import CHECKPOINT
from tests.helpers.swe_agents import FINISH, bash
from workers.handlers.base import EvalContext, Reward
from workers.handlers.harbor import Harbor
from workers.handlers.harbor.task import HarborTask
from workers.inprocess import Actions, InProcess

WARM = 2
SHORT_TASKS = 2
TEST = """#!/bin/bash
cd /app
python3 -m pytest -q -p no:cacheprovider /tests/test_outputs.py
echo $((1 - $?)) > /logs/verifier/reward.txt
"""
OUTPUTS = """
import subprocess, sys
sys.path.insert(0, "/app/src")

def test_package():
    import toy.m7
    assert toy.m7.f(2) == 9

def test_program():
    assert subprocess.check_output(["/app/run.sh"], text=True) == "42\\n"
"""
WORK = """
mkdir -p src/toy && for i in $(seq 200); do echo "def f(x): return x + $i" > src/toy/m$i.py; done
printf '#!/bin/sh\\necho 42\\n' > run.sh && chmod +x run.sh && git init -q . && git add . && rm -rf /srv
"""
"""A package, a program and a repository: some hundred files."""


class Timed(Harbor):
    """The handler, whose EVAL also runs the tests by hand, and times both."""

    def __init__(self, tests: Path) -> None:
        self._tests = tests
        self.turns: list[dict[str, float]] = []

    async def evaluate(self, ctx: EvalContext[HarborTask]) -> Reward:
        """EVAL and the tests by hand, in an order that changes with each rollout."""
        assert ctx.sandbox is not None
        took: dict[str, float] = {}
        await ctx.sandbox.upload(self._tests, "/tests")
        for way in ("ours", "by_hand") if len(self.turns) % 2 else ("by_hand", "ours"):
            await harness.pool_is_full(HostClient(), WARM, used=1)
            began = time.monotonic()
            if way == "ours":
                reward = await super().evaluate(ctx)
            else:
                done = await ctx.sandbox.exec(["bash", "/tests/test.sh"], timeout=60, cwd="/app")
                assert done.exit_code == 0, done
            took[way] = time.monotonic() - began
        assert reward.value == 1.0, ctx.artifacts
        self.turns.append(took)
        return reward


def overhead(options: harness.Options, directory: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of EVAL over those of the tests by hand."""
    task = write_task(directory / "task", OFFLINE, test=TEST, files={"tests/test_outputs.py": OUTPUTS})
    handler = Timed(task / "tests")
    rollouts = RolloutRequest(handler="harbor", task=request(task), n=options.rounds + 1, limits=LIMITS)
    runner = InProcess(handler, Actions([bash(WORK), FINISH], str(CHECKPOINT)))
    for rollout in asyncio.run(runner.run(rollouts)):
        assert rollout.reward == 1.0, rollout.error
    turns = handler.turns[1:]  # the first one fills caches and the pool
    over = harness.summary(turn["ours"] - turn["by_hand"] for turn in turns)
    return {"overhead_s": over["median"]}, {"overhead_s": over, "seconds": harness.summaries(turns)}


def checks(options: harness.Options, directory: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Checks of tasks."""
    count = SHORT_TASKS if options.rounds == 1 else None
    return {"check_tasks_per_min": check_tasks_per_min(directory / "suite", count)}, {}


Measure = Callable[[harness.Options, Path], tuple[dict[str, float], dict[str, Any]]]
MEASURES: Sequence[Measure] = (overhead, builds, checks)


def main(options: harness.Options) -> harness.Report:
    """Run, and print the result line."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    results: dict[str, float] = {}
    told: dict[str, Any] = {}
    with harness.private_directory() as directory, harness.private_host(directory / "state", WARM) as host:
        os.environ["ROLLOUT_SANDBOX_DIR"] = str(host.state)
        os.environ["ROLLOUT_BUNDLE_CACHE"] = str(directory / "bundles")
        for measure in MEASURES:
            harness.say(measure.__name__)
            found, more = measure(options, directory)
            results |= found
            told |= more
    return {"results": results, **told}


if __name__ == "__main__":
    harness.run(main, count=0, rounds=9)
