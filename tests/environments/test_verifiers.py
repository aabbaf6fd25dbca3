"""Tasksets of verifiers, and environments of its releases before 0.4, by the package's own scoring."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.schema import State
from tests.helpers.sandboxes import own_sandboxes, require_apptainer
from workers.agent.replay import Action, Call
from workers.handlers.environments import process
from workers.handlers.environments.commands import rows_of
from workers.handlers.environments.suites import Verifiers
from workers.testing import play

TASKSET = '''
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class Tools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    async def setup_task(self, task):
        self.answer = task.answer

    @vf.tool
    def look(self, place: str) -> str:
        """Look at a place."""
        return f"at {place}: {self.answer}"

class Config(vf.TasksetConfig):
    broken: str = ""

class Words(vf.Task[Data, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3

    @vf.reward(weight=2.0)
    async def right(self, trace, task) -> float:
        if task.name == "broken":
            raise RuntimeError("no judgement today")
        return float("nan") if task.name == "nan" else float(task.answer in trace.last_reply)

    @vf.metric
    async def looked(self, trace) -> float:
        return float(len(trace.tool_messages))

class Files(Words):
    NEEDS_CONTAINER = True

    @classmethod
    def toolsets(cls, config):
        return []

    async def setup(self, trace, runtime):
        await runtime.write("note.txt", b"from setup")

    async def finalize(self, trace, runtime):
        shown = await runtime.run(["sh", "-c", "cat answer.txt; exit 3"], {})
        trace.info["shown"] = f"{shown.exit_code}: {shown.stdout}"

    @vf.reward(weight=2.0)
    async def right(self, trace, runtime) -> float:
        try:
            said = (await runtime.read("answer.txt", max_bytes=100)).decode()
        except vf.SandboxError:
            return 0.0
        return float(trace.info["shown"] == f"3: {said}" and said.strip() == "from setup")

class Taskset(vf.Taskset[Words, Config]):
    def load(self):
        kind = Files if self.config.broken == "files" else Words
        for word in ("red", "blue"):
            yield kind(Data(name=self.config.broken, prompt="Which colour?", answer=word), self.config.task)

__all__ = ["Taskset"]
'''
OLD = '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **more):
        return [vf.UserMessage(content="Sure?")]

def load_environment(kind="tool", broken=""):
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(3)]

    def right(completion, answer):
        text = completion[-1]["content"]
        if broken == "always" or broken and broken in text:
            raise ValueError("no judgement today")
        return float(answer in text)

    kinds = {"single": vf.SingleTurnEnv, "tool": vf.ToolEnv, "multi": Again}
    more = {"tool": {"tools": [add]}, "multi": {"max_turns": 2}}.get(kind, {})
    return kinds[kind](dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), **more)
'''


@pytest.fixture(scope="module", autouse=True)
def sandboxes():
    with own_sandboxes():
        yield


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left():
    """The package takes seconds to import: one process serves the tests of this module."""
    yield
    process.close_idle()


def module(python: Path, name: str, text: str) -> Path:
    (site,) = (python.parent.parent / "lib").glob("python*/site-packages")
    path = site / f"{name}.py"
    path.write_text(text)
    return path


@pytest.fixture
def words(package):
    path = module(package("verifiers"), "rollout_test_words", TASKSET)
    yield {"env": "rollout-test-words", "index": 1}
    path.unlink()


@pytest.fixture
def sums(package):
    path = module(package("verifiers-old"), "rollout_test_sums", OLD)
    yield {"env": "rollout-test-sums", "index": 2, "old": True}
    path.unlink()


def played(task, *actions, **limits):
    return play(Verifiers(), task, list(actions), limits={"max_attempts": 1, **limits})[0]


def call(name, **arguments):
    return Action(tool_calls=[Call(name=name, arguments=arguments)])


def test_a_taskset_offers_its_tools_and_gives_the_weighted_sum_of_its_rewards(words):
    rollout = played(words, call("look", place="sky"), Action(content="It is blue."))
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 2.0)
    assert rollout.reward_components == {"right": 2.0, "looked": 1.0}
    assert [m.text for m in rollout.trajectory.messages if m.role == "tool"] == ["at sky: blue"]
    assert played(words, Action(content="It is red.")).reward == 0.0


def test_wrong_calls_are_answered_and_a_stop_of_the_task_ends_the_turns(words):
    rollout = played(
        words, call("nothing"), call("look", where=1), call("look", place="x"), call("look", place="x")
    )
    first, second, _ = [message.text for message in rollout.trajectory.messages if message.role == "tool"]
    assert first.startswith("Error: no tool 'nothing'") and "place" in second
    assert (rollout.reward, rollout.finish_reason, rollout.metrics["env_steps"]) == (0.0, "stop", 3)


@pytest.mark.parametrize("broken", ["broken", "nan"])
def test_a_reward_that_raises_or_is_no_number_drops_the_sample(words, broken):
    rollout = played(words | {"args": {"broken": broken}}, Action(content="blue"))
    assert (rollout.state, rollout.reward, rollout.error.blame) == (State.FAILED, None, "task")


@pytest.mark.apptainer
def test_hooks_and_the_agent_work_in_one_sandbox_and_the_hooks_by_programs_that_run_alone(words):
    require_apptainer()
    task = words | {"args": {"broken": "files"}, "sandbox": True}
    rollout = played(task, call("execute_bash", command="cp note.txt answer.txt"), Action(content="Done."))
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 2.0), rollout.error
    # What an agent leaves running, and what it makes of its shell, is gone when the hooks judge.
    forge = (
        "cat() { echo from setup; }; export -f cat; (sleep 2; echo from setup >answer.txt) & rm -f answer.txt"
    )
    assert played(task, call("execute_bash", command=forge), Action(content="Done.")).reward == 0.0
    lacking = played(words | {"args": {"broken": "files"}}, Action(content="Done."))
    assert (lacking.reward, lacking.error.blame) == (None, "task") and "no sandbox" in lacking.error.message


def test_rows_name_the_tasks_of_a_set_and_the_sandbox_that_they_want(words):
    rows = rows_of("verifiers", "rollout-test-words", {"broken": "files"})
    assert [row["index"] for row in rows] == [0, 1] and all(row["sandbox"] for row in rows)
    assert all(Verifiers.Task.model_validate(row) for row in rows)


@pytest.mark.parametrize(
    "args", [{"system_prompt": "/etc/passwd"}, {"task": {"rewards": {"x": {"fn": "/etc/hosts.py:reward"}}}}]
)
def test_a_task_names_no_function_and_no_file_of_the_node(words, args):
    rollout = played(words | {"args": args}, Action(content="blue"))
    assert (rollout.reward, rollout.error.blame) == (None, "task")
    assert "name no functions" in rollout.error.message and "root:" not in rollout.model_dump_json()


def test_a_set_with_agents_of_its_own_is_refused(package):
    package("verifiers")
    rollout = played({"env": "harbor"}, Action(content="x"))
    assert (rollout.reward, rollout.error.blame) == (
        None,
        "task",
    ) and "Env of its own" in rollout.error.message


@pytest.mark.may_skip
@pytest.mark.parametrize(
    ("kind", "actions", "turns"),
    [
        ("single", [Action(content="4")], 1),
        ("tool", [call("add", a=2, b=2), Action(content="4")], 2),
        ("multi", [Action(content="5"), Action(content="4")], 2),
    ],
)
def test_an_environment_before_0_4_is_played_to_its_end_and_its_rubric_judges(sums, kind, actions, turns):
    rollout = played(sums | {"args": {"kind": kind}}, *actions)
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 1.0), rollout.error
    assert rollout.reward_components["num_turns"] == turns
    said = [message.text for message in rollout.trajectory.messages if message.role in ("tool", "user")]
    assert said == ["What is 2 + 2?", *{"single": [], "tool": ["4"], "multi": ["Sure?"]}[kind]]


@pytest.mark.may_skip
def test_a_rubric_that_fails_is_no_zero_but_where_the_agents_words_are_to_blame(sums):
    words = Action(content="boom")
    assert played(sums | {"args": {"kind": "single", "broken": "boom"}}, words).reward == 0.0
    broken = played(sums | {"args": {"kind": "single", "broken": "always"}}, words)
    assert (broken.reward, broken.error.blame) == (None, "task") and "no judgement" in broken.error.message


@pytest.mark.may_skip
def test_what_a_limit_ends_is_judged_by_the_rubric(sums):
    rollout = played(sums | {"args": {"kind": "multi"}}, Action(content="4"), max_turns=1)
    assert (rollout.finish_reason, rollout.reward) == ("turn_limit", 1.0)
