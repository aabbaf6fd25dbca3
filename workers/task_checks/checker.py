"""Checks tasks, several at once: the oracle, doing nothing, and what the agent could find."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rollout.schema import Blame, Rollout, RolloutRequest, Stage, State
from services.settings import Settings
from workers.errors import StageError
from workers.handlers.base import AgentHandler
from workers.task_checks.play import Played, has_oracle, play_nothing, play_oracle
from workers.task_checks.report import Report, TaskCheck, Verdict

CHEAP_S = 0.5
"""Doing nothing is tried once more where the first time took no longer."""
NAMES = ("name", "instance_id", "task_id", "id")
"""Fields of tasks that name them."""
LOGS = ("verifier.log", "test_log", "tests.txt")
"""Artifacts that say why a verifier was not content."""
MAX_LOG = 4000
ATTEMPTS = 2
"""A fault of the machine is no fault of the task."""
MARGIN = 1e-6
SYSTEM_REMEDY = (
    "it earns {:g} where what it changes of the system is trusted: set `trust_system: true` in the task"
)


@dataclass(frozen=True)
class Case:
    """A task of a set."""

    where: str
    request: RolloutRequest | None
    problem: str = ""
    """Why there is no request."""


class Checker:
    """Checks the tasks of one handler."""

    def __init__(
        self,
        handler: AgentHandler[Any],
        settings: Settings,
        *,
        jobs: int = 1,
        repeat: int = 2,
        thorough: bool = False,
    ) -> None:
        """Args:
        jobs: Tasks at once.
        repeat: How often the solution is played.
        thorough: See `leaks.search`.
        """
        self._handler, self._settings = handler, settings
        self._jobs, self._repeat, self._thorough = jobs, repeat, thorough

    async def check_all(
        self, cases: Iterator[Case], report: Report, done: Callable[[TaskCheck], None] = lambda _: None
    ) -> None:
        """Check cases into a report; cancelled, it has those that were done, and no sandbox is left."""
        began = time.monotonic()
        numbered = enumerate(cases)
        checks: dict[int, TaskCheck] = {}

        async def work() -> None:
            for number, case in numbered:
                checks[number] = await self.check(case)
                done(checks[number])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._jobs):
                    group.create_task(work())
        finally:
            report.tasks += [checks[number] for number in sorted(checks)]
            report.close(time.monotonic() - began)

    async def check(self, case: Case) -> TaskCheck:
        """What is found of one task."""
        began = time.monotonic()
        check = TaskCheck(name=_name(case), where=case.where)
        if case.request is None:
            check.blame(Verdict.BROKEN, case.problem)
        else:
            limits = case.request.limits.model_copy(update={"max_attempts": ATTEMPTS})
            own = {"handler": self._handler.name, "limits": limits}
            await self._check(check, case.request.model_copy(update=own))
        check.seconds["total"] = round(time.monotonic() - began, 3)
        return check

    async def _check(self, check: TaskCheck, request: RolloutRequest) -> None:
        try:
            task = self._handler.check_task(request.task)
        except StageError as error:
            check.blame(Verdict.BROKEN, f"it does not fit the schema: {error}")
            return
        stated = request.task.get("max_reward")
        if isinstance(stated, int | float) and stated > 0:
            check.best = float(stated)
        if not await self._solve(check, request, task):
            return
        first = await self._nothing(check, request, look=True)
        if first.seconds <= CHEAP_S and check.nop[0] is not None:
            await self._nothing(check, request, look=False)
        _judge_nothing(check)
        check.searched = first.searched
        for leak in first.searched.found if first.searched else ():
            if leak.fault:
                check.blame(Verdict.LEAKS, str(leak))
            else:
                check.notes.append(str(leak))
        if first.searched and not first.searched.complete:
            check.notes.append("the sandbox was looked through in part")

    async def _solve(self, check: TaskCheck, request: RolloutRequest, task: Any) -> bool:
        """Play the solution; False: there is no use in playing anything else."""
        if not has_oracle(self._handler):
            check.blame(Verdict.NOT_CHECKABLE, f"tasks of {self._handler.name} bring no solution")
            return True
        for _ in range(self._repeat):
            played = await play_oracle(self._handler, request, self._settings)
            rollout = played.rollout
            if played.no_oracle is not None:
                check.blame(Verdict.NOT_CHECKABLE, played.no_oracle)
                return True
            check.oracle.append(rollout.reward)
            spent = rollout.stage_seconds
            if len(check.oracle) == 1:
                names = {"init": "init", "oracle": "run", "verify": "eval"}
                check.seconds |= {name: round(spent.get(stage, 0.0), 3) for name, stage in names.items()}
            if rollout.reward is None:
                verdict = _of_failure(rollout, Verdict.ORACLE_FAILS)
                check.blame(verdict, _words(rollout))
                return verdict is not Verdict.BROKEN
            check.log = check.log or (_log(rollout) if rollout.reward < check.best - MARGIN else "")
        earned = [reward for reward in check.oracle if reward is not None]
        if max(earned) - min(earned) > MARGIN:
            check.blame(Verdict.FLAKY, f"the solution earned {', '.join(f'{x:g}' for x in earned)}")
        elif earned[0] < check.best - MARGIN:
            check.blame(Verdict.ORACLE_FAILS, f"the solution earns {earned[0]:g}, not {check.best:g}")
            await self._trusting(check, request, task)
        return True

    async def _trusting(self, check: TaskCheck, request: RolloutRequest, task: Any) -> None:
        """Whether the solution would earn more, had its changes of the system a part in what is verified."""
        if getattr(task, "trust_system", None) is not False:
            return
        trusting = request.model_copy(update={"task": {**request.task, "trust_system": True}})
        reward = (await play_oracle(self._handler, trusting, self._settings)).rollout.reward
        if reward is not None and reward >= check.best - MARGIN:
            check.notes.append(SYSTEM_REMEDY.format(reward))

    async def _nothing(self, check: TaskCheck, request: RolloutRequest, look: bool) -> Played:
        played = await play_nothing(
            self._handler, request, self._settings, look=look, thorough=self._thorough
        )
        check.nop.append(played.rollout.reward)
        if played.rollout.reward is None:
            verdict = _of_failure(played.rollout, Verdict.BROKEN)
            check.blame(verdict, f"doing nothing: {_words(played.rollout)}")
        return played


def _judge_nothing(check: TaskCheck) -> None:
    earned = [reward for reward in check.nop if reward is not None]
    if not earned:
        return
    if max(earned) - min(earned) > MARGIN:
        check.blame(Verdict.FLAKY, f"doing nothing earned {', '.join(f'{x:g}' for x in earned)}")
    if max(earned) >= check.best - MARGIN:
        check.blame(Verdict.NOP_EARNS, f"doing nothing earns {max(earned):g}")
    elif max(earned) > MARGIN:
        check.notes.append(f"doing nothing earns {max(earned):g}")


def _of_failure(rollout: Rollout, in_run: Verdict) -> Verdict:
    stage = rollout.error.stage if rollout.error else None
    return {Stage.RUN: in_run, Stage.EVAL: Verdict.NO_REWARD}.get(stage, Verdict.BROKEN)  # type: ignore[arg-type]


def _words(rollout: Rollout) -> str:
    error = rollout.error
    if error is None:
        return rollout.drop_reason or State(rollout.state).value
    whose = " (this machine's fault, not the task's)" if error.blame is Blame.INFRASTRUCTURE else ""
    return f"{error.type}{whose}: {error.message}"


def _log(rollout: Rollout) -> str:
    artifacts = rollout.trajectory.artifacts if rollout.trajectory else {}
    found = (text for name, text in artifacts.items() if text and name.partition("/")[0] in LOGS)
    return next(found, "")[-MAX_LOG:]


def _name(case: Case) -> str:
    task = case.request.task if case.request else {}
    return next((str(task[name]) for name in NAMES if isinstance(task.get(name), str | int)), case.where)
