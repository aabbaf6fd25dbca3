"""The built-in handlers through the whole service, driven by a policy that plays fixed lists of actions."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.schema import Rollout, RolloutRequest, State
from tests.helpers.blocking import SyncHostClient
from tests.helpers.fake_engine import fake_engine
from tests.helpers.policy_script import VARIABLE, Plans
from tests.helpers.sandboxes import leftovers, stop_host
from tests.helpers.stack import Stack, wait_until
from tests.helpers.swe_instances import instances
from workers.agent.replay import Action, Call


class Service:
    """A stack whose only backend plays plans."""

    def __init__(self, stack: Stack, plans: Plans) -> None:
        self.stack = stack
        self._plans = plans
        self._number = 0

    def request(
        self, handler: str, field: str, task: dict[str, Any], *actions: Action | str, **more: Any
    ) -> RolloutRequest:
        """A task whose policy plays these actions; the field gets the plan's name."""
        self._number += 1
        turns = [Action(content=one) if isinstance(one, str) else one for one in actions]
        words = self._plans.add(f"{handler.replace('_', '-')}-{self._number}", turns)
        task = {**task, field: f"{task[field]}\n({words})"}
        return RolloutRequest(handler=handler, task=task, **more)

    def run(
        self, handler: str, field: str, task: dict[str, Any], *actions: Action | str, **more: Any
    ) -> list[Rollout]:
        """Rollouts of such a request."""
        return self.stack.client.run([self.request(handler, field, task, *actions, **more)])


def use(tool: str, **arguments: Any) -> Action:
    """A turn that calls one tool."""
    return Action(tool_calls=[Call(name=tool, arguments=arguments)])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    plans = Plans(tmp_path_factory.mktemp("plans"))
    os.environ[VARIABLE] = str(plans.directory)
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        try:
            with (
                fake_engine(script="tests.helpers.policy_script:play", max_model_len=65536) as engine,
                Stack(tmp_path_factory.mktemp("stack"), Path(sandbox_dir)) as stack,
            ):
                stack.start_worker("init,run,eval", "all")
                stack.client.add_backend(engine.url)
                yield Service(stack, plans)
                assert leftovers(stack.sandbox_dir) == []
        finally:
            stop_host(Path(sandbox_dir))
            del os.environ[VARIABLE]


DOUBLE = {"prompt": "Double the number.", "tests": [{"stdin": "2\n", "stdout": "4\n"}]}


def test_code_is_written_tried_and_judged(service):
    found = service.run(
        "code",
        "prompt",
        DOUBLE,
        use("think", thought="Read, double, print."),
        use(
            "str_replace_editor",
            command="create",
            path="/workspace/solution.py",
            file_text="print(input() * 2)",
        ),
        use("execute_bash", command="echo 2 | python3 solution.py"),
        use(
            "str_replace_editor",
            command="str_replace",
            path="/workspace/solution.py",
            old_str="input()",
            new_str="int(input())",
        ),
        use("finish", message="done"),
        n=2,
    )
    assert [(one.state, one.reward) for one in found] == [(State.COMPLETED, 1.0)] * 2, found[0].error
    said = [message.text for message in found[0].trajectory.messages if message.role == "tool"]
    assert any("22" in text for text in said), "the first try printed 22"
    assert found[0].trajectory.turns == 5
    assert found[0].trajectory.artifacts["solution.py"] == "print(int(input()) * 2)"


def test_code_that_is_only_said_is_judged_too(service):
    (right,) = service.run("code_text", "prompt", DOUBLE, "```python\nprint(int(input()) * 2)\n```")
    (wrong,) = service.run("code_text", "prompt", DOUBLE, "```python\nprint(5)\n```")
    assert (right.reward, wrong.reward) == (1.0, 0.0) and not wrong.drop


def test_mathematics_is_compared_by_value(service):
    task = {"problem": "Solve $2x^2 = x + 1$.", "answer": r"\{1, -\frac{1}{2}\}"}
    (right,) = service.run("math", "problem", task, r"So \boxed{x = -0.5 \text{ or } x = 1}.")
    (wrong,) = service.run("math", "problem", task, r"So \boxed{x = 0.5 \text{ or } x = 1}.")
    (silent,) = service.run("math", "prompt", {"prompt": "6 times 7?", "answer": 42}, "It is 42.")
    assert (right.reward, wrong.reward, silent.reward) == (1.0, 0.0, 0.0), right.error
    assert [one.reward_components["answered"] for one in (right, wrong, silent)] == [1.0, 1.0, 0.0]
    (broken,) = service.run("math", "problem", {"problem": "?", "answer": r"\frac{1}{"}, r"\boxed{1}")
    assert broken.state is State.FAILED and broken.error.blame == "task" and broken.reward is None


def test_mathematics_is_computed_in_a_sandbox(service):
    (found,) = service.run(
        "math_tools",
        "problem",
        {"problem": "What is the sum of the primes below 20?", "answer": 77},
        use("think", thought="List them."),
        use("execute_ipython_cell", code="sum(p for p in range(2, 20) if all(p % q for q in range(2, p)))"),
        use("finish", message="The answer is 77"),
    )
    assert (found.state, found.reward) == (State.COMPLETED, 1.0), found.error


def test_science_is_answered_by_a_choice_or_with_a_unit(service):
    choice = {"question": "Which planet is the largest?", "choices": ["Mars", "Jupiter"], "answer": "B"}
    (right,) = service.run("stem", "question", choice, r"\boxed{Jupiter}")
    (wrong,) = service.run("stem", "question", choice, r"\boxed{A}")
    assert (right.reward, wrong.reward) == (1.0, 0.0), right.error
    (found,) = service.run(
        "stem_tools",
        "problem",
        {"problem": "How far does light come in 1 µs?", "answer": "299.8 m"},
        use("execute_bash", command="python3 -c 'print(299792458 / 1e9)'"),
        use("finish", message="0.2998 km"),
    )
    assert (found.state, found.reward) == (State.COMPLETED, 1.0), found.error


def test_a_puzzle_of_reasoning_gym_is_scored_by_the_package(service):
    entry = {"question": "4 + 3 = ?", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}
    (right,) = service.run("reasoning_gym", "question", entry, "<answer>7</answer>")
    (wrong,) = service.run("reasoning_gym", "question", entry, "<answer>8</answer>")
    assert (right.reward, wrong.reward) == (1.0, 0.0), right.error


def fix(row: dict[str, Any]) -> Action:
    """A turn that applies the reference fix."""
    return use("execute_bash", command=f"git apply - <<'EOF_FIX'\n{row['patch']}EOF_FIX")


def test_an_issue_of_a_repository_is_fixed_and_judged_by_its_tests(service):
    row = instances()[0]
    (fixed,) = service.run("swe", "problem_statement", row, fix(row), use("finish", message="done"))
    (idle,) = service.run("swe", "problem_statement", row, use("finish", message="done"))
    assert (fixed.reward, idle.reward) == (1.0, 0.0), (fixed.error, idle.error)
    assert "parse.py" in fixed.trajectory.artifacts["patch"]
    reports = [json.loads(one.trajectory.artifacts["report"])["status"] for one in (fixed, idle)]
    assert reports == ["resolved", "empty_patch"]


def test_a_cancel_while_tests_run_ends_the_fresh_sandbox_too(service):
    row = instances()[0]
    hanging = {**row, "spec": {**row["spec"], "test_cmd": "sleep 1000; pytest"}}
    client, host = service.stack.client, SyncHostClient(service.stack.sandbox_dir)
    request = service.request("swe", "problem_statement", hanging, fix(row), use("finish", message="done"))
    rollout_id = client.submit(request)[0].id

    def judging() -> bool:
        return client.get(rollout_id).state is State.EVALUATING and len(host.list()) == 2

    wait_until(judging, 120, "EVAL has its sandbox")
    client.cancel(rollout_id)
    assert client.get(rollout_id, wait=60).state is State.CANCELLED
    wait_until(lambda: host.list() == [], 60, "both sandboxes are gone")
