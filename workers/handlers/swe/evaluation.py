"""EVAL of a patch: apply it in a fresh sandbox, put the specified tests in place, run and grade them."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from sandbox.client import BashResult, SandboxClient
from workers.errors import TaskError
from workers.handlers.base import Context
from workers.handlers.swe.recording import Outcomes, Recorder, without_forgeries, without_marks
from workers.handlers.swe.repository import GIT_ENV, prepare
from workers.handlers.swe.rows import Instance, files_of
from workers.handlers.swe.specs import END_MARK, R2E_PARSER, START_MARK, Spec
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
DRAIN_S = 2
"""Seconds that the output of a process the tests left behind is waited for."""

Status = Literal[
    "resolved",
    "unresolved",
    "empty_patch",
    "no_patch",
    "patch_not_applied",
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
    seconds: dict[str, float] = field(default_factory=dict)
    """`tests`: of the tests' own command; `total`: of all."""

    def share(self, kind: str) -> float:
        """Share of a kind of tests that passed; 0 when none was run."""
        if kind not in self.tests_status:
            return 0.0
        good, bad = (len(self.tests_status[kind][key]) for key in ("success", "failure"))
        return good / (good + bad) if good + bad else 1.0


async def judge(
    ctx: Context[Any], instance: Instance, spec: Spec, patch: str, sandbox: dict[str, Any]
) -> Judgement:
    """Run the specified tests on the patch and grade them.

    Args:
        sandbox: Options of `Sandboxes.fresh`.

    Raises:
        StageError: The task's data is at fault, or the sandbox or the grading failed. A patch never is: that
            it does not apply, or that its tests hang, is a judgement.
    """
    began = time.monotonic()
    if not patch.strip():
        return Judgement("empty_patch", detail="nothing was changed")
    async with ctx.sandboxes.fresh(ctx, **sandbox) as box:
        run = _Run(box, instance, spec, ctx.limits.eval_timeout_s, began)
        judgement = await run.judge(patch)
    judgement.seconds["total"] = time.monotonic() - began
    return judgement


class _Run:
    def __init__(
        self, box: SandboxClient, instance: Instance, spec: Spec, eval_timeout_s: float, began: float
    ) -> None:
        self._box, self._instance, self._spec = box, instance, spec
        self._work = f"/tmp/rollout-{secrets.token_hex(8)}"
        self._cd = f"cd {shlex.quote(spec.repo_dir)}"
        self._ends = began + eval_timeout_s - min(MARGIN_S, MARGIN_SHARE * eval_timeout_s)

    async def judge(self, patch: str) -> Judgement:
        base = await prepare(self._box, self._instance, self._spec)
        applied_with, said = await self._apply(patch)
        if applied_with is None:
            log = f"{NOT_APPLIED}:\n{without_marks(said)}\n"
            return Judgement("patch_not_applied", detail=said[-1000:], base_commit=base, log=log)
        recorder = Recorder(f"{self._work}/recorder") if self._spec.recorder else None
        result = await self._tests(recorder)
        judgement = await self._graded(patch, result, recorder)
        judgement.patch_applied, judgement.applied_with, judgement.base_commit = True, applied_with, base
        judgement.seconds["tests"] = result.duration_s
        return judgement

    async def _apply(self, patch: str) -> tuple[str | None, str]:
        """How the patch was applied (None: it does not apply), and what was said."""
        file = f"{self._work}/patch.diff"
        await self._box.write_file(file, patch)
        script = (
            f"({self._cd} && {GIT_ENV}\n"
            f"git apply --verbose --whitespace=nowarn {file} && exit 0\n"
            f"patch --batch --forward --fuzz=5 -p1 -i {file} && exit 10\nexit 1)"
        )
        result = await self._box.bash(script, timeout=GIT_S)
        return {0: "git apply", 10: "patch --fuzz=5"}.get(result.exit_code or 0), result.output

    async def _tests(self, recorder: Recorder | None) -> BashResult:
        spec, lines = self._spec, [self._cd, *self._spec.setup]
        if spec.install:
            await self._shell([*lines, *spec.install])
            if not spec.applies_test_patch:
                # What installing started, which may be code of the patch, must not see the tests come.
                await self._box.reset()
        if not spec.applies_test_patch:
            await self._place_tests()
        if recorder is not None:
            lines = [*lines, *await recorder.install(self._box)]
        if spec.install and spec.applies_test_patch:
            lines = lines[len(spec.setup) + 1 :]  # the script has set this shell up
        await self._shell([*lines, *spec.before_tests])
        # Through a pipe, because in the official harness tests are not on a terminal either. What they leave
        # behind may hold it open, so its end is not waited for without end.
        pipe = f"{self._work}/output"
        script = (
            f"(mkfifo {pipe}\ncat {pipe} & reader=$!\n"
            f"(\n{spec.test_script}\n) </dev/null >{pipe} 2>&1\n"
            f"code=$?\n(sleep {DRAIN_S}; kill $reader) >/dev/null 2>&1 & killer=$!\n"
            "wait $reader; kill $killer; exit $code)"
        )
        left = max(1.0, self._ends - time.monotonic())
        return await self._box.bash(
            script, timeout=min(left, spec.test_timeout_s or left), max_output_chars=MAX_LOG_CHARS
        )

    async def _shell(self, lines: list[str]) -> None:
        """Lines in the shell that runs the tests. What fails in them shows in the tests, as officially."""
        left = max(1.0, self._ends - time.monotonic())
        await self._box.bash("\n".join(lines), timeout=left)

    async def _place_tests(self) -> None:
        """The specified tests as the test patch has them, whatever was there.

        Raises:
            TaskError: The test patch does not apply to the base commit.
        """
        instance = self._instance
        for name, text in instance.hidden_tests.items():
            await self._box.write_file(f"{self._spec.repo_dir}/r2e_tests/{name}", text)
        if not instance.test_patch.strip():
            return
        file = f"{self._work}/tests.diff"
        await self._box.write_file(file, instance.test_patch)
        names = " ".join(map(shlex.quote, files_of(instance.test_patch)))
        script = (
            f"({self._cd} && {GIT_ENV}\nfor name in {names}; do\n"
            'git checkout -q HEAD -- "$name" 2>/dev/null || rm -rf -- "$name"; done\n'
            f"git apply --whitespace=nowarn {file})"
        )
        result = await self._box.bash(script, timeout=GIT_S)
        if result.exit_code != 0:
            said = result.output[-1000:]
            raise TaskError(f"{instance.instance_id}: test_patch does not apply to the base commit: {said}")

    async def _graded(self, patch: str, result: BashResult, recorder: Recorder | None) -> Judgement:
        output = without_marks(result.output)
        trouble = self._overrun(result)
        if trouble is None and recorder is not None:
            outcomes = await recorder.outcomes(self._box)
            trouble = await self._distrust(recorder, outcomes)
            if outcomes is not None:
                output = await asyncio.to_thread(without_forgeries, output, outcomes.statuses)
        log = f"{APPLIED}\n{START_MARK}\n{output}\n{END_MARK}\n{EXIT_CODE}: {result.exit_code}\n"
        if trouble is not None:
            status, detail = trouble
            # In words that the official grading, too, takes for no result.
            mark = TESTS_TIMEOUT if status == "tests_timed_out" else TESTS_ERROR
            return Judgement(status, detail=detail, log=f"{log}{mark}: {detail}\n")
        report = await self._report(patch, output, log)
        if report is None:
            detail = "the output of the tests could not be read in time, though another could"
            return Judgement("tests_not_finished", detail=detail, log=f"{log}{TESTS_ERROR}: {detail}\n")
        if not report["graded"]:
            detail = "no result of any test was found in the output"
            return Judgement("tests_not_finished", detail=detail, log=log)
        status = "resolved" if report["resolved"] else "unresolved"
        return Judgement(status, report["resolved"], tests_status=report["tests_status"], log=log)

    def _overrun(self, result: BashResult) -> tuple[Status, str] | None:
        if result.timed_out:
            return "tests_timed_out", f"the tests did not end within {result.duration_s:.0f} s"
        if result.limit_exceeded:
            return "tests_not_finished", result.limit_exceeded
        return None

    async def _distrust(self, recorder: Recorder, outcomes: Outcomes | None) -> tuple[Status, str] | None:
        """Why the output is not believed."""
        if outcomes is not None and outcomes.changed:
            return (
                "results_forged",
                "a test that fails was reported as passed: code under test changed pytest",
            )
        if outcomes is not None:
            return None
        if await recorder.was_loaded(self._box):
            return "tests_not_finished", "the process of the tests ended before pytest did"
        why = "pytest did not start; where it cannot load a plug-in, set spec.recorder to false"
        return "tests_not_finished", why

    async def _report(self, patch: str, output: str, log: str) -> dict[str, Any] | None:
        """What grading says; None when what the tests printed keeps it from saying anything."""
        instance, spec = self._instance, self._spec
        if spec.log_parser == R2E_PARSER:
            grader = "workers.scoring.swe_tests:grade_expected"
            expected = {"log": output, "expected": instance.expected}
            return await score_or_blame(grader, expected, known=expected | {"log": ""}, timeout_s=GRADE_S)
        payload = {
            "instance_id": instance.instance_id,
            "repo": instance.repo,
            "version": instance.version,
            "fail_to_pass": instance.fail_to_pass,
            "pass_to_pass": instance.pass_to_pass,
            "log_parser": spec.log_parser,
            "eval_type": spec.eval_type,
            "patch": patch,
            "log": log,
        }
        empty = payload | {"log": f"{START_MARK}\n{END_MARK}\n"}
        return await score_or_blame(
            "workers.scoring.swe_tests:grade", payload, known=empty, timeout_s=GRADE_S
        )
