"""EVAL of a patch: apply it in a fresh sandbox, put the specified tests in place, run and grade them."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sandbox.client import ExecResult, SandboxClient
from workers.errors import TaskError
from workers.handlers.base import Context
from workers.handlers.swe import plain_git
from workers.handlers.swe.falsifying import Falsified, falsify
from workers.handlers.swe.placing import NotPlaced, Specified, place, take_specified
from workers.handlers.swe.recording import (
    Recorder,
    without_forgeries,
    without_marks,
    without_unmarked_failures,
)
from workers.handlers.swe.repository import prepare
from workers.handlers.swe.rows import Instance
from workers.handlers.swe.specs import END_MARK, R2E_PARSER, START_MARK, Spec
from workers.handlers.swe.suspicion import suspicions
from workers.scoring import score_or_blame

APPLIED = ">>>>> Applied Patch"
NOT_APPLIED = ">>>>> Patch Apply Failed"
TESTS_ERROR = ">>>>> Tests Errored"
TESTS_TIMEOUT = ">>>>> Tests Timed Out"
EXIT_CODE = ">>>>> Test Exit Code"
"""The official harness's words, which its grading looks for."""

GIT_S = 300.0
GRADE_S = 60.0
MAX_LOG_CHARS = 8_000_000
"""Of the tests' output; beyond it the middle is cut, and tests named there count as not run."""
MARGIN_S = 30.0
MARGIN_SHARE = 0.2
"""What is kept of `eval_timeout_s` for all but the tests: so much, but no more than this share."""
MAX_NAMED = 5
"""Names of tests in a sentence."""

Status = Literal[
    "resolved",
    "unresolved",
    "empty_patch",
    "no_patch",
    "patch_not_applied",
    "tests_not_placed",
    "tests_timed_out",
    "tests_not_finished",
    "results_forged",
]


@dataclass
class Judgement:
    """What came of a patch."""

    status: Status
    resolved: bool = False
    patch_applied: bool = False
    applied_with: str | None = None
    detail: str = ""
    """What went wrong, in words."""
    tests_status: dict[str, Any] = field(default_factory=dict)
    """The official report's: `FAIL_TO_PASS` and `PASS_TO_PASS`, each with `success` and `failure`."""
    base_commit: str = ""
    log: str = ""
    """What was graded."""
    suspicious: list[str] = field(default_factory=list)
    """What an honest patch would hardly do, in words. It changes no reward."""
    control: dict[str, Any] | None = None
    """Of the run whose tests must fail: `must_fail` (how many), `passed` (which did). None = not run."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`tests`: of the tests' own command; `control`: of the run whose tests must fail; `total`: of all."""

    def share(self, kind: str) -> float | None:
        """Share of a kind of tests that passed; None where that was not measured."""
        if kind not in self.tests_status:
            return None
        good, bad = (len(self.tests_status[kind][key]) for key in ("success", "failure"))
        return good / (good + bad) if good + bad else None


async def judge(
    ctx: Context[Any], instance: Instance, spec: Spec, patch: str, sandbox: dict[str, Any]
) -> Judgement:
    """Run the specified tests on the patch and grade them; if it resolves, see whether they can fail.

    Args:
        sandbox: Options of `Sandboxes.fresh`.

    Raises:
        StageError: The task's data is at fault, or the sandbox or the grading failed. A patch never is: that
            it does not apply, or that its tests hang, is a judgement.
    """
    began = time.monotonic()
    if not patch.strip():
        return Judgement("empty_patch", detail="nothing was changed")
    ends = began + ctx.limits.eval_timeout_s - min(MARGIN_S, MARGIN_SHARE * ctx.limits.eval_timeout_s)
    async with ctx.sandboxes.fresh(ctx, **sandbox) as box:
        run = _Run(box, instance, spec, ends)
        judgement = await run.judge(patch)
    if judgement.resolved:
        await _control(ctx, instance, spec, patch, sandbox, ends, run.specified, judgement)
    judgement.suspicious += suspicions(patch, spec.test_files)
    judgement.seconds["total"] = time.monotonic() - began
    return judgement


async def _control(
    ctx: Context[Any],
    instance: Instance,
    spec: Spec,
    patch: str,
    sandbox: dict[str, Any],
    ends: float,
    specified: Specified,
    judgement: Judgement,
) -> None:
    """Run the tests once more, changed so that each must fail. One that passes was never judged."""
    names = _names(instance)
    falsified = falsify(specified.files, names[: len(instance.fail_to_pass) or None], names)
    if not falsified.must_fail:
        judgement.suspicious.append("not controlled: none of the tests could be made to fail")
        return
    began = time.monotonic()

    async def passing(patch: str | None) -> set[str] | None:
        async with ctx.sandboxes.fresh(ctx, **sandbox) as box:
            return await _Run(box, instance, spec, ends).passing(patch, falsified)

    passed = await passing(patch)
    if passed:
        # Tests may be such that they cannot fail, whatever the code: those pass without the patch as well.
        passed -= await passing(None) or set()
    judgement.seconds["control"] = time.monotonic() - began
    judgement.control = {"must_fail": len(falsified.must_fail), "passed": sorted(passed or ())}
    if passed is None:
        judgement.suspicious.append("the run whose tests must fail told nothing of any test")
    elif passed:
        _refuse(judgement, f"{len(passed)} tests passed though they were made to fail: {_listed(passed)}")


def _refuse(judgement: Judgement, detail: str) -> None:
    judgement.status, judgement.resolved, judgement.detail = "results_forged", False, detail
    judgement.tests_status = {}
    # In words that the official grading, too, takes for no result.
    judgement.log += f"{TESTS_ERROR}: {detail}\n"


def _names(instance: Instance) -> list[str]:
    """Of the tests that must pass, those that the fix is for first."""
    if instance.expected is not None:
        return [name for name, status in instance.expected.items() if status == "PASSED"]
    return [*instance.fail_to_pass, *instance.pass_to_pass]


def _listed(names: set[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(sorted(names)[:MAX_NAMED]) + more


CHANGED = "a test that fails was reported as passed: code under test changed pytest"
ENDED_EARLY = "the process of the tests ended before pytest did"
NOT_STARTED = "pytest did not start; where it cannot load a plug-in, set spec.recorder to false"


@dataclass(frozen=True)
class _Told:
    """What one run of the tests told."""

    output: str
    """As far as it is believed."""
    log: str
    """The same between the official marks."""
    suspicious: list[str]
    trouble: tuple[Status, str] | None
    """Why nothing of it is believed."""
    seconds: float


class _Run:
    """One run of the specified tests in a fresh sandbox."""

    specified: Specified

    def __init__(self, box: SandboxClient, instance: Instance, spec: Spec, ends: float) -> None:
        self._box, self._instance, self._spec, self._ends = box, instance, spec, ends
        self._work = f"/tmp/rollout-{secrets.token_hex(8)}"
        self._home = "/"

    async def judge(self, patch: str) -> Judgement:
        """What the specified tests say of the patch."""
        base = await self._prepare()
        applied_with, said = await self._apply(patch)
        if applied_with is None:
            log = f"{NOT_APPLIED}:\n{without_marks(said)}\n"
            return Judgement("patch_not_applied", detail=said[-1000:], base_commit=base, log=log)
        try:
            told = await self._tests()
        except NotPlaced as error:
            detail = f"the tests cannot be put on top of the patch: {error}"
            judgement = _unfinished("tests_not_placed", detail)
        else:
            judgement = await self._graded(patch, told)
            judgement.seconds["tests"] = told.seconds
        judgement.patch_applied, judgement.applied_with, judgement.base_commit = True, applied_with, base
        judgement.seconds.setdefault("tests", 0.0)
        return judgement

    async def passing(self, patch: str | None, falsified: Falsified) -> set[str] | None:
        """Which of the tests that must fail are said to pass; None when nothing is said of any.

        Args:
            patch: None = the base commit alone.
        """
        await self._prepare()
        if patch is not None:
            await self._apply(patch)
        try:
            told = await self._tests(falsified)
        except NotPlaced:
            return None
        if told.trouble is not None:
            return None
        report = await self._report(patch or "", told, falsified.must_fail)
        if report is None or not report["graded"]:
            return None
        status = report["tests_status"]
        return set(status["matching"] if "matching" in status else status["FAIL_TO_PASS"]["success"])

    async def _prepare(self) -> str:
        base = await prepare(self._box, self._instance, self._spec)
        self.specified = await take_specified(self._box, self._instance, self._spec, self._work)
        self._home = (await self._box.bash('printf %s "$HOME"')).output or "/"
        return base

    async def _apply(self, patch: str) -> tuple[str | None, str]:
        """How the patch was applied (None: it does not apply), and what was said."""
        file, repo = f"{self._work}/patch.diff", self._spec.repo_dir
        await self._box.write_file(file, patch)
        script = (
            f"({plain_git.make(self._work)} && {plain_git.use(self._work, repo)} || exit 2\n"
            f"{plain_git.GIT} apply --verbose --whitespace=nowarn {file} && exit 0\n"
            f"patch --batch --forward --fuzz=5 -p1 -i {file} && exit 10\nexit 1)"
        )
        result = await self._box.bash(script, timeout=GIT_S)
        return {0: "git apply", 10: "patch --fuzz=5"}.get(result.exit_code or 0), result.output

    async def _tests(self, falsified: Falsified | None = None) -> _Told:
        """Put the tests in place, whatever else brought tests here, and run them.

        Raises:
            NotPlaced: They cannot be put there.
        """
        spec, lines = self._spec, [f"cd {shlex.quote(self._spec.repo_dir)}", *self._spec.setup]
        if spec.install:
            state = f"{self._work}/state"
            keep = f'{{ declare -px; echo cd "$(printf %q "$PWD")"; }} > {state}'
            await self._run("install", [*lines, *spec.install, keep], None)
            if spec.applies_test_patch:
                lines = [f". {state}"]  # the script has set this environment up
        # Only now: code of the patch may have run before.
        await place(self._box, spec, self.specified)
        for path, source in falsified.sources.items() if falsified else ():
            await self._box.write_file(f"{spec.repo_dir}/{path}", source)
        recorder = Recorder(f"{self._work}/recorder") if spec.recorder else None
        if recorder is not None:
            lines += await recorder.install(self._box)
        result = await self._run("tests", [*lines, *spec.before_tests], spec.test_script, spec.test_timeout_s)
        if result.not_started and not spec.install:
            raise TaskError(f"{self._instance.instance_id}: the tests cannot be run: {result.not_started}")
        return await self._told(result, recorder)

    async def _run(
        self, name: str, lines: Sequence[str], script: str | None, most_s: float | None = None
    ) -> ExecResult:
        """Run lines in silence, and then a script whose output and exit code are told, alone in the sandbox.

        What fails in the lines shows in the tests, as officially.
        """
        text = "\n".join(
            ["exec 3>&1 4>&2 >/dev/null 2>&1", *lines, "exec 1>&3 2>&4 3>&- 4>&-", script or "", ""]
        )
        file = f"{self._work}/{name}.sh"
        await self._box.write_file(file, text)
        left = max(1.0, self._ends - time.monotonic())
        return await self._box.exec(
            ["bash", file],
            min(left, most_s or left),
            env={"HOME": self._home},
            merge_output=True,
            max_output_chars=MAX_LOG_CHARS,
        )

    async def _told(self, result: ExecResult, recorder: Recorder | None) -> _Told:
        """What the tests told, as far as it is believed."""
        trouble: tuple[Status, str] | None = None
        suspicious: list[str] = []
        output = without_marks(result.stdout)
        if result.timed_out:
            trouble = "tests_timed_out", f"the tests did not end within {result.wall_s:.0f} s"
        elif result.limit_exceeded or result.not_started:
            trouble = "tests_not_finished", result.limit_exceeded or result.not_started or ""
        elif recorder is not None:
            outcomes = await recorder.outcomes(self._box)
            if outcomes is None:
                loaded = await recorder.was_loaded(self._box)
                trouble = "tests_not_finished", ENDED_EARLY if loaded else NOT_STARTED
            else:
                suspicious = outcomes.suspicious
                if outcomes.changed:
                    trouble = "results_forged", CHANGED
                output = await asyncio.to_thread(without_forgeries, output, outcomes.statuses)
        expected = self.specified.files.expects_failure
        output = await asyncio.to_thread(without_unmarked_failures, output, expected)
        return _Told(output, _log(output, result), suspicious, trouble, result.wall_s)

    async def _graded(self, patch: str, told: _Told) -> Judgement:
        if told.trouble is not None:
            return _unfinished(*told.trouble, told.log, told.suspicious)
        report = await self._report(patch, told)
        if report is None:
            detail = "the output of the tests could not be read in time, though another could"
            return _unfinished("tests_not_finished", detail, told.log, told.suspicious)
        judgement = Judgement("tests_not_finished", log=told.log, suspicious=list(told.suspicious))
        if not report["graded"]:
            judgement.detail = "no result of any test was found in the output"
            return judgement
        judgement.resolved, judgement.tests_status = report["resolved"], report["tests_status"]
        judgement.status = "resolved" if judgement.resolved else "unresolved"
        return judgement

    async def _report(
        self, patch: str, told: _Told, passing: Sequence[str] | None = None
    ) -> dict[str, Any] | None:
        """What grading says; None when what the tests printed keeps it from saying anything.

        Args:
            passing: Tests to ask for instead of those of the instance: whether they pass.
        """
        instance, spec = self._instance, self._spec
        if spec.log_parser == R2E_PARSER:
            grader = "workers.scoring.swe_tests:grade_expected"
            wanted = instance.expected if passing is None else dict.fromkeys(passing, "PASSED")
            expected = {"log": told.output, "expected": wanted}
            return await score_or_blame(grader, expected, known=expected | {"log": ""}, timeout_s=GRADE_S)
        payload = {
            "instance_id": instance.instance_id,
            "repo": instance.repo,
            "version": instance.version,
            "fail_to_pass": instance.fail_to_pass if passing is None else list(passing),
            "pass_to_pass": instance.pass_to_pass if passing is None else [],
            "log_parser": spec.log_parser,
            "eval_type": spec.eval_type if passing is None else "pass_and_fail",
            "patch": patch,
            "log": told.log,
        }
        empty = payload | {"log": f"{START_MARK}\n{END_MARK}\n"}
        return await score_or_blame(
            "workers.scoring.swe_tests:grade", payload, known=empty, timeout_s=GRADE_S
        )


def _log(output: str, result: ExecResult) -> str:
    code = result.exit_code if result.exit_code is not None else 128 + (result.signal or 0)
    return f"{APPLIED}\n{START_MARK}\n{output}\n{END_MARK}\n{EXIT_CODE}: {code}\n"


def _unfinished(
    status: Status, detail: str, log: str = f"{APPLIED}\n", suspicious: Sequence[str] = ()
) -> Judgement:
    # In words that the official grading, too, takes for no result.
    mark = TESTS_TIMEOUT if status == "tests_timed_out" else TESTS_ERROR
    return Judgement(status, detail=detail, log=f"{log}{mark}: {detail}\n", suspicious=list(suspicious))
