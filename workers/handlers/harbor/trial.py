"""What a Harbor task is on this node: its directory, image, working directory and environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.spec import Limits
from workers.handlers.base import Context
from workers.handlers.harbor.task import HarborTask

LOGS, AGENT_LOGS, VERIFIER_LOGS, ARTIFACTS = "/logs", "/logs/agent", "/logs/verifier", "/logs/artifacts"
TESTS, SOLUTION = "/tests", "/solution"


@dataclass(frozen=True)
class Trial:
    """A task, ready to be run. The same in each stage: it is made of the bundle and the image alone."""

    task: HarborTask
    directory: Any
    """`rollout.suites.harbor.directory.TaskDirectory`."""
    image: str
    """Name of the image here, for `Sandboxes`."""
    rootfs: Path
    """The image as this node has unpacked it; read it as hostile."""
    workdir: str
    agent_env: Mapping[str, str]
    """`[environment].env` resolved, with HOME, USER and LOGNAME of `agent.user`."""
    limits: Limits = field(default_factory=Limits)
    """Of the sandbox, also of a fresh one that verifies."""

    @property
    def sandbox(self) -> dict[str, Any]:
        """Options of `ctx.sandboxes.boot`, `fresh` and `warm`, the same for each, so that one pool serves all."""
        return {"image": self.image, "network": "none", "limits": self.limits}

    def timeout(self, seconds: float) -> float:
        """A limit of the task, times `timeout_multiplier`."""
        return seconds * self.task.timeout_multiplier

    def environment(self, user: str | int | None = None, *more: Mapping[str, str]) -> dict[str, str]:
        """Variables for a program of the task: `[environment].env`, an account's, and `more`, each resolved
        (`${VAR:-default}`). For `exec(env=…)` of what is no agent's: pass `config.verifier.user` and
        `config.verifier.env`.

        Raises:
            TaskError: A variable without a value or default, or a user whom the image does not know.
        """
        raise NotImplementedError


async def trial_of(ctx: Context[HarborTask]) -> Trial:
    """The trial of a rollout, in whichever stage and process.

    Raises:
        TaskError: The bundle is nowhere, or its task cannot be run here; the message names the remedy.
    """
    raise NotImplementedError


async def image_of(config: Any, context: Path, override: str | None = None) -> str:
    """Name of the image of an `[environment]` (or `[verifier.environment]`), built where that is permitted.

    Raises:
        TaskError: It is not here, and must not or cannot be built.
    """
    raise NotImplementedError
