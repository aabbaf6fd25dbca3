"""What is dropped from a patch, and which lines of a log are believed."""

from __future__ import annotations

import hmac
import json
import subprocess
import sys
from pathlib import Path

import pytest

from workers.handlers.swe.protection import Protection
from workers.handlers.swe.recording import (
    PLUGIN,
    read_outcomes,
    without_false_ok,
    without_forgeries,
    without_marks,
)
from workers.scoring.swe_tests import grade, grade_expected

PLUGIN_FILE = Path(__file__).parents[2] / "workers/handlers/swe" / f"{PLUGIN}.py"
RULES = Protection(
    test_files=["tests/admin/test_a.py", "pkg/core/tests/test_b.py", "test_beside.py"],
    gold_files=["pkg/a.py", "setup.cfg", "tests/helper.py"],
    base_roots=["pkg", "src/types", "setup.py", "attr"],
)


@pytest.mark.parametrize(
    ("path", "added", "why"),
    [
        ("tests/admin/test_a.py", False, "test"),
        ("tests/data/x.json", True, "test"),
        ("tests", True, "test"),
        ("pkg/core/tests/conftest.py", True, "test"),
        ("test_beside.py", False, "test"),
        ("tests/helper.py", False, None),
        ("pkg/testing/util.py", False, None),
        ("pkg/other/tests/test_c.py", False, None),
        ("setup.cfg", False, None),
        ("pyproject.toml", False, "machinery"),
        ("pkg/conftest.py", True, "machinery"),
        ("sympy/testing/runtests.py", False, "machinery"),
        ("bin/test", False, "machinery"),
        ("pkg/bin/test", False, None),
        ("sub/sitecustomize.py", True, "machinery"),
        ("x.egg-info/entry_points.txt", True, "machinery"),
        ("evil.pth", True, "machinery"),
        ("pytest.py", True, "machinery"),
        ("src/json/__init__.py", True, "machinery"),
        ("pytest.cpython-311-x86_64-linux-gnu.so", True, "machinery"),
        ("src/types/new.py", True, None),
        ("attr/new.py", True, None),
        ("pkg/json.py", True, None),
        ("json/old.py", False, None),
        ("pkg/__pycache__/a.cpython-311.pyc", True, "left behind"),
        ("pkg/a.py.orig", True, "left behind"),
        ("pkg/a.pyc", False, None),
        ("reproduce.py", True, None),
    ],
)
def test_a_change_is_dropped_by_where_it_is(path: str, added: bool, why: str | None) -> None:
    assert RULES.objection(path, added) == why


OUTCOMES = {
    "tests/t.py::a": "PASSED",
    "tests/t.py::b[x - y z]": "PASSED",
    "tests/t.py::c": "FAILED",
    "tests/t.py::d": "XFAIL",
    "tests/t.py::e": "SKIPPED",
}


@pytest.mark.parametrize(
    "line",
    [
        "PASSED tests/t.py::a",
        "PASSED tests/t.py::b[x - y z]",
        "XFAIL tests/t.py::d - it is known",
        "SKIPPED [1] tests/t.py:3: no network",
        "tests/t.py::a PASSED",
        "tests/t.py::a PASSED                    [ 10%]",
        "FAILED tests/t.py::c - AssertionError",
        "ERROR tests/other.py",
        "nothing of the kind",
    ],
)
def test_lines_that_pytest_stands_for_stay_as_they_are(line: str) -> None:
    assert without_forgeries(line, OUTCOMES) == line


@pytest.mark.parametrize(
    "line",
    [
        "PASSED tests/t.py::c",
        "PASSED tests/t.py::c - tests/t.py::a",
        "PASSED tests/unknown.py::a",
        "SKIPPED tests/t.py::c",
        "XFAIL tests/t.py::c",
        "tests/t.py::c PASSED",
        "tests/t.py::c PASSED [ 10%]",
        "\x1bPASSED tests/t.py::c",
        "[32mPASSED[0m tests/t.py::c",
        "PAS\x07SED tests/t.py::c",
        "tests/t.py::c ... PASSED",
    ],
)
@pytest.mark.parametrize("parser", ["parse_log_pytest", "parse_log_pytest_v2", "parse_log_seaborn"])
def test_a_printed_pass_counts_for_no_parser(line: str, parser: str) -> None:
    kept = without_forgeries(f"x\n{line}\nFAILED tests/t.py::other - no", OUTCOMES)
    log = f">>>>> Start Test Output\n{kept}\n>>>>> End Test Output\n>>>>> Test Exit Code: 1\n"
    payload = {"instance_id": "i", "repo": "r", "version": "1", "patch": "x", "eval_type": "pass_and_fail"}
    names = ["tests/t.py::c", "tests/unknown.py::a"]
    report = grade(payload | {"log_parser": parser, "fail_to_pass": names, "pass_to_pass": names, "log": log})
    assert report["graded"] is True
    assert report["tests_status"]["FAIL_TO_PASS"]["success"] == []
    assert report["tests_status"]["PASS_TO_PASS"]["success"] == []


def test_a_line_made_to_take_long_does_not() -> None:
    line = "PASSED a - " * 300_000
    assert without_forgeries(line, OUTCOMES) == line.replace("PASSED", "passed")


def test_marks_of_the_harness_in_the_output_of_tests_are_no_marks() -> None:
    output = without_marks("a\n>>>>> End Test Output\n>>>>>> Test Exit Code: 0")
    assert ">>>>>" not in output


def test_outcomes_without_the_key_are_not_believed() -> None:
    body = json.dumps({"statuses": {"a": "PASSED"}, "probe": "failed"}).encode()
    signature = hmac.new(b"key", body, "sha256").hexdigest().encode()
    assert read_outcomes(signature + b"\n" + body, b"key").statuses == {"a": "PASSED"}
    assert read_outcomes(signature + b"\n" + body, b"other") is None
    assert read_outcomes(b"0\n" + body, b"key") is None
    assert read_outcomes(b"", b"key") is None


def recorded(directory: Path, source: str) -> object:
    """What the plug-in tells of a test module, run by the pytest of this environment."""
    (directory / f"{PLUGIN}.py").write_bytes(PLUGIN_FILE.read_bytes())
    (directory / "key").write_bytes(b"key")
    (directory / "test_it.py").write_text(source)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", "test_it.py"],
        cwd=directory,
        # Plug-ins of others would be imported for longer than the tests run.
        env={
            "PATH": "/usr/bin:/bin",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(directory),
        },
        capture_output=True,
        timeout=240,
    )
    assert not (directory / "key").exists()
    outcomes = directory / "outcomes"
    return read_outcomes(outcomes.read_bytes(), b"key") if outcomes.exists() else None


TESTS = """
import pytest, unittest
def test_good(): pass
def test_bad(): assert 0
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_known(): assert 0
@pytest.fixture
def broken(): raise ValueError
def test_setup(broken): pass
class TestCase(unittest.TestCase):
    def test_one(self): pass
"""


def test_the_recorder_tells_the_statuses_that_the_summary_has(tmp_path: Path) -> None:
    record = recorded(tmp_path, TESTS)
    assert record.changed is False
    assert record.statuses == {
        "test_it.py::test_good": "PASSED",
        "test_it.py::test_bad": "FAILED",
        "test_it.py::test_skipped": "SKIPPED",
        "test_it.py::test_known": "XFAIL",
        "test_it.py::test_setup": "ERROR",
        "test_it.py::TestCase::test_one": "PASSED",
    }


def test_the_recorder_notices_that_failures_are_reported_as_passes(tmp_path: Path) -> None:
    changed = "import _pytest.python as p\np.Function.runtest = lambda self: None\ndef test_x(): assert 0\n"
    assert recorded(tmp_path, changed).changed is True


def test_a_process_that_ends_early_tells_nothing(tmp_path: Path) -> None:
    assert recorded(tmp_path, "import os\ndef test_x(): os._exit(0)\n") is None


def test_a_module_that_exits_at_import_has_passed_nothing(tmp_path: Path) -> None:
    assert recorded(tmp_path, "import sys\ndef test_x(): pass\nsys.exit(0)\n").statuses == {}


def recorded_of_unittest(directory: Path, source: str, runner: str = "unittest") -> object:
    """What the plug-in tells of a test module that `unittest` runs, where it waits for that runner."""
    (directory / f"{PLUGIN}.py").write_bytes(PLUGIN_FILE.read_bytes())
    (directory / "sitecustomize.py").write_text(f"import {PLUGIN}\n")
    (directory / "key").write_bytes(b"key")
    (directory / "test_it.py").write_text(source)
    subprocess.run(
        [sys.executable, "-m", "unittest", "-v", "test_it"],
        cwd=directory,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(directory), "ROLLOUT_RECORDED": runner},
        capture_output=True,
        timeout=240,
    )
    outcomes = directory / "outcomes"
    return read_outcomes(outcomes.read_bytes(), b"key") if outcomes.exists() else None


UNITTESTS = """
import unittest
class T(unittest.TestCase):
    def test_good(self):
        'What is good.'
    def test_bad(self): self.fail()
    def test_error(self): raise ValueError
    @unittest.skip('no')
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_known(self): self.fail()
    def test_parts(self):
        for part in 1, 2:
            with self.subTest(part): self.assertEqual(part, 1)
    def test_late(self): self.addCleanup(self.fail)
class Broken(unittest.TestCase):
    def setUp(self): raise ValueError
    def test_setup(self): pass
"""


def test_the_recorder_tells_the_statuses_of_unittest_by_every_name(tmp_path: Path) -> None:
    record = recorded_of_unittest(tmp_path, UNITTESTS)
    assert record.changed is False and record.suspicious == []
    statuses = {name.split("::")[-1]: status for name, status in record.statuses.items() if "::" in name}
    assert statuses == {
        "test_good": "PASSED",
        "test_bad": "FAILED",
        "test_error": "ERROR",
        "test_skipped": "SKIPPED",
        "test_known": "XFAIL",
        "test_parts": "FAILED",
        "test_late": "FAILED",
        "test_setup": "ERROR",
    }
    assert record.statuses["What is good."] == "PASSED"
    printed = [name for name in record.statuses if name.startswith("test_bad (test_it.T")]
    assert [record.statuses[name] for name in printed] == ["FAILED"]


def test_only_the_python_that_runs_the_tests_takes_the_key(tmp_path: Path) -> None:
    assert recorded_of_unittest(tmp_path, UNITTESTS, runner="runtests.py") is None
    assert (tmp_path / "key").exists()


@pytest.mark.parametrize(
    "change",
    [
        "unittest.TestCase.assertTrue = lambda *args: None",
        "unittest.TestResult.addFailure = lambda *args: None",
    ],
)
def test_the_recorder_notices_that_unittest_lets_failures_pass(tmp_path: Path, change: str) -> None:
    assert recorded_of_unittest(tmp_path, f"{UNITTESTS}\n{change}").changed is True


def test_a_process_of_unittest_that_ends_early_tells_nothing(tmp_path: Path) -> None:
    assert recorded_of_unittest(tmp_path, "import os\nos._exit(0)\n") is None


SAID = {"test_a (m.T)": "PASSED", "test_b (m.T)": "FAILED", "Doc of b.": "FAILED", "Doc of a.": "PASSED"}


@pytest.mark.parametrize(
    "text",
    [
        "test_a (m.T) ... ok",
        "test_a (m.T)\nDoc of a. ... ok",
        "test_a (m.T) ... a warning\nok",
        "A line that is no name ... ok",
        "test_b (m.T) ... FAIL",
        "ok then",
    ],
)
def test_what_unittest_stands_for_stays_as_it_is(text: str) -> None:
    assert without_false_ok(text, SAID) == text


@pytest.mark.parametrize(
    "text",
    [
        "test_b (m.T) ... ok",
        "  test_b (m.T) ...  OK",
        "Doc of b. ... ok",
        "test_b (m.T) ... something\nok",
        "test_b (m.T) ... Testing against Django installed in x (0 silenced).\nok",
        "test_c (m.T) ... ok",
        "test_a (m.T) ... x\ntest_b (m.T) ... ok",
    ],
)
def test_an_ok_that_unittest_did_not_report_counts_for_no_parser(text: str) -> None:
    log = f">>>>> Start Test Output\n{without_false_ok(text, SAID)}\nERROR: other\n>>>>> End Test Output\n"
    payload = {"instance_id": "i", "repo": "r", "version": "1", "patch": "x", "eval_type": "pass_and_fail"}
    names = ["test_b (m.T)", "Doc of b.", "test_c (m.T)"]
    for parser in ("parse_log_django", "swesmith.TornadoD5ac65c1", "swesmith.PythonSlugify872b3750"):
        report = grade(
            payload | {"log_parser": parser, "fail_to_pass": names, "pass_to_pass": names, "log": log}
        )
        assert all(not tests["success"] for tests in report["tests_status"].values()), report


def test_r2e_gym_wants_every_status_as_expected_and_no_other_test() -> None:
    failed = "\x1b[31mFAILED\x1b[0m r2e_tests/t.py::y - no"
    log = f"= short test summary info =\nPASSED r2e_tests/t.py::A::x\n{failed}\n"

    def resolved(expected: dict[str, str]) -> bool:
        return grade_expected({"log": log, "expected": expected})["resolved"]

    assert resolved({"A.x": "PASSED", "y - no": "FAILED"})
    assert not resolved({"A.x": "PASSED", "y": "PASSED"})
    assert not resolved({"A.x": "PASSED"})
    assert not resolved({"A.x": "PASSED", "y": "FAILED", "z": "PASSED"})
    assert grade_expected({"log": "PASSED r2e_tests/t.py::x", "expected": {"x": "PASSED"}})["graded"] is False


def test_a_parser_that_swebench_does_not_have_is_named() -> None:
    payload = {"log_parser": "parse_log_nothing", "instance_id": "", "repo": "", "version": "", "log": ""}
    with pytest.raises(ValueError, match="parse_log_nothing"):
        grade(payload | {"fail_to_pass": [], "pass_to_pass": [], "eval_type": "", "patch": ""})
