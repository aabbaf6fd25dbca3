"""EVAL of a patch: apply it in a fresh sandbox, put the specified tests in place, run and grade them."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sandbox.client import ExecResult, SandboxClient
from workers.errors import TaskError
from workers.handlers.base import Context
from workers.handlers.swe import plain_git
from workers.handlers.swe.falsifying import Falsified, falsify
from workers.handlers.swe.placing import NotPlaced, Specified, place, take_specified
from workers.handlers.swe.recording import Recorder, believed, without_marks
from workers.handlers.swe.repository import prepare
from workers.handlers.swe.rows import Instance
from workers.handlers.swe.specs import END_MARK, R2E_PARSER, START_MARK, Spec, unittest_runner
from workers.handlers.swe.suspicion import suspicions
from workers.scoring import score_or_blame

APPLIED = ">>>>> Applied Patch"
NOT_APPLIED = ">>>>> Patch Apply Failed"
TESTS_ERROR = ">>>>> Tests Errored"
TESTS_TIMEOUT = ">>>>> Tests Timed Out"
EXIT_CODE = ">>>>> Test Exit Code"
"""Words of the official harness, which its grading looks for."""

GIT_S = 300.0
GRADE_S = 60.0
MAX_LOG_CHARS = 8_000_000
"""The tests' output is cut in its middle beyond this, and tests named there count as not run."""
MARGIN_S = 30.0
MARGIN_SHARE = 0.2
"""So much of `eval_timeout_s` is kept for all but the tests, but no more than this share."""
NO_INDEX = "export PIP_RETRIES=0"
"""There is no network: what an installation asks of an index fails at once, as it would after ten seconds."""
MAX_NAMED = 5
"""So many tests are named in a sentence."""
CHANGED = "a test that fails was reported as passed: code under test changed what reports"
ENDED_EARLY = "the process of the tests ended before they did"
NOT_STARTED = "the tests did not start; where pytest cannot load a plug-in, set spec.recorder to false"

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
    skipped: list[str] = field(default_factory=list)
    """Specified tests that were skipped, which the official report takes for no failure of `PASS_TO_PASS`."""
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
        """The share of a kind of tests that passed; None where that was not measured."""
        if kind not in self.tests_status:
            return None
        good, bad = (len(self.tests_status[kind][key]) for key in ("success", "failure"))
        return good / (good + bad) if good + bad else None

    def fail(self, status: Status, detail: str) -> Judgement:
        """Take this for no result, in words that the official grading, too, takes for none."""
        mark = TESTS_TIMEOUT if status == "tests_timed_out" else TESTS_ERROR
        self.status, self.resolved, self.detail, self.tests_status = status, False, detail, {}
        self.log += f"{mark}: {detail}\n"
        return self


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
    limit = ctx.limits.eval_timeout_s
    ends = began + limit - min(MARGIN_S, MARGIN_SHARE * limit)

    @asynccontextmanager
    async def fresh_run() -> AsyncIterator[_Run]:
        async with ctx.sandboxes.fresh(ctx, **sandbox) as box:
            yield _Run(box, instance, spec, ends)

    async with fresh_run() as run:
        judgement = await run.judge(patch)
    if judgement.resolved:
        await _control(fresh_run, instance, patch, run.specified, judgement)
    judgement.suspicious += suspicions(patch, spec.test_files)
    judgement.seconds["total"] = time.monotonic() - began
    return judgement


async def _control(
    fresh_run: FreshRun, instance: Instance, patch: str, specified: Specified, judgement: Judgement
) -> None:
    """Run the tests once more, changed so that each must fail. One that passes was never judged."""
    names = instance.must_pass
    falsified = falsify(specified.files, names[: len(instance.fail_to_pass) or None], names)
    if not falsified.must_fail:
        judgement.suspicious.append("not controlled: none of the tests could be made to fail")
        return
    began = time.monotonic()
    async with fresh_run() as run:
        told = await run.passing(patch, falsified)
    passed, skipped = told or (set(), set(judgement.skipped))
    if passed:
        # Tests may be such that they cannot fail, whatever the code: those pass without the patch as well.
        async with fresh_run() as run:
            passed -= (await run.passing(None, falsified) or (set(),))[0]
    judgement.seconds["control"] = time.monotonic() - began
    judgement.control = {"must_fail": len(falsified.must_fail), "passed": sorted(passed)}
    # A test that skips itself does so whatever its assertions are.
    dodged = set(judgement.skipped) & set(falsified.must_fail) - skipped
    if told is None:
        judgement.suspicious.append("the run whose tests must fail told nothing of any test")
    elif passed:
        judgement.fail("results_forged", f"{_some(passed)} made to fail and passed")
    elif dodged:
        judgement.fail("results_forged", f"{_some(dodged)} skipped by code under test")


def _some(tests: set[str]) -> str:
    more = f" and {len(tests) - MAX_NAMED} more" if len(tests) > MAX_NAMED else ""
    return f"{len(tests)} tests ({', '.join(sorted(tests)[:MAX_NAMED])}{more}) were"


@dataclass(frozen=True)
class _Account:
    """The account that one run of the tests gives."""

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
        """Apply the patch, run the specified tests and grade them."""
        base = await self._prepare()
        applied_with, words = await self._apply(patch)
        if applied_with is None:
            log = f"{NOT_APPLIED}:\n{without_marks(words)}\n"
            return Judgement("patch_not_applied", detail=words[-1000:], base_commit=base, log=log)
        judgement = Judgement(
            "tests_not_finished",
            patch_applied=True,
            applied_with=applied_with,
            base_commit=base,
            log=f"{APPLIED}\n",
            seconds={"tests": 0.0},
        )
        try:
            account = await self._tests()
        except NotPlaced as error:
            detail = f"the tests cannot be put on top of the patch: {error}"
            return judgement.fail("tests_not_placed", detail)
        judgement.log, judgement.suspicious = account.log, account.suspicious
        judgement.seconds["tests"] = account.seconds
        if account.trouble is not None:
            return judgement.fail(*account.trouble)
        report = await self._report(patch, account)
        if report is None:
            detail = "the output of the tests could not be read in time, though another could"
            return judgement.fail("tests_not_finished", detail)
        if not report["graded"]:
            judgement.detail = "no result of any test was found in the output"
            return judgement
        judgement.resolved, judgement.tests_status = report["resolved"], report["tests_status"]
        judgement.skipped = report["skipped"]
        judgement.status = "resolved" if judgement.resolved else "unresolved"
        return judgement

    async def passing(self, patch: str | None, falsified: Falsified) -> tuple[set[str], set[str]] | None:
        """Run the tests that must fail; answers which are said to pass and to be skipped.

        None = nothing is said of any.

        Args:
            patch: None = the base commit alone.
        """
        await self._prepare()
        if patch is not None:
            await self._apply(patch)
        try:
            account = await self._tests(falsified)
        except NotPlaced:
            return None
        if account.trouble is not None:
            return None
        report = await self._report(patch or "", account, falsified.must_fail)
        if report is None or not report["graded"]:
            return None
        status = report["tests_status"]
        passed = status["matching"] if "matching" in status else status["FAIL_TO_PASS"]["success"]
        return set(passed), set(report["skipped"])

    async def _prepare(self) -> str:
        base = await prepare(self._box, self._instance, self._spec)
        self.specified = await take_specified(self._box, self._instance, self._spec, self._work)
        self._home = (await self._box.bash('printf %s "$HOME"')).output or "/"
        return base

    async def _apply(self, patch: str) -> tuple[str | None, str]:
        """Apply the patch; answers how (None: it does not apply), and the words of git."""
        file, repo = f"{self._work}/patch.diff", self._spec.repo_dir
        await self._box.write_file(file, patch)
        script = (
            f"({plain_git.make(self._work)} && {plain_git.use(self._work, repo)} || exit 2\n"
            f"{plain_git.GIT} apply --verbose --whitespace=nowarn {file} && exit 0\n"
            f"patch --batch --forward --fuzz=5 -p1 -i {file} && exit 10\nexit 1)"
        )
        result = await self._box.bash(script, timeout=GIT_S)
        return {0: "git apply", 10: "patch --fuzz=5"}.get(result.exit_code or 0), result.output

    async def _tests(self, falsified: Falsified | None = None) -> _Account:
        """Put the tests in place, whatever else brought tests here, and run them; NotPlaced if that fails."""
        spec, lines = self._spec, [f"cd {shlex.quote(self._spec.repo_dir)}", *self._spec.setup]
        if spec.install:
            state = f"{self._work}/state"
            keep = f'{{ declare -px; echo cd "$(printf %q "$PWD")"; }} > {state}'
            await self._run("install", [*lines, NO_INDEX, *spec.install, keep], None)
            if spec.one_script:
                lines = [f". {state}"]
        # Only now: code of the patch may have run before.
        await place(self._box, spec, self.specified)
        for path, source in falsified.sources.items() if falsified else ():
            await self._box.write_file(f"{spec.repo_dir}/{path}", source)
        recorder = Recorder(f"{self._work}/recorder") if spec.recorder else None
        if recorder is not None:
            lines += await recorder.install(self._box, unittest_runner(spec.test_script))
        result = await self._run("tests", [*lines, *spec.before_tests], spec.test_script, spec.test_timeout_s)
        if result.not_started and not spec.install:
            raise TaskError(f"{self._instance.instance_id}: the tests cannot be run: {result.not_started}")
        return await self._account(result, recorder)

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
        remaining_s = max(1.0, self._ends - time.monotonic())
        return await self._box.exec(
            ["bash", file],
            min(remaining_s, most_s or remaining_s),
            env={"HOME": self._home},
            merge_output=True,
            max_output_chars=MAX_LOG_CHARS,
        )

    async def _account(self, result: ExecResult, recorder: Recorder | None) -> _Account:
        trouble: tuple[Status, str] | None = None
        outcomes = None
        if result.timed_out:
            trouble = "tests_timed_out", f"the tests did not end within {result.wall_s:.0f} s"
        elif result.limit_exceeded or result.not_started:
            trouble = "tests_not_finished", result.limit_exceeded or result.not_started or ""
        elif recorder is not None:
            outcomes = await recorder.outcomes(self._box)
            if outcomes is None:
                loaded = await recorder.was_loaded(self._box)
                trouble = "tests_not_finished", ENDED_EARLY if loaded else NOT_STARTED
            elif outcomes.changed:
                trouble = "results_forged", CHANGED
        expects_failure = self.specified.files.expects_failure
        output = await asyncio.to_thread(believed, result.stdout, outcomes, expects_failure)
        code = result.exit_code if result.exit_code is not None else 128 + (result.signal or 0)
        log = f"{APPLIED}\n{START_MARK}\n{output}\n{END_MARK}\n{EXIT_CODE}: {code}\n"
        return _Account(output, log, outcomes.suspicious if outcomes else [], trouble, result.wall_s)

    async def _report(
        self, patch: str, account: _Account, names: Sequence[str] | None = None
    ) -> dict[str, Any] | None:
        """Grade the account; None when what the tests printed keeps it from being graded.

        Args:
            names: Tests to ask for instead of those of the instance: whether they pass.
        """
        instance, spec = self._instance, self._spec
        if spec.log_parser == R2E_PARSER:
            grader, empty_log = "workers.scoring.swe_tests:grade_expected", ""
            expected = instance.expected if names is None else dict.fromkeys(names, "PASSED")
            payload: dict[str, Any] = {"log": account.output, "expected": expected}
        else:
            grader, empty_log = "workers.scoring.swe_tests:grade", f"{START_MARK}\n{END_MARK}\n"
            payload = {
                "instance_id": instance.instance_id,
                "repo": instance.repo,
                "version": instance.version,
                "fail_to_pass": instance.fail_to_pass if names is None else list(names),
                "pass_to_pass": instance.pass_to_pass if names is None else [],
                "log_parser": spec.log_parser,
                "eval_type": spec.eval_type if names is None else "pass_and_fail",
                "patch": patch,
                "log": account.log,
            }
        return await score_or_blame(grader, payload, known=payload | {"log": empty_log}, timeout_s=GRADE_S)


FreshRun: TypeAlias = Callable[[], AbstractAsyncContextManager[_Run]]
