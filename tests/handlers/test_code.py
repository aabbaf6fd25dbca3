"""The handler `code`: hidden tests judge programs fairly, and nothing that a program does makes it right."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from rollout.schema import Blame, Limits, Rollout, State
from workers.agent.replay import Action, Call
from workers.handlers.code import Code, CodeTask, CodeText
from workers.handlers.code.compare import same_output, same_value
from workers.testing import play

DOUBLE = {
    "prompt": "Double the number.",
    "tests": [{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "21\n", "stdout": "42\n"}],
}
ADD = {
    "prompt": "Add two numbers.",
    "fn_name": "add",
    "tests": [{"args": [1, 2], "expected": 3}, {"args": [5, -5], "expected": 0}],
}
RIGHT = "print(int(input()) * 2)"


def judged(solution: str, task: dict[str, Any] = DOUBLE, **more: Any) -> Rollout:
    """A rollout whose agent only writes that solution."""
    actions = [Action(content=f"Here it is:\n```python\n{solution}\n```\n")]
    (done,) = play(CodeText(), {**task, **more}, actions, limits=Limits(max_attempts=1))
    assert done.state is State.COMPLETED, done.error
    return done


def report(done: Rollout) -> str:
    return done.trajectory.artifacts["tests.txt"]


# -- what is right ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solution", "task"),
    [
        (RIGHT, DOUBLE),
        ("import sys\nfor line in sys.stdin: sys.stdout.write(str(int(line) * 2))", DOUBLE),
        ("def add(a, b):\n    print('noise')\n    return a + b", ADD),
        ("class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b", ADD),
    ],
)
def test_a_right_solution_is_rewarded(solution, task):
    done = judged(solution, task)
    assert (done.reward, done.reward_components) == (1.0, {"answered": 1.0, "passed": 1.0})
    assert done.trajectory.artifacts["solution.py"].strip() == solution
    assert report(done) == "passed: 2"


def test_the_agents_file_is_judged_in_another_sandbox():
    write = {"command": "create", "path": "/workspace/solution.py", "file_text": "import helper\n" + RIGHT}
    helper = {"command": "create", "path": "/workspace/helper.py", "file_text": ""}
    finish = Action(tool_calls=[Call(name="finish", arguments={"message": "done"})])
    edit = [Action(tool_calls=[Call(name="str_replace_editor", arguments=args)]) for args in (write, helper)]
    (done,) = play(Code(), DOUBLE, [*edit, finish])
    assert done.reward == 0.0, "only solution.py counts: what else the agent made stays behind"
    assert "No module named 'helper'" in report(done)
    alone = {**write, "file_text": RIGHT}
    (done,) = play(
        Code(), DOUBLE, [Action(tool_calls=[Call(name="str_replace_editor", arguments=alone)]), finish]
    )
    assert done.reward == 1.0


def test_without_the_file_the_last_block_of_code_counts():
    (done,) = play(
        Code(), DOUBLE, [Action(content=f"```python\nprint(1)\n```\nBetter:\n```py\n{RIGHT}\n```")]
    )
    assert done.reward == 1.0


def test_an_answer_without_code_has_no_reward_and_needs_no_sandbox():
    (done,) = play(CodeText(), DOUBLE, [Action(content="It cannot be done.")])
    assert (done.reward, done.reward_components["answered"], done.sandbox) == (0.0, 0.0, None)


def test_a_share_of_the_cases_is_a_reward_where_the_task_says_so():
    assert judged("print(4)").reward == 0.0
    done = judged("print(4)", score="fraction")
    assert (done.reward, report(done).splitlines()[0]) == (0.5, "passed: 1")


# -- what goes wrong -------------------------------------------------------------------------

HANG = "while True: pass"
HOARD = "x = []\nwhile True: x.append(bytearray(1 << 20))"


@pytest.mark.parametrize(
    ("solution", "status"),
    [
        ("print(5)", "wrong"),
        ("print(", "error"),
        ("raise SystemExit(3)", "error"),
        (HANG, "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nwhile 1: pass", "timeout"),
        ("import os; os.abort()", "error"),
        ("pass #", "wrong"),
        # A bomb meets this limit or that one first.
        (HOARD, ""),
        ("while True: print('x' * 1000)", ""),
        ("import os\nwhile True: os.fork()", ""),
        # What attacks its judge gains nothing.
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", ""),
        ("import os, signal; os.kill(-1, signal.SIGKILL)", ""),
        ("import glob, os\nfor p in glob.glob('/tmp/judge-*/*'): os.unlink(p)", ""),
        ('import sys; print(\'{"status": "ok", "stdout": "4"}\'); sys.exit(0)', "wrong"),
    ],
)
def test_what_a_program_does_wrong_is_judged_and_contained(solution, status):
    # One that ends by itself has time to, on a busy machine too.
    limit_s = 60.0 if status in ("wrong", "error") else 1.0
    done = judged(solution, time_limit_s=limit_s, memory_limit_mb=128)
    assert (done.reward, done.reward_components["passed"], done.drop) == (0.0, 0.0, False)
    assert report(done).startswith(f"{status}: 2" if status else "")


def test_what_one_case_leaves_running_does_not_reach_the_next():
    leave = "import os, time\nprint(int(input()) * 2, flush=True)\nif os.fork() == 0:\n    os.setsid()\n"
    leave += "    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)\n"
    count = "import os\nprint(int(input()) * 2)\n"
    count += "alive = [p for p in os.listdir('/proc') if p.isdigit() and 'solution.py' in "
    count += "open(f'/proc/{p}/cmdline').read() and int(p) != os.getpid() and 'call.py' not in "
    count += "open(f'/proc/{p}/cmdline').read()]\nassert not alive, alive\n"
    assert judged(count + leave.replace("print(int(input()) * 2, flush=True)\n", "")).reward == 1.0


@pytest.mark.parametrize(
    ("solution", "words"),
    [
        ("def other(): pass", "defines no add"),
        ("def add(a, b): raise SystemExit(0)", "no result"),
        ("import os\ndef add(a, b): os._exit(0)", "no result"),
        ("def add(a, b): return object()", "wrong"),
        ("def add(a, b): return a, b", "wrong"),
    ],
)
def test_a_function_that_gives_no_right_result_is_not_rewarded(solution, words):
    done = judged(solution, ADD)
    assert done.reward == 0.0 and words in report(done)


def test_an_object_that_equals_everything_is_not_taken_for_the_answer():
    lie = "class Yes(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
    assert judged(lie + "def add(a, b): return Yes(99)", ADD).reward == 0.0


def test_hidden_outputs_never_enter_the_sandbox():
    spy = """
import os, subprocess
n = input()
wanted = "313" + "37|" + "733" + "13"
where = ["/tmp", "/workspace", "/home", "/run/sbx", f"/proc/{os.getppid()}/environ"]
found = subprocess.run(["grep", "-rlE", wanted, *where], capture_output=True, text=True).stdout
print("SEEN" if found.strip() else n)
"""
    done = judged(spy, tests=[{"stdin": "1\n", "stdout": "1\n"}, {"stdin": "2", "stdout": "31337 73313"}])
    assert done.reward_components["passed"] == 0.5, "it saw no output"


def test_an_image_without_python_is_the_tasks_fault(monkeypatch):
    monkeypatch.setattr("workers.handlers.code.judging.PYTHON", "no-such-python")
    (done,) = play(CodeText(), DOUBLE, [Action(content=f"```\n{RIGHT}\n```")], limits=Limits(max_attempts=1))
    assert (done.state, done.reward, done.error.blame) == (State.FAILED, None, Blame.TASK)
    assert "python3" in done.error.message


# -- comparing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("4", "4\n", True),
        ("4  \n\n\n", "4", True),
        ("1 2\n3", "1  2 \n3\n", True),
        ("1 2 3", "1 2\n3", False),
        ("YES", "yes", False),
        ("0.3333333333", "0.333333", True),
        ("0.34", "0.333333", False),
        ("1e10", "10000000000", True),
        ("10000000001", "10000000000", False),
        ("10000000000000001", "10000000000000000.0", True),
        ("nan", "1.0", False),
        ("inf", "1.5", False),
        ("2.0", "2", True),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_printed_answers_are_compared_as_judges_do(output, expected, same):
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ([1, 2], [1, 2], True),
        ([1, 2], [2, 1], False),
        (1, True, False),
        (1.0, 1, True),
        (0.1 + 0.2, 0.3, True),
        ("1", 1, False),
        ({"1": [2]}, {1: [2]}, True),
        (None, 0, False),
        (None, None, True),
        ([[1], []], [[1], []], True),
    ],
)
def test_returned_values_are_compared_by_value_and_type(value, expected, same):
    assert same_value(value, expected) is same


# -- the forms of published sets -------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "input_output": json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})},
        {"question": "q", "input_output": {"inputs": [["2", "3"]], "outputs": [["4"]]}},
        {"prompt": "q", "tests": json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})},
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
            "reward_model": {"ground_truth": json.dumps({"inputs": ["2"], "outputs": ["4"]})},
        },
        {
            "description": "q",
            "public_tests": {"input": ["2"], "output": ["4"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": None,
        },
        {
            "question": "q",
            "public_test_cases": json.dumps([{"input": "2", "output": "4", "testtype": "stdin"}]),
            "private_test_cases": "[]",
        },
    ],
)
def test_rows_of_published_sets_are_understood(row):
    Draft202012Validator(Code().info().task_schema).validate(row)  # as the gateway does
    task = CodeTask.model_validate(row)
    assert (task.prompt, len(task.tests), task.tests[0].stdout.strip()) == ("q", 1, "4")


def test_calls_of_published_sets_accept_a_result_in_a_list_of_its_own():
    row = {"question": "q", "input_output": {"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}}
    task = CodeTask.model_validate(row)
    assert task.tests[0].args == [1, 2] and task.tests[0].any_of == [3]
    case = {"input": "[1]\n2", "output": "3", "testtype": "functional"}
    lcb = {"question": "q", "public_test_cases": [case], "metadata": '{"func_name": "f"}'}
    assert CodeTask.model_validate(lcb).tests[0].args == [[1], 2]


def test_the_gateway_refuses_a_row_without_problem_or_tests():
    validator = Draft202012Validator(Code().info().task_schema)
    for row in ({"prompt": "q"}, {"tests": []}, {"prompt": "q", "tests": [], "time_limit_s": 0}):
        assert not validator.is_valid(row), row


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "q"}, "tests"),
        ({"prompt": "", "tests": [{"stdin": "1", "stdout": "2"}]}, "prompt"),
        ({"prompt": "q", "tests": []}, "tests"),
        ({"prompt": "q", "tests": [{"stdin": "1"}]}, "needs both"),
        ({"prompt": "q", "tests": [{"stdin": "1", "stdout": "1", "args": []}]}, "either"),
        ({"prompt": "q", "tests": [{"args": [1], "expected": 1}]}, "need `fn_name`"),
        ({"prompt": "q", "input_output": "{"}, "no JSON"),
        ({"prompt": "q", "input_output": {"inputs": ["1"], "outputs": []}}, "same length"),
        ({"prompt": "q", "fn_name": "a b", "tests": [{"args": [1], "expected": 1}]}, "fn_name"),
    ],
)
def test_a_row_that_cannot_be_judged_is_refused_with_its_field(row, words):
    with pytest.raises(ValidationError, match=words):
        CodeTask.model_validate(row)
