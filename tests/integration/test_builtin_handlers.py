"""The built-in handlers through the whole service, driven by a policy that plays fixed lists of actions."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.schema import Rollout, RolloutRequest, State
from rollout.suites import harbor
from tests.helpers import swe_toy
from tests.helpers.blocking import SyncHostClient
from tests.helpers.fake_engine import fake_engine
from tests.helpers.policy_script import VARIABLE, Plans
from tests.helpers.sandboxes import leftovers, stop_host
from tests.helpers.stack import Stack, wait_until
from tests.unit.test_harbor_directory import PLAIN, make
from workers.agent.replay import Action, Call


class Service:
    """A stack whose only backend plays plans."""

    def __init__(self, stack: Stack, plans: Plans) -> None:
        self.stack = stack
        self._plans = plans
        self._number = 0

    def request(
        self, handler: str, field: str, task: dict[str, Any], *actions: Action | str
    ) -> RolloutRequest:
        """A task whose policy plays these actions; the field gets the plan's name."""
        task = {**task, field: f"{task[field]}\n({self.plan(handler, *actions)})"}
        return RolloutRequest(handler=handler, task=task)

    def plan(self, handler: str, *actions: Action | str) -> str:
        """The words by which a prompt has the policy play these actions."""
        self._number += 1
        turns = [Action(content=turn) if isinstance(turn, str) else turn for turn in actions]
        return self._plans.add(f"{handler.replace('_', '-')}-{self._number}", turns)


def use(tool: str, **arguments: Any) -> Action:
    """A turn that calls one tool."""
    return Action(tool_calls=[Call(name=tool, arguments=arguments)])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    plans = Plans(tmp_path_factory.mktemp("plans"))
    with (
        tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(VARIABLE, str(plans.directory))
        patch.setenv("ROLLOUT_SANDBOX_IMAGE_ROOTS", str(swe_toy.image().parent))
        try:
            with (
                fake_engine(script="tests.helpers.policy_script:play", max_model_len=65536) as engine,
                Stack(tmp_path_factory.mktemp("stack"), Path(sandbox_dir)) as stack,
            ):
                stack.start_worker("init,run,eval", "all")
                stack.client.add_backend(engine.url)
                yield Service(stack, plans)
                wait_until(lambda: leftovers(stack.sandbox_dir) == [], 120, "all sandboxes to be gone")
        finally:
            stop_host(Path(sandbox_dir))


DOUBLE = {"prompt": "Double the number.", "tests": [{"stdin": "2\n", "stdout": "4\n"}]}
FIRST_TRY, RIGHT = "print(input() * 2)", "print(int(input()) * 2)"
ROOTS = {"problem": "Solve $2x^2 = x + 1$.", "answer": r"\{1, -\frac{1}{2}\}"}
PRIMES = "sum(p for p in range(2, 20) if all(p % q for q in range(2, p)))"
PLANETS = {"question": "Which planet is the largest?", "choices": ["Mars", "Jupiter"], "answer": "B"}
SUM = {"question": "4 + 3 = ?", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}
FILE = "/workspace/solution.py"
CASES: dict[str, tuple[float, str, str, dict[str, Any], list[Action | str]]] = {
    "code is written, tried and judged": (
        1.0,
        "code",
        "prompt",
        DOUBLE,
        [
            use("think", thought="Read, double, print."),
            use("str_replace_editor", command="create", path=FILE, file_text=FIRST_TRY),
            use("execute_bash", command="echo 2 | python3 solution.py"),
            use("str_replace_editor", command="str_replace", path=FILE, old_str=FIRST_TRY, new_str=RIGHT),
            use("finish", message="done"),
        ],
    ),
    "code that is only said": (1.0, "code_text", "prompt", DOUBLE, [f"```python\n{RIGHT}\n```"]),
    "code that is wrong": (0.0, "code_text", "prompt", DOUBLE, ["```python\nprint(5)\n```"]),
    "mathematics": (1.0, "math", "problem", ROOTS, [r"So \boxed{x = -0.5 \text{ or } x = 1}."]),
    "mathematics that is wrong": (0.0, "math", "problem", ROOTS, [r"\boxed{x = 0.5 \text{ or } x = 1}"]),
    "mathematics in a sandbox": (
        1.0,
        "math_tools",
        "problem",
        {"problem": "What is the sum of the primes below 20?", "answer": 77},
        [
            use("think", thought="List them."),
            use("execute_ipython_cell", code=PRIMES),
            use("finish", message="The answer is 77"),
        ],
    ),
    "science by a choice": (1.0, "stem", "question", PLANETS, [r"\boxed{Jupiter}"]),
    "science that is wrong": (0.0, "stem", "question", PLANETS, [r"\boxed{A}"]),
    "science with a unit": (
        1.0,
        "stem_tools",
        "problem",
        {"problem": "How far does light come in 1 µs?", "answer": "299.8 m"},
        [
            use("execute_bash", command="python3 -c 'print(299792458 / 1e9)'"),
            use("finish", message="0.2998 km"),
        ],
    ),
    "a puzzle": (1.0, "reasoning_gym", "question", SUM, ["<answer>7</answer>"]),
    "a puzzle that is wrong": (0.0, "reasoning_gym", "question", SUM, ["<answer>8</answer>"]),
}


@pytest.fixture(scope="module")
def results(service: Service) -> dict[str, Rollout]:
    """A rollout of each case, all at once, and two of `swe`."""
    row = swe_toy.instance()
    cases = CASES | {
        "a fixed issue": (1.0, "swe", "problem_statement", row, [fix(row), use("finish", message="done")]),
        "an idle agent": (0.0, "swe", "problem_statement", row, [use("finish", message="done")]),
    }
    requests = [service.request(*case, *actions) for _, *case, actions in cases.values()]
    return dict(zip(cases, service.stack.client.run(requests), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_built_in_handler_gives_its_reward_through_the_whole_service(name, results):
    assert (results[name].state, results[name].reward) == (State.COMPLETED, CASES[name][0]), results[
        name
    ].error
    assert not results[name].drop


def test_what_the_agent_tried_and_left_is_in_the_trajectory(results):
    trajectory = results["code is written, tried and judged"].trajectory
    shown = [message.text for message in trajectory.messages if message.role == "tool"]
    assert any("22" in text for text in shown), "the first try printed 22"
    assert (trajectory.turns, trajectory.artifacts["solution.py"]) == (5, RIGHT)


def fix(row: dict[str, Any]) -> Action:
    """A turn that applies the reference fix."""
    return use("execute_bash", command=f"git apply - <<'EOF_FIX'\n{row['patch']}EOF_FIX")


def test_an_issue_of_a_repository_is_fixed_and_judged_by_its_tests(results):
    fixed, idle = results["a fixed issue"], results["an idle agent"]
    assert (fixed.reward, idle.reward) == (1.0, 0.0), (fixed.error, idle.error)
    assert "calc.py" in fixed.trajectory.artifacts["patch"]
    reports = [json.loads(rollout.trajectory.artifacts["report"])["status"] for rollout in (fixed, idle)]
    assert reports == ["resolved", "empty_patch"]


def test_a_cancel_while_tests_run_ends_the_fresh_sandbox_too(service):
    row = swe_toy.instance()
    hanging = {**row, "spec": {**row["spec"], "test_cmd": "sleep 1000; pytest"}}
    client, host = service.stack.client, SyncHostClient(service.stack.sandbox_dir)
    request = service.request("swe", "problem_statement", hanging, fix(row), use("finish", message="done"))
    rollout_id = client.submit(request)[0].id

    def judging() -> bool:
        return client.get(rollout_id).state is State.EVALUATING and len(host.list()) == 2

    wait_until(judging, 120, "EVAL has its sandbox")
    client.cancel(rollout_id)
    assert client.get(rollout_id, wait=60).state is State.CANCELLED
    wait_until(lambda: host.list() == [], 120, "both sandboxes are gone")


def test_a_suite_of_directories_reaches_the_workers_and_its_tests_score_it(service: Service, tmp_path: Path):
    score = "worth=0.25; cmp /tests/wanted note && worth=1; echo $worth > /logs/verifier/reward.txt\n"
    for name, written in (("right", "yes"), ("wrong", "no")):
        words = service.plan("harbor", use("execute_bash", command=f"echo {written} > note"), "Done.")
        files = {"instruction.md": f"Write yes into note.\n({words})\n", "tests/test.sh": score}
        toml = f'[task]\nname = "acme/{name}"\n{PLAIN}workdir = "/tmp"\n'
        make(tmp_path / name, toml, **files, **{"tests/wanted": "yes\n"})
    client = service.stack.client
    ended = client.run(harbor.requests(tmp_path, client, n=2))
    assert [rollout.state for rollout in ended] == [State.COMPLETED] * 4, [rollout.error for rollout in ended]
    rewards = [(rollout.request.task["name"], rollout.reward) for rollout in ended]
    assert rewards == [*[("acme/right", 1.0)] * 2, *[("acme/wrong", 0.25)] * 2]
    assert not client.put_bundle(next(harbor.tasks(tmp_path)))


def test_forks_of_built_in_handlers_are_scored_as_what_they_left(service: Service, tmp_path: Path):
    """INIT of a fork is not the handler's: what it prepared came with the sandbox."""
    row, client = swe_toy.instance(), service.stack.client
    right = "cmp /tests/wanted note && worth=1; echo ${worth:-0} > /logs/verifier/reward.txt\n"
    words = service.plan("harbor", use("execute_bash", command="echo yes > note"), "Done.")
    files = {"instruction.md": f"Write yes into note.\n({words})\n", "tests/test.sh": right}
    make(
        tmp_path, f'[task]\nname = "acme/t"\n{PLAIN}workdir = "/tmp"\n', **files, **{"tests/wanted": "yes\n"}
    )
    cases = [CASES["code is written, tried and judged"], CASES["mathematics in a sandbox"]]
    cases.append((1.0, "swe", "problem_statement", row, [fix(row), use("finish", message="done")]))
    requests = [service.request(*case, *actions) for _, *case, actions in cases]
    requests += harbor.requests(tmp_path, client)
    asked = [request.model_copy(update={"checkpoints": "every_turn"}) for request in requests]
    sources = client.run(asked)
    ids = [client.fork(source.id, 1)[0].id for source in sources]
    for source, rollout_id in zip(sources, ids, strict=True):
        item = client.get(rollout_id, wait=60)
        assert (item.state, item.reward) == (State.COMPLETED, 1.0) == (source.state, source.reward), (
            item.error
        )
        branch = item.trajectory.branch
        assert (branch.rollout, branch.turn) == (source.id, 1)
        assert item.trajectory.turns == source.trajectory.turns - 1
        assert item.trajectory.artifacts.get("patch") == source.trajectory.artifacts.get("patch")
