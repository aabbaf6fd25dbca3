"""What is done in a sandbox before an agent comes: directories, files of a step, health."""

from __future__ import annotations

import asyncio
import shlex

from rollout.suites.harbor.config import HealthcheckConfig
from rollout.suites.harbor.directory import StepDirectory
from sandbox.client import BashResult, SandboxClient
from sandbox.errors import SandboxRequestError
from workers.errors import TaskError
from workers.handlers.harbor.trial import AGENT_LOGS, ARTIFACTS, VERIFIER_LOGS, Trial

TAIL = 2000
"""Characters of a command's output in an error."""


class NotReady(TaskError):
    """The sandbox cannot be made as the task wants it; the message says what failed."""


async def lay_out(box: SandboxClient, trial: Trial) -> None:
    """Give the shell the task's variables and directory, and make those that Harbor promises."""
    await box.setup(trial.environment(trial.directory.steps[0].agent.user))
    places = " ".join(map(shlex.quote, (AGENT_LOGS, VERIFIER_LOGS, ARTIFACTS, trial.workdir)))
    result = await box.bash(f"mkdir -p -m 777 {places} && cd {shlex.quote(trial.workdir)}")
    _require(result, "the task's directories cannot be made, which takes the runtime apptainer")


async def begin(box: SandboxClient, trial: Trial, step: StepDirectory) -> None:
    """Ready the sandbox for a step: its files, its `setup.sh`, its health.

    By the agent's shell, so that what they start runs on.

    Raises:
        NotReady: One of them failed.
    """
    await box.bash(f"cd {shlex.quote(trial.workdir)}")
    if step.workdir is not None:
        try:
            await box.upload(step.workdir, trial.workdir)
        except SandboxRequestError as error:  # an agent was there before
            raise NotReady(f"the files of step {step.name} find no place: {error}") from error
        if (step.workdir / "setup.sh").is_file():
            limit = trial.timeout(trial.directory.config.environment.build_timeout_sec)
            _require(await box.bash("bash ./setup.sh", limit), f"setup.sh of step {step.name}")
    for check in (trial.directory.config.environment.healthcheck, step.healthcheck):
        if check is not None:
            await healthy(box, check)


def starts_processes(trial: Trial) -> bool:
    """Whether what `begin` starts may be needed: by a `setup.sh`, or as what a health check asks for."""
    steps = trial.directory.steps
    set_up = any(step.workdir is not None and (step.workdir / "setup.sh").is_file() for step in steps)
    checks = trial.directory.config.environment.healthcheck, *(step.healthcheck for step in steps)
    return set_up or any(check is not None for check in checks)


async def healthy(box: SandboxClient, check: HealthcheckConfig) -> None:
    """Wait until a command says that the sandbox is well, as Docker's HEALTHCHECK counts.

    Docker looks for the first time after an interval. Looking at once saves that time where all is well, so
    that look counts only if it succeeds.

    Raises:
        NotReady: It failed `retries` times in a row, the start period left out.
    """
    clock = asyncio.get_running_loop().time
    began, failures, first = clock(), 0, True
    command = f"bash -c {shlex.quote(check.command)} </dev/null"
    while True:
        result = await box.bash(command, check.timeout_sec)
        if result.exit_code == 0 and not result.timed_out:
            return
        starting = clock() - began < check.start_period_sec
        failures += not (starting or first)
        if failures >= check.retries:
            _require(result, f"the healthcheck failed {failures} times: {check.command}")
        first = False
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)


def _require(result: BashResult, what: str) -> None:
    if result.exit_code != 0 or result.timed_out:
        how = "took too long" if result.timed_out else f"exit code {result.exit_code}"
        raise NotReady(f"{what}: {how}: …{result.output[-TAIL:]}")
