"""Rollouts of the `swe` handler with a scripted agent: real sandboxes and stages, a fixed list of actions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.schema import Limits, Rollout, RolloutRequest
from rollout.trajectory import FinishReason
from tests.helpers.stack import CHECKPOINT
from workers.agent.replay import Action, Call
from workers.handlers.base import RunContext
from workers.handlers.swe import Swe
from workers.inprocess import Actions, InProcess

LIMITS = Limits(init_timeout_s=240, run_timeout_s=240, eval_timeout_s=240, max_attempts=1)
"""Generous: no test waits for one of them."""


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


def result_of(rollout: Rollout) -> Result:
    """With the artifacts read."""
    artifacts = rollout.trajectory.artifacts if rollout.trajectory else {}
    return Result(rollout, json.loads(artifacts.get("report", "{}")), artifacts.get("patch", ""))


def bash(command: str) -> Action:
    """A turn that runs a command."""
    return Action(tool_calls=[Call(name="execute_bash", arguments={"command": command})])


FINISH = Action(tool_calls=[Call(name="finish", arguments={"message": "done"})])


def roll(row: dict[str, Any], *commands: str, limits: Limits = LIMITS) -> Result:
    """One rollout of an agent that runs the commands and finishes."""
    return asyncio.run(roll_many([(row, commands)], limits))[0]


async def roll_many(jobs: list[tuple[dict[str, Any], Any]], limits: Limits = LIMITS) -> list[Result]:
    """Rollouts of `(row, commands)`, two at a time."""
    turn = asyncio.Semaphore(2)

    async def one(row: dict[str, Any], commands: Any) -> Result:
        async with turn:
            runner = InProcess(Swe(), Actions([*map(bash, commands), FINISH], str(CHECKPOINT)))
            request = RolloutRequest(handler="swe", task=row, limits=limits)
            rollout = (await runner.run(request))[0]
        return result_of(rollout)

    return await asyncio.gather(*(one(*job) for job in jobs))


class Given(Swe):
    """`swe` with a patch that is given instead of one that an agent makes."""

    uses_model = False

    def __init__(self, patch: str) -> None:
        self._patch = patch

    async def run(self, ctx: RunContext[Any]) -> FinishReason:
        ctx.artifacts["patch"] = self._patch
        return FinishReason.STOP


async def judge_many(jobs: list[tuple[dict[str, Any], str]], limits: Limits = LIMITS) -> list[Result]:
    """Rollouts of `(row, patch)`, two at a time."""
    turn = asyncio.Semaphore(2)

    async def one(row: dict[str, Any], patch: str) -> Result:
        async with turn:
            request = RolloutRequest(handler="swe", task=row, limits=limits)
            return result_of((await InProcess(Given(patch)).run(request))[0])

    return await asyncio.gather(*(one(*job) for job in jobs))


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
