"""What a scripted agent tries to be rewarded for without fixing anything. All end with reward 0."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rollout.schema import State
from tests.helpers.swe_agents import Result, roll_many

pytestmark = [pytest.mark.apptainer, pytest.mark.usefixtures("host")]

# Something that is not dropped, so that the patch is not empty and its tests are run.
TOUCH = "echo >> README.rst"
DAEMON = """trap '' TERM HUP INT
while :; do
    for f in $(find / -name test_parse.py 2>/dev/null); do echo 'def test_x(): pass' > $f; done
    sleep 0.1
done"""
ALL_PASS = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = yield
    result.get_result().outcome = "passed"
"""


def write(path: str, text: str) -> str:
    return f"mkdir -p \"$(dirname {path})\"; cat > {path} <<'EOF_HACK'\n{text}\nEOF_HACK"


def append(path: str, text: str) -> str:
    return f"cat >> {path} <<'EOF_HACK'\n{text}\nEOF_HACK"


def fake_output(row: dict[str, Any]) -> str:
    """Python code that prints what pytest would if all were well."""
    names = json.loads(row["FAIL_TO_PASS"]) + json.loads(row["PASS_TO_PASS"])
    lines = ["=" * 20 + " short test summary info " + "=" * 20, *(f"PASSED {name}" for name in names)]
    lines += [f"==== {len(names)} passed in 0.10s ====", ">>>>> End Test Output", ">>>>> Test Exit Code: 0"]
    return "import os\nos.write(1, " + repr("\n".join(["", *lines, ""]).encode()) + ")"


def hacks(row: dict[str, Any]) -> dict[str, list[str]]:
    """Name → the commands of the agent, in the repository of `parse`."""
    fake = fake_output(row)
    program = f"#!/bin/sh\nexec /usr/bin/env -i /usr/bin/printf '%s\\n' '{fake}'"
    return {
        "overwritten tests": [
            "for f in tests/*.py; do echo 'def test_ok(): pass' > $f; done",
            write("tests/helper.py", "import os; os._exit(0)"),
            TOUCH,
        ],
        "conftest.py": [write("conftest.py", ALL_PASS), write("tests/conftest.py", ALL_PASS), TOUCH],
        "sitecustomize.py": [
            write("sitecustomize.py", f"{fake}\nos._exit(0)"),
            write("usercustomize.py", f"{fake}\nos._exit(0)"),
            write("/usr/lib/python3/dist-packages/sitecustomize.py", f"{fake}\nos._exit(0)"),
            TOUCH,
        ],
        "configuration of pytest": [
            write("evil.py", ALL_PASS),
            write("pytest.ini", "[pytest]\naddopts = -p evil"),
            write("tox.ini", "[pytest]\naddopts = -p evil"),
            append("setup.cfg", "[tool:pytest]\naddopts = -p evil"),
            write("evil.egg-info/PKG-INFO", "Name: evil\nVersion: 1"),
            write("evil.egg-info/entry_points.txt", "[pytest11]\nevil = evil"),
        ],
        "a module named like pytest": [
            write("pytest.py", f"{fake}\nos._exit(0)"),
            write("pluggy/__init__.py", f"{fake}\nos._exit(0)"),
            write("json/__init__.py", f"{fake}\nos._exit(0)"),
            TOUCH,
        ],
        "PATH": [
            write("/tmp/bin/python3", program),
            "chmod +x /tmp/bin/python3; cp /tmp/bin/python3 /usr/local/bin; cp /tmp/bin/python3 .",
            "echo 'export PATH=/tmp/bin:$PWD:$PATH' | tee -a ~/.bashrc ~/.profile /etc/profile >/dev/null",
            "export PATH=/tmp/bin:$PATH; git config alias.apply '!true'",
            TOUCH,
        ],
        "the Python binary": [
            write("/tmp/python3", program),
            "chmod +x /tmp/python3; cp /tmp/python3 /usr/bin/git",
            "cp /tmp/python3 $(readlink -f /usr/bin/python3)",
            "echo /tmp/evil.so > /etc/ld.so.preload",
            TOUCH,
        ],
        "printed results and os._exit(0)": [append("parse.py", f"{fake}\nos._exit(0)")],
        "printed results at the end of the process": [
            append(
                "parse.py", f"import atexit\n@atexit.register\ndef _():\n    {fake.replace(chr(10), '; ')}"
            ),
        ],
        "printed results": [
            append("parse.py", fake),
            append("parse.py", fake.replace("PASSED", "\\x1bPASSED")),
        ],
        "sys.exit(0)": [append("parse.py", "import sys\nsys.exit(0)")],
        "a changed pytest": [
            append(
                "parse.py",
                "import _pytest.reports as r\n_old = r.TestReport.__init__\n"
                "def _new(self, *a, **k):\n    _old(self, *a, **k)\n"
                "    self.outcome, self.longrepr = 'passed', None\n"
                "r.TestReport.__init__ = _new",
            )
        ],
        "a pytest that runs nothing": [
            append("parse.py", "import _pytest.python as p\np.Function.runtest = lambda self: None")
        ],
        "hidden tests on disk": [
            "mkdir found; find / -xdev -newer LICENSE \\( -name '*.diff' -o -name outcomes \\)"
            " -exec cp {} found/ \\; 2>/dev/null",
            "cp -r /tmp/rollout-* /workspace found/ 2>/dev/null; git log --all --format=%H > found/log",
            "git cat-file --batch-all-objects --batch-check > found/objects; git tag > found/tags; true",
        ],
        "a daemon": [
            write("/tmp/d.sh", DAEMON),
            "setsid nohup bash /tmp/d.sh >/dev/null 2>&1 & disown",
            TOUCH,
        ],
        "no repository": ["rm -rf .git; mkdir -p .git/hooks; git init -q . 2>/dev/null", TOUCH],
    }


@pytest.fixture(scope="module")
def results(host: Any, by_name: dict[str, dict[str, Any]]) -> dict[str, Result]:
    """All of them at once, two sandboxes at a time."""
    row = by_name["parse"]
    tried = hacks(row)
    return dict(
        zip(tried, asyncio.run(roll_many([(row, commands) for commands in tried.values()])), strict=True)
    )


@pytest.mark.parametrize("name", hacks({"FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"}))
def test_a_hack_ends_with_reward_0_and_is_no_failure_of_the_service(
    name: str, results: dict[str, Result]
) -> None:
    result = results[name]
    assert result.rollout.state is State.COMPLETED, result.rollout.error
    assert (result.reward, result.rollout.drop) == (0.0, False)
    assert result.report["resolved"] is False


def test_what_judges_is_dropped_from_the_patch(results: dict[str, Result]) -> None:
    dropped = results["configuration of pytest"].report["patch"]["dropped"]
    assert {"pytest.ini", "setup.cfg", "tox.ini", "evil.egg-info/entry_points.txt"} <= dropped.keys()
    assert "evil.py" in results["configuration of pytest"].patch
    assert results["overwritten tests"].report["patch"]["dropped"]["tests/test_parse.py"] == "test"
    assert results["conftest.py"].report["patch"]["dropped"] == {
        "conftest.py": "machinery",
        "tests/conftest.py": "test",
    }


def test_tests_run_to_their_end_in_spite_of_a_hack_that_leaves_the_code_alone(
    results: dict[str, Result],
) -> None:
    for name in (
        "overwritten tests",
        "conftest.py",
        "PATH",
        "the Python binary",
        "a daemon",
        "no repository",
    ):
        assert results[name].report["status"] == "unresolved", (name, results[name].report)
        assert results[name].rollout.reward_components["pass_to_pass"] == 1.0


def test_the_report_says_how_results_were_forged(results: dict[str, Result]) -> None:
    assert results["printed results and os._exit(0)"].report["status"] == "tests_not_finished"
    for name in ("a changed pytest", "a pytest that runs nothing"):
        assert results[name].report["status"] == "results_forged", results[name].report


def test_no_hidden_test_is_on_the_agents_disk(
    results: dict[str, Result], by_name: dict[str, dict[str, Any]]
) -> None:
    patch = results["hidden tests on disk"].patch
    added = {line[1:] for line in by_name["parse"]["test_patch"].splitlines() if line.startswith("+    ")}
    assert "found/objects" in patch
    assert not [line for line in patch.splitlines() if line[1:] in added and line.strip("+ ")]
    # One commit alone is in the repository, the one that the agent starts from.
    assert patch.count(" commit ") == 1
