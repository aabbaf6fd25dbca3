"""Instances from real projects: which patches resolve them, and that the official grading agrees."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollout.schema import Blame, Stage, State
from tests.helpers.long_forms import TASKS
from tests.helpers.swe_agents import Judged, Result, apply, git, judge_many, official_report, roll_many
from tests.helpers.swe_instances import PROJECTS
from tests.helpers.swe_toy import diff

pytestmark = [pytest.mark.apptainer, pytest.mark.usefixtures("host")]

Row = dict[str, Any]
SOLVED = TASKS(
    "instances that an agent solves",
    short=("parse", "semver", "jmespath"),
    long=tuple(project.name for project in PROJECTS),
)


@pytest.fixture(scope="module")
def results(host: Any, by_name: dict[str, Row]) -> dict[str, Result]:
    """One rollout of each kind; fixes by an agent, other patches as they are."""
    parse = by_name["parse"]
    by_agent = [(by_name[name], [apply(by_name[name]["patch"])]) for name in SOLVED]
    fixed = asyncio.run(roll_many([*by_agent, (parse, [])]))
    by_agents = dict(zip([*(f"gold {name}" for name in SOLVED), "empty"], fixed, strict=True))
    base = parse["base_commit"]
    source = git(parse, "show", f"{base}:parse.py")
    # The fix, and percentages ten times too large.
    fixed_source = git(parse, "show", "main:parse.py")
    assert fixed_source.count("/ 100.0") == 1
    broken = diff("parse.py", source, fixed_source.replace("/ 100.0", "/ 10.0"))
    tests = git(parse, "show", f"{base}:tests/test_parse.py")
    # The patch's own code ends every process it may. The sandbox's server is none of them.
    kill = "\nimport os\nfor p in os.listdir('/proc'):\n    if p.isdigit() and int(p) != os.getpid():\n"
    kill += "        try:\n            os.kill(int(p), 9)\n        except OSError:\n            pass\n"
    slow = parse["spec"] | {"test_timeout_s": 1.0, "setup": [], "test_cmd": "sleep 1000; pytest"}
    given = {
        "breaking": (parse, broken),
        "test-editing": (parse, diff("tests/test_parse.py", tests, "def test_nothing(): pass\n")),
        "not applying": (parse, diff("parse.py", source.replace("import", "export"), source)),
        "killing": (parse, diff("parse.py", source, source + kill)),
        "hanging": (parse | {"spec": slow}, parse["patch"]),
        # Not what an agent's patch can hold, for `tests` would be left out of it.
        "in the way": (parse, diff("tests", "", "a file\n")),
    }
    judged = asyncio.run(judge_many(given.values(), Judged))
    return by_agents | dict(zip(given, judged, strict=True))


def counts(result: Result, kind: str) -> tuple[int, int]:
    names = result.report["tests_status"][kind]
    return len(names["success"]), len(names["failure"])


def test_there_are_at_least_five_instances_with_tests_of_both_kinds(rows: list[Row]) -> None:
    assert len(rows) >= 5
    for row in rows:
        assert json.loads(row["FAIL_TO_PASS"]) and json.loads(row["PASS_TO_PASS"])


def test_the_gold_patch_made_by_an_agent_resolves_every_instance(
    results: dict[str, Result], by_name: dict[str, Row]
) -> None:
    for name in SOLVED:
        row, result = by_name[name], results[f"gold {name}"]
        assert result.rollout.state is State.COMPLETED, result.rollout.error
        assert result.reward == 1.0, (name, result.report)
        assert result.rollout.reward_components == {
            "resolved": 1.0,
            "patch_applied": 1.0,
            "fail_to_pass": 1.0,
            "pass_to_pass": 1.0,
        }
        assert counts(result, "FAIL_TO_PASS") == (len(json.loads(row["FAIL_TO_PASS"])), 0)
        assert result.report["base_commit"] == row["base_commit"]


def test_an_empty_patch_is_judged_without_a_sandbox(results: dict[str, Result]) -> None:
    result = results["empty"]
    assert (result.reward, result.report["status"], result.patch) == (0.0, "empty_patch", "")
    assert result.report["seconds"] == {}
    # What was not measured is not told.
    assert result.rollout.reward_components == {"resolved": 0.0}


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("breaking", ["unresolved"]),
        ("test-editing", ["unresolved"]),
        ("not applying", ["patch_not_applied"]),
        ("killing", ["tests_not_finished"]),
        ("hanging", ["tests_timed_out"]),
        ("in the way", ["patch_not_applied", "tests_not_placed"]),
    ],
)
def test_a_patch_that_does_not_resolve_is_scored_0_and_said_why(
    name: str, statuses: list[str], results: dict[str, Result]
) -> None:
    result = results[name]
    assert result.rollout.state is State.COMPLETED, result.rollout.error
    assert (result.reward, result.rollout.drop) == (0.0, False)
    assert result.report["status"] in statuses


def test_a_patch_that_breaks_a_passing_test_does_not_resolve(results: dict[str, Result]) -> None:
    result = results["breaking"]
    assert result.report["patch_applied"] is True
    assert result.rollout.reward_components["fail_to_pass"] == 1.0
    assert 0.0 < result.rollout.reward_components["pass_to_pass"] < 1.0


def test_a_patch_that_edits_the_tests_is_judged_by_the_specified_ones(
    results: dict[str, Result], by_name: dict[str, Row]
) -> None:
    result = results["test-editing"]
    assert counts(result, "FAIL_TO_PASS") == (0, len(json.loads(by_name["parse"]["FAIL_TO_PASS"])))
    assert counts(result, "PASS_TO_PASS")[1] == 0


def test_a_patch_that_does_not_apply_is_reported_as_such(results: dict[str, Result]) -> None:
    result = results["not applying"]
    assert result.rollout.reward_components == {"resolved": 0.0, "patch_applied": 0.0}
    assert "parse.py" in result.report["detail"]


def test_the_official_grading_agrees_on_every_log(
    results: dict[str, Result], by_name: dict[str, Row], tmp_path: Path
) -> None:
    for name, result in results.items():
        row = by_name[name.split()[1] if name.startswith("gold") else "parse"]
        official = official_report(row, result.patch, result.log, tmp_path / "log")
        assert official["resolved"] is result.report["resolved"], name
        if result.report["tests_status"]:
            assert official["tests_status"] == result.report["tests_status"], name
    assert ">>>>> Tests Timed Out" in results["hanging"].log


def faulty(row: Row) -> dict[str, tuple[Row, list[str]]]:
    """Rows at fault, by what is wrong, and words of the message."""
    broken_tests = row["test_patch"].replace("\n-", "\n-x").replace("\n ", "\n y", 3)
    image_words = ["swebench-nothing", "rollout images build --dataset"]
    return {
        "no image": (row | {"image": "swebench/nothing:latest"}, image_words),
        "no commit": (row | {"base_commit": "0" * 40}, ["0" * 40]),
        "no parser": (row | {"spec": row["spec"] | {"log_parser": "parse_log_x"}}, ["'parse_log_x'"]),
        "no tests": (row | {"test_patch": broken_tests}, ["test_patch does not apply to the base commit"]),
    }


def test_a_row_at_fault_is_found_out_before_the_agent_works(by_name: dict[str, Row]) -> None:
    faults = faulty(by_name["parse"])
    results = asyncio.run(judge_many([(row, "x") for row, _ in faults.values()]))
    for (name, (_, words)), result in zip(faults.items(), results, strict=True):
        error = result.rollout.error
        assert (result.rollout.state, error.blame, error.stage) == (State.FAILED, Blame.TASK, Stage.INIT), (
            name
        )
        assert all(word in error.message for word in words), error.message
