"""A task's own solution, which `rollout tasks check` plays in an agent's place; what no agent must see."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rollout.suites.harbor.directory import StepDirectory, load
from sandbox.client import ExecResult, SandboxClient
from workers.bundles import unpacked
from workers.handlers.base import Context, RunContext
from workers.handlers.harbor.network import way_out
from workers.handlers.harbor.ready import TAIL
from workers.handlers.harbor.task import HarborTask
from workers.handlers.harbor.trial import SOLUTION, Trial
from workers.handlers.oracle import Hidden, NoOracle

MAX_HIDDEN_BYTES = 1 << 20
DATA = frozenset((".csv", ".dat", ".html", ".jpg", ".json", ".jsonl", ".md", ".png", ".tsv", ".txt", ".xml"))
"""Files of tests that may well be those that the agent works on."""


async def solve(ctx: RunContext[HarborTask], trial: Trial, step: StepDirectory) -> None:
    """Run `solution/solve.sh` of a step; nothing of it stays but what it did.

    Raises:
        NoOracle: There is none.
    """
    assert ctx.sandbox is not None
    if step.solution is None or not (step.solution / "solve.sh").is_file():
        raise NoOracle(f"{trial.directory.name}: there is no solution/solve.sh")
    limit = min(trial.agent_s(step), ctx.limits.run_timeout_s - ctx.spent_s)
    result = await carry_out(ctx, ctx.sandbox, trial, step, limit)
    ctx.artifacts["/".join(filter(None, ("solution.log", step.name)))] = result.stdout
    if result.exit_code != 0:
        # Harbor lets the verifier decide; and so it does here.
        how = "took too long" if result.timed_out else f"ended with {result.exit_code or result.not_started}"
        ctx.agent.trajectory.warnings.append(f"solve.sh {how}: …{result.stdout[-TAIL:]}")


async def carry_out(
    ctx: Context[HarborTask], box: SandboxClient, trial: Trial, step: StepDirectory, limit_s: float
) -> ExecResult:
    """Run the solution of a step, which has one, in a sandbox; nothing of it stays but what it did."""
    assert step.solution is not None
    await box.exec(["rm", "-rf", SOLUTION])
    await box.upload(step.solution, SOLUTION)
    async with way_out(box, *trial.network(step.agent), ctx) as way:
        env = trial.environment(step.agent.user, trial.directory.config.solution.env)
        env = {"DEBIAN_FRONTEND": "noninteractive"} | env | way
        argv = ["bash", f"{SOLUTION}/solve.sh"]
        result = await box.exec(argv, limit_s, cwd=trial.workdir, env=env, merge_output=True)
    await box.exec(["rm", "-rf", SOLUTION])
    return result


async def hidden(task: HarborTask) -> Sequence[Hidden]:
    """Files of tests and solution, and what the verifier's variables have that the agent's have not."""
    directory = await asyncio.to_thread(load, await unpacked(task.bundle, ""))
    found: dict[Path, Hidden] = {}
    values: list[Hidden] = []
    for step in directory.steps:
        for folder in filter(None, (*step.tests, step.solution)):
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.stat().st_size <= MAX_HIDDEN_BYTES:
                    name, data = str(file.relative_to(directory.path)), file.suffix in DATA
                    given = data and folder != step.solution
                    found[file] = Hidden(name, file.read_bytes(), given=given)
        for name, value in step.verifier.env.items():
            if value and "${" not in value and directory.config.environment.env.get(name) != value:
                values.append(Hidden(f"verifier.env {name}", value, secret=len(value) >= 8))
    return [*found.values(), *values]
