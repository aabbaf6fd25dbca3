"""What a Harbor task is on this node: its directory, image, working directory and variables."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rollout.image_names import local_name
from rollout.suites import SuiteError
from rollout.suites.harbor.config import AgentConfig, User, VerifierConfig, resolved
from rollout.suites.harbor.directory import MAX_TEXT_BYTES, StepDirectory, TaskDirectory, load
from sandbox import paths
from sandbox.errors import ImageError
from sandbox.images import ImageStore
from sandbox.images.environment import ImageConfig, image_config, read_inside
from sandbox.spec import Limits
from services.settings import settings
from workers.bundles import unpacked
from workers.errors import TaskError
from workers.handlers.base import Context
from workers.handlers.harbor import network
from workers.handlers.harbor.images import image_of
from workers.handlers.harbor.task import HarborTask

LOGS, AGENT_LOGS, VERIFIER_LOGS, ARTIFACTS = "/logs", "/logs/agent", "/logs/verifier", "/logs/artifacts"
TESTS, SOLUTION = "/tests", "/solution"
UNLIMITED_S = 1e8
"""For an agent without a time limit of its own; RUN's holds."""
_WORKDIR = re.compile(r"WORKDIR\s+(/[^\s$]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Trial:
    """A task, ready to be run. The same in each stage: it is made of bundle, image and settings alone."""

    task: HarborTask
    directory: TaskDirectory
    image: str
    """Name of the image here, for `Sandboxes`."""
    rootfs: Path
    """The image as this node has unpacked it; read it as hostile."""
    declared: ImageConfig
    """What the image says of itself: user, working directory, variables."""
    workdir: str
    given: Mapping[str, str]
    """What `${NAME}` may be: variables of the worker that the deployment names."""

    @property
    def limits(self) -> Limits:
        """Of the sandbox, and of the fresh ones that verify; the node's host refuses more than it allows."""
        wanted = self.directory.config.environment
        return Limits(memory_mb=wanted.memory_mb, disk_mb=wanted.storage_mb)

    @property
    def sandbox(self) -> dict[str, Any]:
        """Options of `ctx.sandboxes.boot`, `fresh` and `warm`, the same for all, for one warm pool."""
        return {"image": self.image, "network": "none", "limits": self.limits}

    def timeout(self, seconds: float) -> float:
        """A limit of the task, times `timeout_multiplier`."""
        return seconds * self.task.timeout_multiplier

    def network(self, part: AgentConfig | VerifierConfig) -> tuple[str, tuple[str, ...]]:
        """Mode and hosts of the agent or a verifier, for `network.way_out`."""
        environment = self.directory.config.environment
        of = part if part.network_mode else environment
        return of.network_mode or network.PUBLIC, of.allowed_hosts or ()

    def environment(self, user: User = None, *more: Mapping[str, str]) -> dict[str, str]:
        """Variables for a program: an account's, `[environment].env`, and `more`, all resolved.

        Raises:
            TaskError: One has neither value nor default, or the image does not know the user.
        """
        variables = account(self.rootfs, self.declared.user or "root", user)
        for env in (self.directory.config.environment.env, *more):
            variables |= self.resolved(env)
        return variables

    def resolved(self, env: Mapping[str, str], where: str = "env") -> dict[str, str]:
        """Texts with what they refer to put in.

        Raises:
            TaskError: There is neither a value nor a default; `where` names the field.
        """
        try:
            return resolved(env, self.given, where)
        except SuiteError as error:
            raise TaskError(f"{error}; ROLLOUT_TASK_VARIABLES names what tasks are given") from error

    def agent_s(self, step: StepDirectory) -> float:
        """Seconds that the agent's turns may take in a step."""
        return self.timeout(step.agent.timeout_sec) if step.agent.timeout_sec else UNLIMITED_S

    def inside(self, path: str) -> str:
        """A path of the task's as one of the sandbox."""
        return str(PurePosixPath(self.workdir, path))

    def check(self) -> None:
        """Refuse, before an agent has worked, what would fail after it has.

        Raises:
            TaskError: A user, a variable or a network that there is not.
        """
        for step in self.directory.steps:
            self.environment(step.agent.user)
            self.environment(step.verifier.user, step.verifier.env)
        self.warnings()

    def warnings(self, *, by_program: bool = False) -> list[str]:
        """What is not done as the task has it.

        Raises:
            TaskError: It wants a network that the deployment does not give.
        """
        lines, config = list(self.directory.warnings), self.directory.config
        parts = [part for step in self.directory.steps for part in (step.agent, step.verifier)]
        if any(part.user is not None for part in parts):
            lines.append("users are not kept apart: all processes of a sandbox have one uid")
        if config.environment.cpus is not None:
            lines.append(f"environment.cpus = {config.environment.cpus:g} is not enforced")
        if by_program and self.network(parts[0])[0] == network.PUBLIC:
            lines.append("network_mode public: a program that drives the turns has no network but its model")
        lines += filter(None, (network.check(*self.network(part)) for part in parts))
        return list(dict.fromkeys(lines))


async def trial_of(ctx: Context[HarborTask]) -> Trial:
    """The trial of a rollout, in whichever stage and process.

    Raises:
        TaskError: The bundle is nowhere, or its task cannot be run here; the message names the remedy.
        ImageError: This node cannot unpack the image.
    """
    path = await unpacked(ctx.task.bundle, ctx.rollout_id)
    try:
        directory = await asyncio.to_thread(load, path, check_image=False)  # `image_of` does
    except SuiteError as error:
        raise TaskError(str(error).replace(f"{path}/", "")) from error
    image = ctx.task.image and local_name(ctx.task.image)
    image = image or await image_of(directory.config.environment, directory.environment)
    names = filter(None, (name.strip() for name in settings().task_variables.split(",")))
    given = {name: os.environ[name] for name in names if name in os.environ}
    try:
        return await asyncio.to_thread(_trial, ctx.task, directory, image, given)
    except ImageError as error:
        if ctx.task.image:
            raise TaskError(f"image: {error}") from error
        raise


def _trial(task: HarborTask, directory: TaskDirectory, image: str, given: Mapping[str, str]) -> Trial:
    store = ImageStore()
    rootfs, declared = store.rootfs(image, paths.sandbox_user()), image_config(store.find(image))
    workdir = directory.config.environment.workdir or declared.workdir
    if workdir == "/":
        # What Harbor's own Apptainer environment does, which knows no image's directory.
        dockerfile = directory.environment / "Dockerfile"
        small = dockerfile.is_file() and dockerfile.stat().st_size <= MAX_TEXT_BYTES
        lines = dockerfile.read_text(errors="replace").splitlines() if small else []
        named = [found[1] for line in lines if (found := _WORKDIR.fullmatch(line.strip()))]
        app = ["/app"] if (rootfs / "app").is_dir() and not (rootfs / "app").is_symlink() else []
        workdir = [*named[-1:], *app, "/"][0]
    return Trial(task, directory, image, rootfs, declared, workdir, given)


def account(rootfs: Path, default: str, user: User = None) -> dict[str, str]:
    """HOME, USER and LOGNAME of a user, as the image's /etc/passwd has them.

    Args:
        default: Of the image, where `user` is None.

    Raises:
        TaskError: A name that it does not know.
    """
    wanted = str(default if user is None else user).partition(":")[0]
    try:
        passwd = read_inside(rootfs, ("etc", "passwd")).decode(errors="replace")
    except OSError:
        passwd = ""
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) == 7 and wanted in (fields[0], fields[2]) and "\0" not in line:
            # A home of another's, as of root in a directory that root unpacked, is none.
            home = {"HOME": fields[5]} if user is not None or _is_ours(rootfs, fields[5]) else {}
            return {**home, "USER": fields[0], "LOGNAME": fields[0]}
    if user is None or wanted.isdigit():
        return {}
    raise TaskError(f"user {user!r} is not in /etc/passwd of the task's image")


def _is_ours(rootfs: Path, home: str) -> bool:
    place = PurePosixPath(home)
    if not place.is_absolute() or ".." in place.parts:
        return False
    try:
        return (rootfs / place.relative_to("/")).lstat().st_uid == (paths.sandbox_user() or os.geteuid())
    except OSError:
        return False
