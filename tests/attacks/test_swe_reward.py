"""Rewards of `swe` for what is no fix. Each cheat is a script in `reward/`, written as its author would.

`NAME.sh` is what the agent does in its sandbox; `NAME.py` is what it adds to the code under test, and goes to
EVAL as the patch that it is. The control is the naive way: the agent's own sandbox, plain pytest (or the
repository's runner), and a parser of its output.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from rollout.schema import State
from sandbox.client import SandboxClient
from sandbox.host_client import HostClient
from sandbox.spec import SandboxSpec
from tests.attacks import RewardTarget, attack, one_a_wall
from tests.helpers import swe_toy
from tests.helpers.long_forms import ATTACKS
from tests.helpers.sandboxes import own_sandboxes, require_apptainer
from tests.helpers.swe_agents import AT_ONCE, Judged, Result, judge_many, roll_many
from workers.scoring.swe_tests import grade

pytestmark = pytest.mark.timeout(900)  # all rollouts that the tests of a session ask for are made at once
HERE = Path(__file__).parent / "reward"
PATIENCE_S = 120.0
ROWS = {
    "unittest_asserts_stubbed": swe_toy.unittest_instance,
    "unittest_run_stubbed": swe_toy.unittest_instance,
    "unittest_lines": swe_toy.django_instance,
    "unittest_lines_in_earnest": swe_toy.django_instance,
    "unittest_skipped": swe_toy.django_instance,
    "unittest_results_patched": swe_toy.django_instance,
    "plain_lines": swe_toy.sympy_instance,
    "runner_patched": swe_toy.sympy_instance,
    "exit_at_import@tox": swe_toy.tox_instance,
    "runtest_swallows@tox": swe_toy.tox_instance,
    "caller_locals": swe_toy.cases_instance,
}
"""Instance that a cheat is for, also one that is tried with another runner; else `swe_toy.instance`."""
CONTROL_RUN = "a second run whose tests must fail"
APART = "the patch leaves out what configures tests"
MARKED = "an expected failure is the test file's to mark"
UNKNOWN = "comparisons with what nobody can know"
WORD = "the recorder's word, without which nothing counts"
ELSEWHERE = "tests run in a sandbox that the agent never was in"
CHEATS = {
    "pass_by_calling_pytest_xfail": ("xfail_called", MARKED),
    "pass_by_an_assertion_error_that_is_expected": ("xfailed_assertion", MARKED),
    "pass_by_another_assertion_error_in_the_tests_module": ("builtins_in_module", MARKED),
    "pass_with_stubbed_assertions_of_unittest": ("unittest_asserts_stubbed", CONTROL_RUN),
    "pass_with_a_stubbed_run_of_unittest": ("unittest_run_stubbed", CONTROL_RUN),
    "pass_by_swallowing_failures_but_the_probes": ("runtest_swallows", CONTROL_RUN),
    "pass_by_swallowing_failures_until_the_session_ends": ("runtest_swallows_in_session", CONTROL_RUN),
    "sign_outcomes_with_the_recorders_key": ("signed_outcomes", CONTROL_RUN),
    "have_the_recorder_note_passes": ("note_patched", CONTROL_RUN),
    "pass_in_a_pytest_within_pytest": ("nested_main", "the recorder's word, at the end of the outer run"),
    "swap_the_code_of_tests": ("code_swapped", CONTROL_RUN),
    "return_what_the_callers_code_compares_with": ("frames_inspected", UNKNOWN),
    "return_what_equals_everything": ("always_equal", UNKNOWN),
    "make_every_report_one_of_a_pass": ("report_patched", "a probe that must fail, and " + CONTROL_RUN),
    "change_reports_before_anybody_reads_them": ("logreport_wrapped", CONTROL_RUN),
    "return_what_the_caller_has_in_a_variable": ("caller_locals", UNKNOWN),
    "print_results_and_end_the_process_at_import": ("exit_at_import", WORD),
    "print_results_and_have_pytest_exit": ("sys_exit", WORD),
    "print_results_at_the_end_of_the_process": (
        "lines_at_exit",
        "lines that the recorder does not stand for",
    ),
    "print_what_djangos_runner_would": ("unittest_lines", CONTROL_RUN),
    "print_what_unittest_would_but_where_tests_must_fail": ("unittest_lines_in_earnest", WORD),
    "have_unittest_take_failures_for_successes": ("unittest_results_patched", WORD),
    "have_tests_of_unittest_skipped": ("unittest_skipped", CONTROL_RUN),
    "print_what_sympys_runner_would": ("plain_lines", CONTROL_RUN),
    "have_sympys_runner_say_that_all_is_well": ("runner_patched", CONTROL_RUN),
    "print_results_and_end_the_process_within_tox": ("exit_at_import@tox", WORD),
    "pass_within_tox_by_swallowing_failures": ("runtest_swallows@tox", CONTROL_RUN),
    "pass_by_hooks_in_conftest": ("conftest", APART),
    "pass_by_a_start_of_python": ("sitecustomize", APART),
    "have_pytest_ini_load_a_plugin": ("pytest_ini", APART),
    "have_setup_cfg_load_a_plugin": ("setup_cfg", APART),
    "have_tox_ini_load_a_plugin": ("tox_ini", APART),
    "have_pyproject_load_a_plugin": ("pyproject", APART),
    "stand_before_pytest_on_the_path": ("shadowing_module", APART),
    "be_judged_by_tests_of_ones_own": (
        "tests_overwritten",
        "the specified tests are put in place after the patch",
    ),
    "replace_python_and_git": ("python_replaced", ELSEWHERE),
    "have_a_daemon_rewrite_tests": ("daemon", ELSEWHERE),
    "change_the_installed_pytest": ("installed_pytest_patched", WORD),
    "be_rewarded_unnoticed_for_looking_at_the_caller": (
        "caller_recognised",
        "told in the report as suspicious",
    ),
    "read_the_fix_in_the_history": ("history_read", "no commit beyond the base is in the agent's repository"),
    "escape_a_score_by_attributes": ("attributes", "a git that obeys no attributes"),
    "escape_a_score_by_the_repositorys_configuration": (
        "attributes_of_repository",
        "a git that obeys no attributes, configuration or hooks",
    ),
    "escape_a_score_by_files_of_mode_0": ("unreadable", "the server makes readable what the agent closed"),
    "escape_a_score_by_removing_the_repository": (
        "repository_removed",
        "the server compares files, not commits",
    ),
}
"""What is attempted → the script of it, and what stops it."""
CONTROLLED = ATTACKS(
    "cheats that are tried the naive way too",
    short=one_a_wall(CHEATS),
    long=tuple(script for script, _ in CHEATS.values()),
)
"""A control runs nothing of the service but a sandbox: it changes with its script alone."""
ESCAPES = ("attributes", "attributes_of_repository", "unreadable", "repository_removed")
"""Cheats of an agent without a fix that would rather have no score than 0."""
TOGETHER = {
    "conftest": ("conftest.py",),
    "pytest_ini": ("pytest.ini",),
    "setup_cfg": ("setup.cfg",),
    "tox_ini": ("tox.ini",),
    "pyproject": ("pyproject.toml",),
}
"""Cheats that one agent of the service tries all at once, and their files: any that were let through would be
rewarded, and none takes from another what it needs. Each has a control of its own."""
DROPPED = {
    **dict.fromkeys(TOGETHER, dict.fromkeys(chain(*TOGETHER.values()), "machinery")),
    "shadowing_module": {"pytest.py": "machinery"},
    "sitecustomize": dict.fromkeys(("sitecustomize.py", "usercustomize.py", "calc.pth"), "machinery"),
    **{name: {"tests/test_calc.py": "test"} for name in ("tests_overwritten", "daemon")},
}
"""What the patch of a cheat leaves out, and why."""
STATUS = {
    **dict.fromkeys((*DROPPED, *ESCAPES, "python_replaced", "history_read"), "unresolved"),
    **dict.fromkeys(
        ("exit_at_import", "exit_at_import@tox", "unittest_lines", "installed_pytest_patched"),
        "tests_not_finished",
    ),
    **dict.fromkeys(("unittest_lines_in_earnest", "unittest_results_patched"), "unresolved"),
    **dict.fromkeys(
        ("report_patched", "note_patched", "unittest_asserts_stubbed", "unittest_skipped"), "results_forged"
    ),
    "runner_patched": "results_forged",
}
"""What the report says of a cheat."""


def row_of(name: str) -> dict[str, Any]:
    """The instance of a cheat."""
    return ROWS.get(name, swe_toy.instance)()


def code_of(name: str) -> str | None:
    """What the agent adds to the code for a cheat; None = it does something else."""
    path = HERE / f"{name.split('@')[0]}.py"
    if not path.exists():
        return None
    code = path.read_text()
    return f"\n\n\n{(HERE / 'names.py').read_text() if 'cheat_' in code else ''}{code}\n"


def script_of(name: str) -> str:
    """What the agent types for a cheat."""
    code = code_of(name)
    if code is None:
        return (HERE / f"{name}.sh").read_text()
    return f"cat >> calc.py <<'EOF_CHEAT'\n{code}EOF_CHEAT"


async def by_the_service(name: str) -> Result:
    """What the service says of an agent that cheats."""
    code = code_of(name)
    if code is None:
        scripts = [script_of(cheat) for cheat in (TOGETHER if name in TOGETHER else [name])]
        (result,) = await roll_many([(row_of(name), scripts)])
    else:
        patch = swe_toy.diff("calc.py", swe_toy.CODE, swe_toy.CODE + code)
        (result,) = await judge_many([(row_of(name), patch)], Judged)
    return result


def rewarded(name: str, result: Result) -> bool:
    """Whether the service gives an agent what it cheats for."""
    if name in ESCAPES:
        return result.reward != 0.0 or result.rollout.drop
    assert result.reward is not None, result.rollout.error
    return result.reward == 1.0 and not (name == "caller_recognised" and result.report["suspicious"])


async def naively(name: str, host: HostClient) -> bool:
    """Whether the agent gets it the naive way, which compares with the repository's own git."""
    row = row_of(name)
    info = await host.start(SandboxSpec(image=row["image"], owner="naive"))
    box = SandboxClient(info.socket)
    try:
        lines = [f"cd {shlex.quote(row['spec']['repo_dir'])}", *row["spec"]["setup"]]
        await box.bash("\n".join(lines))
        if name in ESCAPES or name == "history_read":
            await box.bash("git checkout -q -f base")
            await box.bash(script_of(name))
        if name in ESCAPES:
            difference = await box.bash("git add -A && git diff --cached base", max_output_chars=10**6)
            return difference.exit_code != 0
        if name == "history_read":  # the fix is in the repository as images have it
            return "return x + x\n" in (await box.read_file(f"{swe_toy.REPO}/calc.py")).decode()
        log = await naive_log(box, name, row)
    finally:
        await box.close()
        await host.release(info.id)
    payload = {"log": log, "log_parser": row["spec"]["log_parser"], "patch": "x"}
    payload |= {"fail_to_pass": json.loads(row["FAIL_TO_PASS"]), "eval_type": "pass_and_fail"}
    payload |= {"pass_to_pass": json.loads(row["PASS_TO_PASS"]), "version": "1"}
    return grade(payload | {"instance_id": row["instance_id"], "repo": row["repo"]})["resolved"]


async def naive_log(box: SandboxClient, name: str, row: dict[str, Any]) -> str:
    await box.bash(
        "git checkout -q -f main && git reset -q --soft base && git checkout -q base -- . && "
        "git checkout -q -f -B main base"
    )
    await box.bash(script_of(name), PATIENCE_S)
    await box.write_file("/tmp/tests.diff", row["test_patch"])
    if name != "tests_overwritten":
        await box.bash("git checkout -q base -- tests && git apply /tmp/tests.diff")
    if name == "daemon":  # on a busy machine it comes late, and a control must not depend on who is first
        await box.bash("until cmp -s /tmp/lie tests/test_calc.py; do sleep 0.02; done", 30)
    command = row["spec"]["test_cmd"].replace("{files}", "") + " tests/test_calc.py"
    result = await box.bash(f"({command}) </dev/null 2>&1 | cat", PATIENCE_S, max_output_chars=10**6)
    return f">>>>> Start Test Output\n{result.output}\n>>>>> End Test Output\n"


@pytest.fixture(scope="module")
def host() -> Iterator[HostClient]:
    require_apptainer()
    # A host takes images by their path from below such places alone.
    with own_sandboxes(ROLLOUT_SANDBOX_IMAGE_ROOTS=str(swe_toy.image().parent)) as state:
        yield HostClient(state)


def attempt_for(cheat: str, control: bool) -> tuple[str, bool]:
    """The script whose attempt a test looks at, and whether it is the control."""
    return (next(iter(TOGETHER)) if cheat in TOGETHER and not control else cheat), control


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, host: HostClient) -> dict[tuple[str, bool], Any]:
    """What came of the attempts that tests here ask for, by script and whether it is the control."""
    turn = asyncio.Semaphore(AT_ONCE)
    here = [item for item in request.session.items if item.path == request.path]
    tests = [item.callspec.params for item in here if "outcomes" in item.fixturenames]
    attempts = dict.fromkeys(attempt_for(test["cheat"], test["control"]) for test in tests)

    async def attempt(name: str, control: bool) -> bool | Result:
        async with turn:
            return await (naively(name, host) if control else by_the_service(name))

    async def made() -> list[Any]:
        return await asyncio.gather(*(attempt(*key) for key in attempts), return_exceptions=True)

    return dict(zip(attempts, asyncio.run(made()), strict=True))


@pytest.fixture
def target(cheat: str, control: bool, outcomes: dict[tuple[str, bool], Any]) -> RewardTarget:
    """The service, or the naive way, and what came of the cheat there."""
    outcome = outcomes[attempt_for(cheat, control)]
    if isinstance(outcome, BaseException):
        raise outcome
    return RewardTarget(control, outcome)


def attempt_of(cheat: str, wall: str) -> Callable[..., None]:
    """The test of a cheat."""

    @attack(stopped_by=wall)
    def attempt(target: RewardTarget, cheat: str, control: bool) -> bool:
        return target.outcome if control else rewarded(cheat, target.outcome)

    tried = {"service": False, "control": True} if cheat in CONTROLLED else {"service": False}
    places = pytest.mark.parametrize("control", tried.values(), ids=tried)
    return pytest.mark.parametrize("cheat", [cheat])(places(attempt))


for title, (cheat, wall) in CHEATS.items():
    globals()[f"test_{title}"] = attempt_of(cheat, wall)


@pytest.mark.parametrize("control", [False], ids=["service"])
@pytest.mark.parametrize("cheat", STATUS)
def test_the_report_says_what_became_of_a_cheat(target: RewardTarget, cheat: str, control: bool) -> None:
    result: Result = target.outcome
    assert (result.rollout.state, result.rollout.drop) == (State.COMPLETED, False), result.rollout.error
    assert (result.report["status"], result.report["resolved"]) == (STATUS[cheat], False), result.report
    if code_of(cheat) is None and cheat != "runner_patched":
        assert result.report["patch"]["dropped"] == DROPPED.get(cheat, {})
        assert result.rollout.reward_components["pass_to_pass"] == 1.0, "the tests ran to their end"


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
    patches = {
        name: swe_toy.diff("calc.py", swe_toy.CODE, swe_toy.FIXED + code) for name, code in HONEST.items()
    }
    jobs = {name: (swe_toy.instance(), patch) for name, patch in patches.items()}
    jobs["tests of unittest"] = (swe_toy.unittest_instance(), patches["the fix"])
    jobs["another runner of unittest"] = (swe_toy.django_instance(), patches["the fix"])
    jobs["another runner"] = (swe_toy.sympy_instance(), patches["the fix"])
    jobs["tox"] = (swe_toy.tox_instance(), patches["the fix"])
    write = f"cat > tests/test_mine.py <<'EOF_ODD'\n{OWN_TESTS}\nEOF_ODD\ncp tests/test_mine.py test_mine.py"
    own_tests = (swe_toy.instance(), ["sed -i 's/ + x + 1/ + x/' calc.py", write])

    async def rollouts() -> list[list[Result]]:
        return await asyncio.gather(roll_many([own_tests]), judge_many(jobs.values(), Judged))

    results = chain.from_iterable(asyncio.run(rollouts()))
    return dict(zip(["tests that replace what they like", *jobs], results, strict=True))


def test_an_honest_odd_fix_is_rewarded_and_not_accused(honest: dict[str, Result]) -> None:
    for name, result in honest.items():
        assert result.reward == 1.0, (name, result.report)
        assert result.report["suspicious"] == [], name
        assert result.report["control"]["must_fail"] >= 2, name
        assert result.report["control"]["passed"] == [], name
