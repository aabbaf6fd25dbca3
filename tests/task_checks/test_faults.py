"""`rollout tasks check` finds what is wrong: each fault is planted in a task, and found in that one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollout.schema import RolloutRequest
from rollout.trajectory import Message
from sandbox.client import SandboxClient
from services.settings import Settings
from tests.helpers import swe_toy
from tests.helpers.harbor_tasks import checks, write_task
from tests.helpers.sandboxes import leftovers
from workers.handlers.base import AgentHandler, AnyTask, EvalContext, InitContext, Reward
from workers.handlers.code import Code
from workers.handlers.math import Math
from workers.handlers.swe import Swe
from workers.task_checks.checker import Case, Checker
from workers.task_checks.report import Report, Verdict

HARBOR = ("--handler", "workers.handlers.harbor:Harbor")
SECRET = "sk-judge-0123456789abcdef"
STEP = '[[steps]]\nname = "only"\n'
HIDDEN = "assert open('done.txt').read().startswith('the answer that nobody was told')\n"


def step(root: Path, **files: str) -> Path:
    """A task of one step, whose test compares a file with a text."""
    inside = {
        "instruction.md": "Write the answer into done.txt.",
        "tests/test.sh": checks("python3 /tests/check.py"),
        "tests/check.py": HIDDEN,
        "solution/solve.sh": "printf 'the answer that nobody was told' >done.txt\n",
        **files,
    }
    named = {f"steps/only/{name}": text for name, text in inside.items()}
    return write_task(root, STEP, instruction=None, test=None, solution=None, files=named)


SOLUTION = "printf 'the answer that nobody was told, at least not yet' >done.txt\n"
COMMITS = f"""\
git init -q . && git config user.email a@b.c && git config user.name a
echo 1 >a && git add a && git commit -qm first
cat >b <<'END'
{SOLUTION}END
git add b && git commit -qm later && git reset -q --hard HEAD~1
rm -f setup.sh
"""


def planted(root: Path) -> dict[str, str]:
    """Tasks with a fault each; name → verdict."""
    # Its tests compare with what the agent was given.
    data = "".join(f"{n},a row of what the agent works on\n" for n in range(9))
    step(root / "good", **{"workdir/data.csv": data, "tests/data.csv": data})
    write_task(root / "free", test="echo 1 >/logs/verifier/reward.txt")
    write_task(root / "silent", test="true")
    write_task(root / "unsolved", solution="touch other.txt; echo tried")
    write_task(root / "nothing", solution=None)
    write_task(root / "unreadable", instruction=None)
    write_task(
        root / "key", f'[environment.env]\nTOKEN = "{SECRET}"\n[verifier.env]\nJUDGE_KEY = "{SECRET}"\n'
    )
    steps = {}
    for name in ("one", "two"):
        made = {"instruction.md": f"Make {name}.txt", "solution/solve.sh": f"touch {name}.txt\n"}
        made["tests/test.sh"] = checks(f"test -f {name}.txt")
        steps |= {f"steps/{name}/{file}": text for file, text in made.items()}
    both = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    write_task(root / "steps", both, instruction=None, test=None, solution=None, files=steps)
    step(root / "leaked", **{"workdir/old/.backup.py": "import os\n" + HIDDEN})
    step(root / "later", **{"workdir/setup.sh": COMMITS, "solution/solve.sh": SOLUTION})
    program = "printf '#!/bin/sh\\necho mended\\n' >/usr/bin/file && chmod +x /usr/bin/file\n"
    write_task(root / "system", test=checks('test "$(file x)" = mended'), solution=program)
    return {
        "good": "ok",
        "steps": "ok",
        "free": "nop earns",
        "silent": "no reward",
        "unsolved": "oracle fails",
        "nothing": "not checkable",
        "unreadable": "broken",
        "key": "leaks",
        "leaked": "leaks",
        "later": "leaks",
        "system": "oracle fails",
    }


def test_each_planted_fault_of_a_harbor_task_is_found(checked, tmp_path):
    expected = planted(tmp_path / "set")
    # What is found here does not take a second look, as it does of the next test.
    result, report = checked(tmp_path / "set", *HARBOR, "--jobs", "3", "--repeat", "1")
    found = {Path(task["where"]).name: task for task in report["tasks"]}
    assert {name: task["verdict"] for name, task in found.items()} == expected, result.output
    assert result.exit_code == 1
    words = {name: "; ".join(fault["detail"] for fault in task["faults"]) for name, task in found.items()}
    assert "doing nothing earns 1" in words["free"]
    assert "the solution earns 0, not 1" in words["unsolved"]
    assert "instruction.md" in words["unreadable"]
    assert words["leaked"].startswith("steps/only/tests/check.py is in /")
    assert words["leaked"].endswith("/old/.backup.py")
    assert words["later"].startswith("steps/only/solution/solve.sh is in commit ")
    assert words["key"] == "verifier.env JUDGE_KEY is in a variable or an argument of a process"
    assert any("trust_system: true" in note for note in found["system"]["notes"])
    # The table has a row for each of these, and none for what is fine.
    table = result.stdout.splitlines()
    assert not any(line.startswith("good") for line in table)
    assert "11 tasks in " in table[-1] and "2 ok" in table[-1]
    good = found["good"]
    assert good["oracle"] == [1.0] and set(good["nop"]) == {0.0}
    assert {"init", "oracle", "verify", "total"} <= good["seconds"].keys()
    assert good["searched"]["complete"] and [leak["fault"] for leak in good["searched"]["found"]] == [False]
    assert good["notes"][0].startswith("steps/only/tests/data.csv is in /")
    Report.model_validate(report)


def test_a_harbor_task_whose_tests_do_not_agree_with_themselves_is_flaky(checked, tmp_path):
    write_task(tmp_path / "set" / "flaky", test="echo 0.1$(date +%N) >/logs/verifier/reward.txt")
    result, report = checked(tmp_path / "set", *HARBOR)
    (task,) = report["tasks"]
    assert (task["verdict"], len(task["oracle"]), result.exit_code) == ("flaky", 2, 1), result.output


DOUBLE: dict[str, Any] = {"prompt": "Double it.", "tests": [{"stdin": "2\n", "stdout": "4\n"}]}
RIGHT = "print(int(input()) * 2)"


def test_rows_of_programs_are_checked_with_the_solutions_that_they_bring(checked, rows):
    python2 = {"solutions": json.dumps(["print input() * 2", RIGHT])}
    columns = {"solutions": {"language": [2, 3], "solution": ["int main() {}", RIGHT]}}
    path = rows(
        DOUBLE | {"name": "good", "solution": RIGHT},
        DOUBLE | {"name": "other"} | python2,
        DOUBLE | {"name": "columns"} | columns,
        DOUBLE | {"name": "wrong", "canonical_solution": "print(5)"},
        DOUBLE | {"name": "bare"},
        {"name": "broken", "prompt": "Double it."},
        DOUBLE
        | {"name": "half", "solution": "print(4)", "score": "fraction", "max_reward": 0.5}
        | {"tests": [*DOUBLE["tests"], {"stdin": "3\n", "stdout": "6\n"}]},
    )
    result, report = checked(path, "--handler", "code", "--all", "--repeat", "1")
    verdicts = {task["name"]: task["verdict"] for task in report["tasks"]}
    assert verdicts == {
        "good": "ok",
        "other": "ok",
        "columns": "ok",
        "wrong": "oracle fails",
        "bare": "not checkable",
        "broken": "broken",
        "half": "ok",
    }
    assert report["verdicts"] == {"ok": 4, "oracle fails": 1, "not checkable": 1, "broken": 1}
    assert result.exit_code == 1
    wrong = next(task for task in report["tasks"] if task["name"] == "wrong")
    assert "wrong: 1" in wrong["log"]
    result, report = checked(rows(DOUBLE | {"solution": RIGHT}, DOUBLE), "--handler", "code")
    assert result.exit_code == 0, "what cannot be checked is told, and is no fault"


class CodeInTheWorkspace(Code):
    """Has the hidden tests lie about where the agent works."""

    async def init(self, ctx: InitContext[Any]) -> None:
        await super().init(ctx)
        tests = [case.model_dump() for case in ctx.task.tests]
        await ctx.sandbox.write_file("/workspace/.cache/tests.json", tests[0]["stdin"] + tests[0]["stdout"])


def test_hidden_cases_in_the_workspace_are_found(checked, rows, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    lines = "".join(f"a line of the case, number {n}\n" for n in range(5))
    long = DOUBLE | {"tests": [{"stdin": lines, "stdout": lines.upper()}], "solution": "print(input())"}
    _, report = checked(rows(long), "--handler", f"{__name__}:CodeInTheWorkspace")
    (task,) = report["tasks"]
    assert {fault["verdict"] for fault in task["faults"]} == {"oracle fails", "leaks"}
    (leak,) = task["searched"]["found"]
    assert (leak["what"], leak["where"]) == ("test 1", "is in /workspace/.cache/tests.json")


class SweWithHistory(Swe):
    """Leaves the commit of the fix in the repository."""

    async def init(self, ctx: InitContext[Any]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("workers.handlers.swe.handler.hide_future", _nothing)
            await super().init(ctx)


async def _nothing(box: SandboxClient, *_: object) -> None:
    pass


def smith(row: dict[str, Any]) -> dict[str, Any]:
    """A row of SWE-smith: the image is fine, and the patch puts the bug in."""
    bug = swe_toy.diff("calc.py", swe_toy.FIXED, swe_toy.FIXED.replace("x // 2", "x // 3"))
    tests = {"FAIL_TO_PASS": ["tests/test_calc.py::test_half"], "PASS_TO_PASS": []}
    names = {"instance_id": "smith", "repo": "toy/calc", "image_name": row["image"], "spec": row["spec"]}
    return {"problem_statement": "half(4) is 1.", "patch": bug, **tests, **names}


def r2e(row: dict[str, Any]) -> dict[str, Any]:
    """A row of R2E-Gym: the image stands at the fix, whose files are in the row."""
    git = ("git", "-c", "safe.directory=*", "-C", f"{row['image']}{swe_toy.REPO}", "rev-parse", "main")
    fix = {"header": {"file": {"path": "calc.py"}}, "new_file_content": swe_toy.FIXED}
    names = ("test_twice[1-2]", "test_twice[2-4]", "test_twice_of_zero", "test_half")
    return {
        "instance_id": "r2e",
        "repo_name": "toy",
        "docker_image": row["image"],
        "commit_hash": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "problem_statement": row["problem_statement"],
        "modified_files": ["calc.py", "tests/test_calc.py"],
        "parsed_commit_content": json.dumps({"file_diffs": [fix]}),
        "execution_result_content": {"test_file_names": ["test_1.py"], "test_file_codes": [swe_toy.TESTS]},
        "expected_output_json": dict.fromkeys(names, "PASSED"),
        "spec": {name: value for name, value in row["spec"].items() if name != "log_parser"}
        | {"test_cmd": "python3 -m pytest -rA -p no:cacheprovider r2e_tests"},
    }


def test_swe_rows_are_solved_by_their_patch_and_later_commits_are_found(checked, rows, monkeypatch):
    row = swe_toy.instance()
    monkeypatch.setenv("ROLLOUT_SANDBOX_IMAGE_ROOTS", str(Path(row["image"]).parent))
    wrong = swe_toy.CODE.replace("x + x + 1", "x + x + 2")
    other = row | {"instance_id": "wrong", "patch": swe_toy.diff("calc.py", swe_toy.CODE, wrong)}
    bare = {name: value for name, value in row.items() if name != "patch"} | {"instance_id": "bare"}
    given = rows(row, other, bare, smith(row), r2e(row))
    _, report = checked(given, "--handler", "swe", "--repeat", "1")
    found = [task["verdict"] for task in report["tasks"]]
    assert found == ["ok", "oracle fails", "not checkable", "ok", "ok"], report
    _, report = checked(rows(row), "--handler", f"{__name__}:SweWithHistory", "--repeat", "1")
    (task,) = report["tasks"]
    assert task["verdict"] == "leaks"
    assert task["faults"][0]["detail"].startswith("later commits: /repos/calc has 1 commits")


class Fickle(AgentHandler[AnyTask]):
    """Earns what nobody can foresee: one after the other."""

    name = "fickle"
    given = iter([1.0, 0.0, 0.25])

    def prompt(self, task: AnyTask) -> list[Message]:
        return [Message(role="user", content="?")]

    def solution(self, task: AnyTask) -> str:
        return "the answer"

    async def evaluate(self, ctx: EvalContext[AnyTask]) -> Reward:
        right = ctx.trajectory.final_text() == "the answer"
        return Reward(next(type(self).given) if right else 0.5)


def test_a_score_by_chance_is_flaky_and_a_part_for_nothing_is_told(checked, rows):
    result, report = checked(rows({"id": 7}), "--handler", f"{__name__}:Fickle", "--repeat", "3")
    (task,) = report["tasks"]
    assert (task["verdict"], task["oracle"], task["nop"]) == ("flaky", [1.0, 0.0, 0.25], [0.5, 0.5])
    assert task["notes"] == ["doing nothing earns 0.5"]
    assert "the solution earned 1, 0, 0.25" in result.stdout and result.stdout.split()[8:9] != ["ok"]


@pytest.mark.parametrize(
    ("handler", "task"),
    [
        ("math", {"problem": "1 + 1", "answer": ["\\frac{4}{2}", "3"]}),
        ("math", {"problem": "1 + 1", "answer": "\\boxed{2}"}),
        ("stem", {"problem": "Primes below 6?", "answer": ["2", "3", "5"]}),
        ("stem", {"problem": "Which?", "choices": ["a", "b", "c"], "answer": ["A", "C"]}),
        ("stem", {"problem": "How fast?", "answer": "12 m/s"}),
        ("calculator", {"question": "1 plus 2", "answer": "3"}),
        ("reasoning_gym", {"dataset": "countdown", "seed": 42, "index": 3, "config": {"max_numbers": 4}}),
    ],
)
def test_answers_are_their_own_solution(checked, rows, handler, task):
    result, report = checked(rows(task), "--handler", handler)
    assert [found["verdict"] for found in report["tasks"]] == ["ok"], result.output
    assert report["tasks"][0]["oracle"] == [1.0, 1.0] and result.exit_code == 0


def test_a_sample_is_the_same_for_a_seed(checked, rows):
    path = rows(*({"problem": f"{n} plus 0", "answer": str(n)} for n in range(12)))
    names = []
    for seed in ("1", "1", "2"):
        _, report = checked(path, "--handler", "math", "--sample", "3", "--seed", seed, "--repeat", "1")
        names.append([task["where"] for task in report["tasks"]])
    assert len(names[0]) == 3 and names[0] == names[1] != names[2]


def test_what_it_cannot_use_it_says(tmp_path, checked):
    from click.testing import CliRunner

    from workers.task_checks.commands import check

    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for arguments, words, code in (
        ([str(empty)], "give --handler", 2),
        ([str(empty), "--handler", "code"], "holds no task", 1),
        ([str(empty), "--handler", "code", "--limits", '{"max_turn": 1}'], "--limits: max_turn", 2),
        ([str(empty), "--handler", "nowhere"], "nowhere", 1),
    ):
        result = CliRunner().invoke(check, arguments)
        assert (result.exit_code, words in result.output) == (code, True), result.output


def test_ctrl_c_ends_it_and_leaves_no_sandbox(tmp_path):
    state = Path(os.environ["ROLLOUT_SANDBOX_DIR"])
    path, report = tmp_path / "rows.jsonl", tmp_path / "report.json"
    slow = DOUBLE | {"solution": f"import time\ntime.sleep(60)\n{RIGHT}", "time_limit_s": 90}
    path.write_text(json.dumps(slow) + "\n")
    argv = [sys.executable, "-m", "rollout.cli", "tasks", "check", str(path), "--handler", "code"]
    process = subprocess.Popen([*argv, "--json", str(report)], stdout=subprocess.PIPE, text=True)
    while not list((state / "scratch").glob("*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted before all were checked" in shown, shown
    assert json.loads(report.read_text())["interrupted"]
    assert leftovers(state) == []


def test_what_was_checked_before_the_end_is_in_the_report():
    quick = Case("1", RolloutRequest(handler="math", task={"problem": "1 + 1", "answer": "2"}))
    slow = Case("2", RolloutRequest(handler="math", task={"problem": "1 + 1", "answer": "3"}))
    report = Report(source="", handler="math")
    checker = Checker(Math(), Settings(), repeat=1)

    def cases():
        yield quick
        task.cancel()
        yield slow

    async def run() -> None:
        nonlocal task
        task = asyncio.create_task(checker.check_all(cases(), report))
        await task

    task: asyncio.Task[None]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert [(found.where, found.verdict) for found in report.tasks] == [("1", Verdict.OK)]
    assert report.verdicts == {"ok": 1}
