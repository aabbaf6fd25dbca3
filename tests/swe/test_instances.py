"""Instances from real projects: which patches resolve them, and that the official grading agrees."""

from __future__ import annotations

import asyncio
import difflib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollout.schema import Blame, Stage, State
from tests.helpers.swe_agents import Result, judge_many, official_report, roll_many

pytestmark = [pytest.mark.apptainer, pytest.mark.usefixtures("host")]

Row = dict[str, Any]


def apply(patch: str) -> str:
    return f"cat > /tmp/fix.diff <<'EOF_FIX'\n{patch}EOF_FIX\ngit apply /tmp/fix.diff"


def diff(path: str, old: str, new: str) -> str:
    """A patch that turns the text at a path into another one."""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


def base_text(row: Row, path: str, commit: str | None = None) -> str:
    repository = Path(row["image"] + row["spec"]["repo_dir"])
    show = ["git", "-c", "safe.directory=*", "show", f"{commit or row['base_commit']}:{path}"]
    return subprocess.run(show, cwd=repository, capture_output=True, check=True, text=True).stdout


@pytest.fixture(scope="module")
def results(host: Any, by_name: dict[str, Row]) -> dict[str, Result]:
    """One rollout of each kind; fixes by an agent, other patches as they are."""
    rows = list(by_name.values())
    by_agent = [(row, [apply(row["patch"])]) for row in rows]
    fixed = asyncio.run(roll_many([*by_agent, (rows[0], [])]))
    found = dict(zip([*(f"gold {name}" for name in by_name), "empty"], fixed, strict=True))
    parse = by_name["parse"]
    source = base_text(parse, "parse.py")
    # The fix, and percentages ten times too large.
    fixed_source = base_text(parse, "parse.py", "main")
    assert fixed_source.count("/ 100.0") == 1
    broken = diff("parse.py", source, fixed_source.replace("/ 100.0", "/ 10.0"))
    tests = base_text(parse, "tests/test_parse.py")
    given = {
        "breaking": broken,
        "test-editing": diff("tests/test_parse.py", tests, "def test_nothing(): pass\n"),
        "not applying": diff("parse.py", source.replace("import", "export"), source),
    }
    judged = asyncio.run(judge_many([(parse, patch) for patch in given.values()]))
    return found | dict(zip(given, judged, strict=True))


def statuses(result: Result, kind: str) -> tuple[int, int]:
    told = result.report["tests_status"][kind]
    return len(told["success"]), len(told["failure"])


def test_there_are_at_least_five_instances_with_tests_of_both_kinds(rows: list[Row]) -> None:
    assert len(rows) >= 5
    for row in rows:
        assert json.loads(row["FAIL_TO_PASS"]) and json.loads(row["PASS_TO_PASS"])


def test_the_gold_patch_made_by_an_agent_resolves_every_instance(
    results: dict[str, Result], by_name: dict[str, Row]
) -> None:
    for name, row in by_name.items():
        result = results[f"gold {name}"]
        assert result.rollout.state is State.COMPLETED, result.rollout.error
        assert result.reward == 1.0, (name, result.report)
        assert result.rollout.reward_components == {
            "resolved": 1.0,
            "patch_applied": 1.0,
            "fail_to_pass": 1.0,
            "pass_to_pass": 1.0,
        }
        assert statuses(result, "FAIL_TO_PASS") == (len(json.loads(row["FAIL_TO_PASS"])), 0)
        assert result.report["base_commit"] == row["base_commit"]


def test_an_empty_patch_is_judged_without_a_sandbox(results: dict[str, Result]) -> None:
    result = results["empty"]
    assert (result.reward, result.report["status"], result.patch) == (0.0, "empty_patch", "")
    assert result.report["seconds"] == {}
    # What was not measured is not told.
    assert result.rollout.reward_components == {"resolved": 0.0}


def test_a_patch_that_breaks_a_passing_test_does_not_resolve(results: dict[str, Result]) -> None:
    result = results["breaking"]
    assert (result.reward, result.report["status"]) == (0.0, "unresolved")
    assert result.report["patch_applied"] is True
    assert result.rollout.reward_components["fail_to_pass"] == 1.0
    assert 0.0 < result.rollout.reward_components["pass_to_pass"] < 1.0


def test_a_patch_that_edits_the_tests_is_judged_by_the_specified_ones(
    results: dict[str, Result], by_name: dict[str, Row]
) -> None:
    result = results["test-editing"]
    assert (result.reward, result.report["status"]) == (0.0, "unresolved")
    assert statuses(result, "FAIL_TO_PASS") == (0, len(json.loads(by_name["parse"]["FAIL_TO_PASS"])))
    assert statuses(result, "PASS_TO_PASS")[1] == 0


def test_a_patch_that_does_not_apply_is_reported_as_such(results: dict[str, Result]) -> None:
    result = results["not applying"]
    assert (result.reward, result.report["status"]) == (0.0, "patch_not_applied")
    assert result.rollout.reward_components == {"resolved": 0.0, "patch_applied": 0.0}
    assert "parse.py" in result.report["detail"]
    assert result.rollout.state is State.COMPLETED and not result.rollout.drop


def test_the_official_grading_agrees_on_every_log(
    results: dict[str, Result], by_name: dict[str, Row], tmp_path: Path
) -> None:
    for name, result in results.items():
        row = by_name[name.split()[1] if name.startswith("gold") else "parse"]
        official = official_report(row, result.patch, result.log, tmp_path / "log")
        assert official["resolved"] is result.report["resolved"], name
        if result.report["tests_status"]:
            assert official["tests_status"] == result.report["tests_status"], name


def test_tests_that_hang_are_ended_and_judged(by_name: dict[str, Row]) -> None:
    row = by_name["parse"]
    hanging = row | {
        "spec": row["spec"] | {"test_timeout_s": 1.0, "setup": [], "test_cmd": "sleep 1000; pytest"}
    }
    result = asyncio.run(judge_many([(hanging, row["patch"])]))[0]
    assert (result.reward, result.report["status"]) == (0.0, "tests_timed_out")
    assert ">>>>> Tests Timed Out" in result.log


def test_an_image_that_is_not_there_is_the_tasks_fault_and_says_how_to_make_it(
    by_name: dict[str, Row],
) -> None:
    row = by_name["parse"] | {"image": "swebench/nothing:latest"}
    rollout = asyncio.run(judge_many([(row, "x")]))[0].rollout
    assert rollout.state is State.FAILED
    assert rollout.error.blame is Blame.TASK
    assert "swebench-nothing" in rollout.error.message
    assert "rollout images build --dataset" in rollout.error.message


def test_a_base_commit_that_is_not_in_the_image_is_the_tasks_fault(by_name: dict[str, Row]) -> None:
    row = by_name["parse"] | {"base_commit": "0" * 40}
    rollout = asyncio.run(judge_many([(row, "x")]))[0].rollout
    assert rollout.error.blame is Blame.TASK
    assert "0" * 40 in rollout.error.message


def test_a_patch_that_kills_what_it_can_in_eval_does_not_get_away_from_its_reward(
    by_name: dict[str, Row],
) -> None:
    row = by_name["parse"]
    source = base_text(row, "parse.py")
    # The patch's own code ends every process it may. The sandbox's server is none of them.
    kill = "\nimport os\nfor p in os.listdir('/proc'):\n    if p.isdigit() and int(p) != os.getpid():\n"
    kill += "        try:\n            os.kill(int(p), 9)\n        except OSError:\n            pass\n"
    result = asyncio.run(judge_many([(row, diff("parse.py", source, source + kill))]))[0]
    assert result.rollout.state is State.COMPLETED, result.rollout.error
    assert (result.reward, result.rollout.drop) == (0.0, False)
    assert result.report["status"] == "tests_not_finished"


def test_a_parser_that_nobody_has_is_found_before_the_agent_works(by_name: dict[str, Row]) -> None:
    row = by_name["parse"]
    unknown = row | {"spec": row["spec"] | {"log_parser": "parse_log_x"}}
    rollout = asyncio.run(judge_many([(unknown, "x")]))[0].rollout
    assert (rollout.error.blame, rollout.error.stage) == (Blame.TASK, Stage.INIT)
    assert "'parse_log_x'" in rollout.error.message


def test_tests_that_cannot_be_put_in_place_are_found_before_the_agent_works(by_name: dict[str, Row]) -> None:
    row = by_name["parse"]
    broken = row | {"test_patch": row["test_patch"].replace("\n-", "\n-x").replace("\n ", "\n y", 3)}
    rollout = asyncio.run(judge_many([(broken, "x")]))[0].rollout
    assert (rollout.error.blame, rollout.error.stage) == (Blame.TASK, Stage.INIT)
    assert "test_patch does not apply to the base commit" in rollout.error.message


def test_a_patch_that_is_in_the_way_of_the_tests_is_scored(by_name: dict[str, Row]) -> None:
    row = by_name["parse"]
    # Not what an agent's patch can hold, for `tests` would be left out of it.
    result = asyncio.run(
        judge_many([(row, diff("tests", "", "a file\n").replace("--- a/tests", "--- /dev/null"))])
    )[0]
    assert result.rollout.state is State.COMPLETED, result.rollout.error
    assert (result.reward, result.rollout.drop) == (0.0, False)
