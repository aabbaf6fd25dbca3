"""Verification: the task's own tests, in a fresh sandbox to which the agent's files travel.

A reward that is missing is nobody's 0 yet. The verifier runs once more, in another fresh sandbox; if it still
writes none where the oracle's files get one, the agent is to blame, else the task.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from rollout.suites.harbor.directory import StepDirectory
from sandbox.client import SandboxClient
from sandbox.errors import SandboxRequestError
from sandbox.runtimes.base import Places
from services.settings import settings
from workers.errors import AgentFault, TaskError
from workers.handlers.base import Context, EvalContext, RunContext
from workers.handlers.harbor import carry, rewards, solution
from workers.handlers.harbor.artifacts import keep_log
from workers.handlers.harbor.images import image_of
from workers.handlers.harbor.network import way_out
from workers.handlers.harbor.ready import begin, lay_out
from workers.handlers.harbor.rewards import NoReward
from workers.handlers.harbor.task import HarborTask
from workers.handlers.harbor.trial import ARTIFACTS, TESTS, Trial

_ENTERED = re.compile(r"""(?:\bcd\s+|\bPYTHONPATH=)["']?([\w./-]+)""")
MAX_LOG_CHARS = 200_000
SAID_CHARS = 500
MARGIN_S = 15.0
"""Of EVAL's time, for all but the programs of the task."""
ROOMY = 8 << 20
"""Bytes of the agent's files for which a fresh sandbox has room whatever the task's limit is."""
FAIR = 5
"""A verifier that had less than its time had enough where it had so many times what the oracle's took."""


@dataclass(frozen=True)
class Verdict:
    """What came of a step's verification."""

    reward: float
    rewards: dict[str, float]
    """All that the verifier wrote, by name."""
    withheld: list[str]
    """Files of the agent's that did not travel, each with the reason."""
    log: str
    """What the verifier printed."""
    blamed: bool
    """The agent's files keep the verifier from writing a reward: it is 0."""
    seconds: float
    why: str = ""
    """Of no reward."""


@dataclass
class _Outcome:
    """One run of the verifier."""

    rewards: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    why: str = ""
    """Of no reward."""
    withheld: list[str] = field(default_factory=list)
    log: str = ""
    timed_out: bool = False
    seconds: float = 0.0


def check_runtime(ctx: Context[HarborTask]) -> None:
    """Refuse to put files in place where there is no fresh system, but the machine's own.

    Raises:
        TaskError: The rollout's sandboxes are such.
    """
    runtime = ctx.request.sandbox_runtime or settings().sandbox_runtime
    if runtime == "local-unsafe":
        raise TaskError(
            f"sandbox_runtime {runtime!r}: a Harbor task needs a system of its own; use 'apptainer'"
        )


async def verify(ctx: Context[HarborTask], trial: Trial, step: StepDirectory) -> Verdict:
    """Have a step verified; the agent's processes are ended, and its sandbox stays as it is.

    Raises:
        TaskError: The verifier writes no reward for the oracle's files either, or there is no oracle to tell.
        AgentFault: What the agent left cannot be taken.
        StageError: A sandbox failed.
    """
    check_runtime(ctx)
    verdict = await _Verification(ctx, trial, step).verdict()
    ending = f"/{step.name}" if step.name else ""
    keep_log(ctx.artifacts, f"verifier.log{ending}", verdict.log[-MAX_LOG_CHARS:])
    if verdict.withheld:
        keep_log(ctx.artifacts, f"withheld{ending}", "\n".join(verdict.withheld))
        told = f"not verified with {len(verdict.withheld)} of the agent's files: {verdict.withheld[0]}, …"
        _warn(ctx, told.removesuffix(", …") if len(verdict.withheld) == 1 else told)
    if verdict.blamed:
        _warn(ctx, f"scored 0: with the agent's files the verifier writes no reward: {verdict.why}")
    ctx.metrics["verification_s"] = ctx.metrics.get("verification_s", 0.0) + verdict.seconds
    ctx.metrics["withheld_files"] = ctx.metrics.get("withheld_files", 0.0) + len(verdict.withheld)
    ctx.log.info(
        "verified",
        step=step.name,
        reward=verdict.reward,
        withheld=len(verdict.withheld),
        blamed=verdict.blamed,
        seconds=round(verdict.seconds, 3),
    )
    return verdict


def entered(tests: Sequence[Path], workdir: str) -> list[str]:
    """Directories that the tests' scripts go to, or name to Python, as far as one can read."""
    found: set[str] = set()
    for script in (script for folder in tests for script in folder.glob("*.sh")):
        found.update(_ENTERED.findall(script.read_text(errors="replace")))
    return sorted(str(PurePosixPath(workdir, place)) for place in found)


def _warn(ctx: Context[HarborTask], text: str) -> None:
    """Put a warning into the trajectory, of whichever stage."""
    if isinstance(ctx, RunContext):
        ctx.agent.trajectory.warnings.append(text)
    elif isinstance(ctx, EvalContext):
        ctx.trajectory.warnings.append(text)


class _Verification:
    """The verification of one step."""

    def __init__(self, ctx: Context[HarborTask], trial: Trial, step: StepDirectory) -> None:
        self._ctx, self._trial, self._step = ctx, trial, step
        self._began = time.monotonic()
        self._ends = self._began + max(1.0, ctx.limits.eval_timeout_s - MARGIN_S)
        self._full = trial.timeout(step.verifier.timeout_sec)

    async def verdict(self) -> Verdict:
        """Verify the agent's files, and see whose fault it is if no reward comes of them."""
        assert self._ctx.sandbox is not None
        most = min(self._full, self._left() / 2 if self._step.solution else self._left())
        async with self._files(self._ctx.sandbox) as luggage:
            outcome = await self._grade(luggage, most)
            if outcome.reward is None and self._left() > 2 * outcome.seconds:
                self._ctx.log.warning("the verifier wrote no reward", step=self._step.name, why=outcome.why)
                outcome = await self._grade(luggage, most)
        blamed = outcome.reward is None
        if blamed:
            await self._control(outcome, most)
        seconds = time.monotonic() - self._began
        reward = 0.0 if outcome.reward is None else outcome.reward
        return Verdict(reward, outcome.rewards, outcome.withheld, outcome.log, blamed, seconds, outcome.why)

    async def _control(self, agents: _Outcome, most: float) -> None:
        """TaskError unless the oracle's files get a reward."""
        name, step = self._trial.task.name or self._trial.directory.name, self._step
        what = f"{name}{f', step {step.name}' if step.name else ''}: {agents.why}"
        if step.solution is None:
            raise TaskError(f"{what}; without a solution/ nobody can tell whether that is the agent's fault")
        async with self._ctx.sandboxes.fresh(self._ctx, **self._trial.sandbox) as box:
            await carry.note(box)
            await lay_out(box, self._trial)
            for earlier in self._trial.directory.steps[: self._trial.directory.steps.index(step) + 1]:
                await begin(box, self._trial, earlier)
                if earlier.solution is not None:
                    limit = min(self._trial.agent_s(earlier), self._left())
                    await solution.carry_out(self._ctx, box, self._trial, earlier, limit)
            async with self._files(box) as luggage:
                oracles = await self._grade(luggage, min(self._full, self._left()))
        if oracles.reward is None:
            said = agents.log[-SAID_CHARS:].strip()
            raise TaskError(f"{what}; and for the files of its own solution: {oracles.why}; it said: …{said}")
        if agents.timed_out and most < min(self._full, FAIR * oracles.seconds):
            raise TaskError(
                f"{what}; its verifier may take {self._full:g} s, and eval_timeout_s left it {most:.0f} s: "
                f"give at least {3 * self._full + MARGIN_S:.0f} s"
            )
        self._ctx.log.warning("the agent's files keep the verifier from a reward", why=agents.why)

    @asynccontextmanager
    async def _files(self, box: SandboxClient) -> AsyncIterator[carry.Luggage]:
        """What is verified: all that was changed, or where the verifier is separate the artifacts alone."""
        if not self._step.verifier.separate:
            async with carry.changed(box) as luggage:
                yield luggage
            return
        trial = self._trial
        await carry.settle(box)
        for hook in self._step.verifier.collect:
            env, limit = trial.environment(hook.user), trial.timeout(hook.timeout_sec)
            done = await box.exec(["bash", "-c", hook.command], limit, cwd=trial.workdir, env=env)
            if done.exit_code != 0:
                self._ctx.log.warning("collect failed", command=hook.command, stderr=done.stderr[-500:])
        declared = (*trial.directory.config.artifacts, *self._step.config.artifacts)
        places = {trial.inside(item.source): item.exclude for item in declared}
        async with carry.trees(box, {ARTIFACTS: (), **places}) as luggage:
            yield luggage

    async def _grade(self, luggage: carry.Luggage, most: float) -> _Outcome:
        """Run the verifier on the files in a fresh sandbox."""
        try:
            options, workdir, env = await self._place()
            async with self._roomy(options, luggage) as box:
                trust, roots = self._trial.task.trust_system, entered(self._step.tests, workdir)
                given = await self._give(box)
                withheld = await carry.place(box, luggage, given, workdir, roots, env, trust)
                for tests in self._step.tests:
                    await box.upload(tests, TESTS)
                return await self._run(box, workdir, env, most, withheld)
        except AgentFault as error:  # over the sandbox's limits: by the tests, or by what they run
            return _Outcome(why=str(error))

    async def _give(self, box: SandboxClient) -> list[str]:
        """Put in what the steps so far came with, which is not the agent's; answers the paths."""
        trial, given = self._trial, list[str]()
        if self._step.verifier.separate:
            return given
        for step in trial.directory.steps[: trial.directory.steps.index(self._step) + 1]:
            if step.workdir is not None:
                await box.upload(step.workdir, trial.workdir)
                files = [file for file in step.workdir.rglob("*") if file.is_symlink() or not file.is_dir()]
                given += [f"{trial.workdir}/{file.relative_to(step.workdir)}" for file in files]
        return given

    @asynccontextmanager
    async def _roomy(self, options: dict[str, Any], luggage: carry.Luggage) -> AsyncIterator[SandboxClient]:
        """A fresh sandbox with room for the archive beside its files, as far as the node gives it."""
        limits, fresh = options["limits"], self._ctx.sandboxes.fresh
        box = None
        async with AsyncExitStack() as stack:
            if limits.disk_mb and luggage.bytes > ROOMY:
                more = replace(limits, disk_mb=limits.disk_mb + (2 * luggage.bytes >> 20))
                with suppress(SandboxRequestError):  # the bytes are the agent's, and must not end its sample
                    box = await stack.enter_async_context(fresh(self._ctx, **{**options, "limits": more}))
            yield box or await stack.enter_async_context(fresh(self._ctx, **options))

    async def _run(
        self, box: SandboxClient, workdir: str, env: dict[str, str], most: float, withheld: list[str]
    ) -> _Outcome:
        async with way_out(box, *self._trial.network(self._step.verifier)) as way:
            done = await box.exec(
                ["bash", f"{TESTS}/test.sh"],
                max(1.0, most),
                cwd=workdir,
                env={**env, **way},
                merge_output=True,
                max_output_chars=MAX_LOG_CHARS,
            )
        outcome = _Outcome(withheld=withheld, log=done.stdout, seconds=done.wall_s, timed_out=done.timed_out)
        try:
            if done.timed_out:
                raise NoReward(f"the verifier did not end within {most:.0f} s")
            if why := done.limit_exceeded or done.not_started:
                raise NoReward(why)
            outcome.rewards = await rewards.read(box)
            outcome.reward = rewards.choose(outcome.rewards, self._trial.task.reward_key)
        except NoReward as error:
            outcome.why = str(error)
        return outcome

    async def _place(self) -> tuple[dict[str, Any], str, dict[str, str]]:
        """Options of the sandbox, working directory and variables of the verifier."""
        trial, verifier = self._trial, self._step.verifier
        own = verifier.environment if verifier.separate else None
        dockerfile = trial.directory.tests_with_dockerfile(self._step)
        home = {"HOME": Places.home}
        if own is None and dockerfile is None:
            env = home | trial.environment(verifier.user, verifier.env)
            return trial.sandbox, trial.workdir, env
        environment = own or trial.directory.config.environment.model_copy(update={"docker_image": None})
        image = await image_of(environment, dockerfile or trial.directory.environment)
        env = home | trial.resolved(environment.env | verifier.env, "verifier.env")
        return trial.sandbox | {"image": image}, environment.workdir or trial.workdir, env

    def _left(self) -> float:
        return max(1.0, self._ends - time.monotonic())
