"""A small Harbor task, made as its test wants it, and rollouts of it with a scripted agent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.schema import Limits, Rollout, RolloutRequest
from rollout.suites.bundles import pack
from tests.helpers.stack import CHECKPOINT
from tests.helpers.swe_agents import FINISH, bash
from workers import bundles
from workers.handlers.harbor.handler import Harbor
from workers.inprocess import Actions, InProcess

LIMITS = Limits(init_timeout_s=240, run_timeout_s=240, eval_timeout_s=240, max_attempts=1)
"""Generous: no test waits for one of them."""
TOML = """
[environment]
docker_image = "base"
workdir = "/app"
network_mode = "no-network"
"""
TEST = """#!/bin/bash
cd /app
if python3 -m pytest -q -rA -p no:cacheprovider /tests/test_outputs.py; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
"""


@dataclass(frozen=True)
class Task:
    """What is in its directory."""

    outputs: str = ""
    """`tests/test_outputs.py`."""
    test: str = TEST
    solution: str | None = None
    toml: str = TOML
    more: Mapping[str, str] | None = None
    """Further files, by their path."""

    def write(self, path: Path) -> Path:
        """Make the directory."""
        files = {
            "task.toml": self.toml,
            "instruction.md": "Do it.\n",
            "tests/test.sh": self.test,
            "tests/test_outputs.py": self.outputs,
            **({"solution/solve.sh": self.solution} if self.solution is not None else {}),
            **(self.more or {}),
        }
        for name, text in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
        return path

    def request(self, path: Path, **fields: Any) -> dict[str, Any]:
        """The task of a request, its bundle being kept here."""
        bundle = pack(self.write(path))
        bundles.keep(bundle)
        return {"bundle": bundle.digest, "name": "toys/toy", **fields}


async def roll_many(
    jobs: Iterable[tuple[Mapping[str, Any], Sequence[str]]],
    at_once: int = 3,
    limits: Limits = LIMITS,
    handler: Harbor | None = None,
) -> list[Rollout]:
    """Rollouts of `(task of a request, commands of the agent)`, some at a time."""
    turn = asyncio.Semaphore(at_once)

    async def rolled(task: Mapping[str, Any], commands: Sequence[str]) -> Rollout:
        actions = Actions([*map(bash, commands), FINISH], str(CHECKPOINT))
        async with turn:
            request = RolloutRequest(handler="harbor", task=dict(task), limits=limits)
            (rollout,) = await InProcess(handler or Harbor(), actions).run(request)
        return rollout

    return await asyncio.gather(*(rolled(*job) for job in jobs))


def roll(task: Mapping[str, Any], *commands: str, **more: Any) -> Rollout:
    """One rollout of an agent that runs the commands and finishes."""
    return asyncio.run(roll_many([(task, commands)], **more))[0]
