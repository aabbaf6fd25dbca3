"""Rollouts of the `swe` handler with a scripted agent: real sandboxes and stages, a fixed list of actions."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.schema import Limits, Rollout, RolloutRequest
from rollout.trajectory import FinishReason
from tests.helpers.stack import CHECKPOINT
from workers.agent.replay import Action, Call
from workers.handlers.base import InitContext, RunContext
from workers.handlers.swe import Swe
from workers.inprocess import Actions, InProcess

LIMITS = Limits(init_timeout_s=240, run_timeout_s=240, eval_timeout_s=240, max_attempts=1)
"""Generous: no test waits for one of them."""
AT_ONCE = 3
"""Rollouts at a time: each mostly waits for its sandboxes."""


@dataclass(frozen=True)
class Result:
    """What a rollout came to."""

    rollout: Rollout
    report: dict[str, Any]
    patch: str

    @property
    def log(self) -> str:
        return self.rollout.trajectory.artifacts["test_log"]

    @property
    def reward(self) -> float | None:
        return self.rollout.reward


def bash(command: str) -> Action:
    """A turn that runs a command."""
    return Action(tool_calls=[Call(name="execute_bash", arguments={"command": command})])


def apply(patch: str) -> str:
    """The command that applies a patch in the agent's shell."""
    return f"cat > /tmp/fix.diff <<'EOF_FIX'\n{patch}EOF_FIX\ngit apply /tmp/fix.diff"


def git(row: dict[str, Any], *arguments: str) -> str:
    """Ask git about the repository in the unpacked image of a row."""
    command = ["git", "-c", "safe.directory=*", "-C", row["image"] + row["spec"]["repo_dir"], *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


FINISH = Action(tool_calls=[Call(name="finish", arguments={"message": "done"})])


def roll(row: dict[str, Any], *commands: str, limits: Limits = LIMITS) -> Result:
    """One rollout of an agent that runs the commands and finishes."""
    return asyncio.run(roll_many([(row, commands)], limits))[0]


async def roll_many(jobs: Iterable[tuple[dict[str, Any], Any]], limits: Limits = LIMITS) -> list[Result]:
    """Rollouts of `(row, commands)`, some at a time."""
    return await _some_at_a_time(
        limits,
        [
            (row, InProcess(Swe(), Actions([*map(bash, commands), FINISH], str(CHECKPOINT))))
            for row, commands in jobs
        ],
    )


class Given(Swe):
    """`swe` with a patch that is given instead of one that an agent makes."""

    uses_model = False

    def __init__(self, patch: str) -> None:
        self._patch = patch

    async def run(self, ctx: RunContext[Any]) -> FinishReason:
        ctx.artifacts["patch"] = self._patch
        return FinishReason.STOP


class Judged(Given):
    """EVAL alone, which needs nothing of a sandbox that an agent was in."""

    async def init(self, ctx: InitContext[Any]) -> None:
        return None


async def judge_many(
    jobs: Iterable[tuple[dict[str, Any], str]], handler: type[Given] = Given, limits: Limits = LIMITS
) -> list[Result]:
    """Rollouts of `(row, patch)`, some at a time."""
    return await _some_at_a_time(limits, [(row, InProcess(handler(patch))) for row, patch in jobs])


async def _some_at_a_time(limits: Limits, jobs: list[tuple[dict[str, Any], InProcess]]) -> list[Result]:
    turn = asyncio.Semaphore(AT_ONCE)

    async def rolled(row: dict[str, Any], runner: InProcess) -> Result:
        async with turn:
            (rollout,) = await runner.run(RolloutRequest(handler="swe", task=row, limits=limits))
        artifacts = rollout.trajectory.artifacts if rollout.trajectory else {}
        return Result(rollout, json.loads(artifacts.get("report", "{}")), artifacts.get("patch", ""))

    return await asyncio.gather(*(rolled(*job) for job in jobs))


def official_report(row: dict[str, Any], patch: str, log: str, path: Path) -> dict[str, Any]:
    """What the official harness's own grading says of a log."""
    from swebench.harness.grading import get_eval_report
    from swebench.types import TestSpec

    spec = TestSpec(
        instance_id=row["instance_id"],
        image="",
        eval_script_list=[],
        repo=row["repo"],
        version=row["version"],
        FAIL_TO_PASS=json.loads(row["FAIL_TO_PASS"]),
        PASS_TO_PASS=json.loads(row["PASS_TO_PASS"]),
        log_parser="parse_log_pytest",
        eval_type="pass_and_fail",
    )
    path.write_text(log)
    prediction = {
        "instance_id": row["instance_id"],
        "model_patch": patch or None,
        "model_name_or_path": "test",
    }
    return get_eval_report(spec, prediction, str(path), include_tests_status=True)[row["instance_id"]]
