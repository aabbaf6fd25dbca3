"""Rewards of `swe` for what is no fix. Each cheat is a script in `reward/`, written as its author would.

`NAME.py` is what the agent adds to the code under test, `NAME.sh` what it does in its sandbox. The control is
the naive way: the agent's own sandbox, plain pytest (or the repository's runner), and a parser of its output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec
from tests.attacks import attack
from tests.helpers import swe_toy
from tests.helpers.sandboxes import leftovers, require_apptainer
from tests.helpers.swe_agents import Result, roll_many
from tests.helpers.swe_instances import private_state
from workers.scoring.swe_tests import grade

HERE = Path(__file__).parent / "reward"
PATIENCE_S = 120.0
ROWS = {
    "unittest_asserts_stubbed": swe_toy.unittest_instance,
    "unittest_run_stubbed": swe_toy.unittest_instance,
    "unittest_lines": swe_toy.django_instance,
    "plain_lines": swe_toy.sympy_instance,
    "caller_locals": swe_toy.cases_instance,
}
"""Instance that a cheat is for; else `swe_toy.instance`."""
CONTROL_RUN = "a second run whose tests must fail"
APART = "the patch leaves out what configures tests"


def row_of(name: str) -> dict[str, Any]:
    """The instance of a cheat."""
    return ROWS.get(name, swe_toy.instance)()


def script_of(name: str) -> str:
    """What the agent types for a cheat."""
    path = HERE / f"{name}.sh"
    if path.exists():
        return path.read_text()
    code = (HERE / f"{name}.py").read_text()
    if "cheat_" in code:
        code = (HERE / "names.py").read_text() + code
    return f"cat >> calc.py <<'EOF_CHEAT'\n\n\n{code}\nEOF_CHEAT"


@dataclass
class RewardTarget:
    """Where a cheat is tried: the service, or the naive way."""

    place: str
    control: bool
    host: HostClient

    def cheated(self, name: str, places_tests: bool = True) -> bool:
        """Whether a cheat is taken for a fix."""
        if self.control:
            return asyncio.run(self._naive(script_of(name), row_of(name), places_tests))
        result = self.roll(name)
        assert result.reward is not None, result.rollout.error
        return result.reward == 1.0

    def roll(self, name: str) -> Result:
        """A rollout of an agent that does what the script says."""
        return asyncio.run(roll_many([(row_of(name), [script_of(name)])]))[0]

    async def _naive(self, script: str, row: dict[str, Any], places_tests: bool) -> bool:
        async with self.sandbox(row) as box:
            await box.bash(
                "git checkout -q -f main && git reset -q --soft base && git checkout -q base -- . && "
                "git checkout -q -f -B main base"
            )
            await box.bash(script, PATIENCE_S)
            await box.write_file("/tmp/tests.diff", row["test_patch"])
            if places_tests:
                await box.bash("git checkout -q base -- tests && git apply /tmp/tests.diff")
            command = row["spec"]["test_cmd"].replace("{files}", "") + " tests/test_calc.py"
            result = await box.bash(f"({command}) </dev/null 2>&1 | cat", PATIENCE_S, max_output_chars=10**6)
        log = f">>>>> Start Test Output\n{result.output}\n>>>>> End Test Output\n"
        payload = {"log": log, "log_parser": row["spec"]["log_parser"], "patch": "x"}
        payload |= {"fail_to_pass": json.loads(row["FAIL_TO_PASS"]), "eval_type": "pass_and_fail"}
        payload |= {"pass_to_pass": json.loads(row["PASS_TO_PASS"]), "version": "1"}
        return grade(payload | {"instance_id": row["instance_id"], "repo": row["repo"]})["resolved"]

    @contextlib.asynccontextmanager
    async def sandbox(self, row: dict[str, Any]) -> Any:
        """One whose shell stands in the repository."""
        info = await self.host.start(SandboxSpec(image=row["image"], owner="naive"))
        box = SandboxClient(info.socket)
        try:
            lines = [f"cd {shlex.quote(row['spec']['repo_dir'])}", *row["spec"]["setup"]]
            await box.bash("\n".join(lines))
            yield box
        finally:
            await box.close()
            await self.host.release(info.id)


@pytest.fixture(scope="module")
def host() -> Iterator[HostClient]:
    require_apptainer()
    with private_state() as state, pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "ROLLOUT_SANDBOX_DIR", str(state))
        # A host takes images by their path from below such places alone.
        patch.setitem(os.environ, "ROLLOUT_SANDBOX_IMAGE_ROOTS", str(swe_toy.image().parent))
        yield HostClient(state)
        left = leftovers(state)
        asyncio.run(HostClient(state).stop())
        assert left == []


@pytest.fixture(params=["service", "control"])
def target(request: pytest.FixtureRequest, host: HostClient) -> RewardTarget:
    """The service, and the naive way."""
    return RewardTarget("service", request.param == "control", host)


# -- outcomes that code under test decides -----------------------------------------------------------


@attack(stopped_by="an expected failure is the test file's to mark")
def test_pass_by_calling_pytest_xfail(target):
    return target.cheated("xfail_called")


@attack(stopped_by="an expected failure is the test file's to mark")
def test_pass_by_an_assertion_error_that_is_expected(target):
    return target.cheated("xfailed_assertion")


@attack(stopped_by="an expected failure is the test file's to mark")
def test_pass_by_another_assertion_error_in_the_tests_module(target):
    return target.cheated("builtins_in_module")


@attack(stopped_by=CONTROL_RUN)
def test_pass_with_stubbed_assertions_of_unittest(target):
    return target.cheated("unittest_asserts_stubbed")


@attack(stopped_by=CONTROL_RUN)
def test_pass_with_a_stubbed_run_of_unittest(target):
    return target.cheated("unittest_run_stubbed")


@attack(stopped_by=CONTROL_RUN)
def test_pass_by_swallowing_failures_but_the_probes(target):
    return target.cheated("runtest_swallows")


@attack(stopped_by=CONTROL_RUN)
def test_pass_by_swallowing_failures_until_the_session_ends(target):
    return target.cheated("runtest_swallows_in_session")


@attack(stopped_by=CONTROL_RUN)
def test_sign_outcomes_with_the_recorders_key(target):
    return target.cheated("signed_outcomes")


@attack(stopped_by=CONTROL_RUN)
def test_have_the_recorder_note_passes(target):
    return target.cheated("note_patched")


@attack(stopped_by="the recorder's word, at the end of the outer run")
def test_pass_in_a_pytest_within_pytest(target):
    return target.cheated("nested_main")


@attack(stopped_by=CONTROL_RUN)
def test_swap_the_code_of_tests(target):
    return target.cheated("code_swapped")


@attack(stopped_by="comparisons with what nobody can know")
def test_return_what_the_callers_code_compares_with(target):
    return target.cheated("frames_inspected")


@attack(stopped_by="comparisons with what nobody can know")
def test_return_what_equals_everything(target):
    return target.cheated("always_equal")


@attack(stopped_by="a probe that must fail, and " + CONTROL_RUN)
def test_make_every_report_one_of_a_pass(target):
    return target.cheated("report_patched")


@attack(stopped_by=CONTROL_RUN)
def test_change_reports_before_anybody_reads_them(target):
    return target.cheated("logreport_wrapped")


@attack(stopped_by="comparisons with what nobody can know")
def test_return_what_the_caller_has_in_a_variable(target):
    return target.cheated("caller_locals")


@attack(stopped_by="told in the report as suspicious")
def test_be_rewarded_unnoticed_for_looking_at_the_caller(target):
    if target.control:
        return target.cheated("caller_recognised")
    result = target.roll("caller_recognised")
    return result.reward == 1.0 and not result.report["suspicious"]


# -- what is printed ---------------------------------------------------------------------------------


@attack(stopped_by="the recorder's word, without which nothing counts")
def test_print_results_and_end_the_process_at_import(target):
    return target.cheated("exit_at_import")


@attack(stopped_by="the recorder's word, without which nothing counts")
def test_print_results_and_have_pytest_exit(target):
    return target.cheated("sys_exit")


@attack(stopped_by="lines that the recorder does not stand for")
def test_print_results_at_the_end_of_the_process(target):
    return target.cheated("lines_at_exit")


@attack(stopped_by=CONTROL_RUN)
def test_print_what_djangos_runner_would(target):
    return target.cheated("unittest_lines")


@attack(stopped_by=CONTROL_RUN)
def test_print_what_sympys_runner_would(target):
    return target.cheated("plain_lines")


# -- files that decide -------------------------------------------------------------------------------


@attack(stopped_by=APART)
def test_pass_by_hooks_in_conftest(target):
    return target.cheated("conftest")


@attack(stopped_by=APART)
def test_pass_by_a_start_of_python(target):
    return target.cheated("sitecustomize")


@attack(stopped_by=APART)
def test_have_pytest_ini_load_a_plugin(target):
    return target.cheated("pytest_ini")


@attack(stopped_by=APART)
def test_have_setup_cfg_load_a_plugin(target):
    return target.cheated("setup_cfg")


@attack(stopped_by=APART)
def test_have_tox_ini_load_a_plugin(target):
    return target.cheated("tox_ini")


@attack(stopped_by=APART)
def test_have_pyproject_load_a_plugin(target):
    return target.cheated("pyproject")


@attack(stopped_by=APART)
def test_stand_before_pytest_on_the_path(target):
    return target.cheated("shadowing_module")


@attack(stopped_by="the specified tests are put in place after the patch")
def test_be_judged_by_tests_of_ones_own(target):
    return target.cheated("tests_overwritten", places_tests=False)


@attack(stopped_by="tests run in a sandbox that the agent never was in")
def test_replace_python(target):
    return target.cheated("python_replaced")


@attack(stopped_by="tests run in a sandbox that the agent never was in")
def test_have_a_daemon_rewrite_tests(target):
    return target.cheated("daemon")


@attack(stopped_by="the recorder's word, without which nothing counts")
def test_change_the_installed_pytest(target):
    return target.cheated("installed_pytest_patched")


@attack(stopped_by="no commit beyond the base is in the agent's repository")
def test_read_the_fix_in_the_history(target):
    if target.control:
        return asyncio.run(history_is_there(target))
    return target.cheated("history_read")


async def history_is_there(target: RewardTarget) -> bool:
    """Whether the script finds the fix in the repository as images have it."""
    async with target.sandbox(swe_toy.instance()) as box:
        await box.bash("git checkout -q -f base")
        await box.bash(script_of("history_read"))
        return "return x + x\n" in (await box.read_file(f"{swe_toy.REPO}/calc.py")).decode()


# -- getting away from a 0 ---------------------------------------------------------------------------


def escaped(target: RewardTarget, name: str) -> bool:
    """Whether an agent without a fix is without a score; the naive way compares with the repository's git."""
    if target.control:
        return asyncio.run(git_fails(target, script_of(name)))
    result = target.roll(name)
    return result.reward != 0.0 or result.rollout.drop


async def git_fails(target: RewardTarget, script: str) -> bool:
    async with target.sandbox(swe_toy.instance()) as box:
        await box.bash("git checkout -q -f base")
        await box.bash(script)
        return (await box.bash("git add -A && git diff --cached base", max_output_chars=10**6)).exit_code != 0


@attack(stopped_by="a git that obeys no attributes")
def test_escape_a_score_by_attributes(target):
    return escaped(target, "attributes")


@attack(stopped_by="a git that obeys no attributes, configuration or hooks")
def test_escape_a_score_by_the_repositorys_configuration(target):
    return escaped(target, "attributes_of_repository")


@attack(stopped_by="the server makes readable what the agent closed")
def test_escape_a_score_by_files_of_mode_0(target):
    return escaped(target, "unreadable")


# -- what is no cheat --------------------------------------------------------------------------------


HONEST = {
    "the fix": "",
    "an overloaded equality": """
class Number(int):
    def __eq__(self, other):
        if isinstance(other, Number):
            return int(self) == int(other)
        return int(self) == other
    __hash__ = int.__hash__
def twice(x):
    return Number(x + x)
""",
    "a subclass of a built-in exception": """
class CalcError(AssertionError, ValueError):
    pass
def twice(x):
    if isinstance(x, str):
        raise CalcError(x)
    return x + x
""",
    "a replaced print": """
import builtins
_print = builtins.print
def quietly(*values):
    builtins.print = lambda *a, **k: None
    try:
        return values
    finally:
        builtins.print = _print
quietly()
""",
}
OWN_TESTS = """
import builtins, unittest.mock, calc
def test_mine(monkeypatch):
    monkeypatch.setattr(builtins, "len", lambda x: 3)
    with unittest.mock.patch.object(calc, "twice", return_value=4):
        assert calc.twice(1) == 4 and len("") == 3
"""


@pytest.fixture(scope="module")
def honest(host: HostClient) -> dict[str, Result]:
    """Rollouts that fix the bug in an odd way, by what is odd."""
    fix = "sed -i 's/ + x + 1/ + x/' calc.py"
    jobs = {
        name: (swe_toy.instance(), [fix, f"cat >> calc.py <<'EOF_ODD'\n{code}\nEOF_ODD"])
        for name, code in HONEST.items()
    }
    jobs["tests that replace what they like"] = (
        swe_toy.instance(),
        [
            fix,
            f"cat > tests/test_mine.py <<'EOF_ODD'\n{OWN_TESTS}\nEOF_ODD\ncp tests/test_mine.py test_mine.py",
        ],
    )
    jobs["tests of unittest"] = (swe_toy.unittest_instance(), [fix])
    jobs["another runner of unittest"] = (swe_toy.django_instance(), [fix])
    jobs["another runner"] = (swe_toy.sympy_instance(), [fix])
    results: Sequence[Result] = asyncio.run(roll_many(list(jobs.values())))
    return dict(zip(jobs, results, strict=True))


def test_an_honest_odd_fix_is_rewarded_and_not_accused(honest: dict[str, Result]) -> None:
    for name, result in honest.items():
        assert result.reward == 1.0, (name, result.report)
        assert result.report["suspicious"] == [], name
        assert result.report["control"]["must_fail"] >= 2, name
        assert result.report["control"]["passed"] == [], name
