"""Rows in the layouts of the published data sets, made from our instances, resolved by their fix."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.helpers.swe_agents import Result, apply, git, roll_many

pytestmark = [pytest.mark.apptainer, pytest.mark.usefixtures("host")]

Row = dict[str, Any]
SOURCES = ("swe-smith", "r2e-gym", "swe-bench")


def swe_smith(row: Row) -> Row:
    """The image stands at the fix; the row's patch takes it back."""
    names = ("instance_id", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS", "spec")
    taken = {name: row[name] for name in names}
    bug = git(row, "diff", "main", row["base_commit"], "--", "parse.py")
    return taken | {"repo": "swesmith/parse", "patch": bug, "image_name": row["image"]}


def r2e_gym(row: Row) -> Row:
    """The image stands at the fix, the hidden tests are in the row."""
    names = json.loads(row["FAIL_TO_PASS"]) + json.loads(row["PASS_TO_PASS"])
    tests = {
        "test_file_names": ["test_1.py"],
        "test_file_codes": [git(row, "show", "main:tests/test_parse.py")],
    }
    expected = {name.split("::", 1)[1].replace("::", "."): "PASSED" for name in names}
    return {
        "repo_name": "parse",
        "docker_image": row["image"],
        "commit_hash": git(row, "rev-parse", "main").strip(),
        "problem_statement": row["problem_statement"],
        "modified_files": ["parse.py", "tests/test_parse.py"],
        "expected_output_json": json.dumps(expected),
        "execution_result_content": json.dumps(tests),
        "spec": row["spec"] | {"log_parser": None},
    }


def with_eval_script(row: Row) -> Row:
    """As release 5 of the official harness has it."""
    spec = row["spec"]
    script = f"""#!/bin/bash
set -uxo pipefail
cd {spec["repo_dir"]}
export PYTHONPATH="$PWD"
git config --global --add safe.directory {spec["repo_dir"]}
git status
git checkout {row["base_commit"]} tests/test_parse.py
git apply -v - <<'EOF_TESTS'
{row["test_patch"]}
EOF_TESTS
: '>>>>> Start Test Output'
python3 -m pytest -rA tests/test_parse.py
: '>>>>> End Test Output'
git checkout {row["base_commit"]} tests/test_parse.py
"""
    extra = {"eval_script": script, "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
    return row | extra | {"spec": {"repo_dir": spec["repo_dir"]}}


@pytest.fixture(scope="module")
def results(host: Any, by_name: dict[str, Row]) -> dict[str, Result]:
    row = by_name["parse"]
    look = "mkdir seen; git log --oneline > seen/log; git diff HEAD > seen/diff; cp -r tests seen/t; true"
    history = "git cat-file --batch-all-objects --batch-check > seen/objects; ls -a / > seen/root"
    search = (
        "find / -xdev -newer LICENSE \\( -name '*.diff' -o -name outcomes \\) -exec cp {} seen/ \\;"
        " 2>/dev/null; cp -r /tmp/rollout-* /workspace seen/ 2>/dev/null; git tag > seen/tags; true"
    )
    rows = {"swe-smith": swe_smith(row), "r2e-gym": r2e_gym(row), "swe-bench": with_eval_script(row)}
    jobs = [(made, [apply(row["patch"])]) for made in rows.values()]
    jobs += [(made, [look, history, search]) for made in rows.values()]
    names = [*rows, *(f"{name}, not fixed" for name in rows)]
    return dict(zip(names, asyncio.run(roll_many(jobs)), strict=True))


@pytest.mark.parametrize("source", SOURCES)
def test_a_row_of_a_published_layout_is_resolved_by_its_fix_and_by_nothing_else(
    source: str, results: dict[str, Result]
) -> None:
    fixed, wrong = results[source], results[f"{source}, not fixed"]
    assert fixed.reward == 1.0, (fixed.report, fixed.rollout.error)
    assert fixed.report["source"] == source
    assert (wrong.reward, wrong.report["status"]) == (0.0, "unresolved"), (wrong.report, wrong.rollout.error)


def test_the_report_of_r2e_gym_names_the_tests_that_differ(results: dict[str, Result]) -> None:
    wrong = results["r2e-gym, not fixed"]
    assert "test_parser_format" in wrong.report["tests_status"]["differing"]
    assert 0.5 < wrong.rollout.reward_components["expected_status"] < 1.0


@pytest.mark.parametrize("source", SOURCES)
def test_the_agent_sees_one_commit_and_no_trace_of_the_fix(
    source: str, results: dict[str, Result], by_name: dict[str, Row]
) -> None:
    patch = results[f"{source}, not fixed"].patch
    assert patch.count(" commit ") == 1
    row = by_name["parse"]
    old_tests = git(row, "show", f"{row['base_commit']}:tests/test_parse.py").splitlines()
    added = {line[1:] for line in row["test_patch"].splitlines() if line.startswith("+    ")}
    assert not (added - set(old_tests)) & {line[1:] for line in patch.splitlines()}
    # Nothing is changed before the agent comes, so that its own diff is its own.
    assert "+++ b/seen/diff" not in patch and "b/seen/log" in patch


def test_the_agent_of_swe_smith_does_not_see_the_tests_that_judge(results: dict[str, Result]) -> None:
    patch = results["swe-smith, not fixed"].patch
    assert "b/seen/t/test_bugs.py" in patch
    assert "b/seen/t/test_parse.py" not in patch
