"""The programs of examples/agents as users start them: with an address, a key and a question."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from examples.training.agents import driven
from rollout.schema import EXTERNAL, Agent, HandlerInfo, RolloutRequest, Stage, State
from services.settings import Settings
from services.state.fleet import FleetStore
from services.state.rollouts.store import Finish, RolloutStore
from tests.helpers.capture import CaptureWorld
from tests.helpers.product_script import ANSWER, PRODUCT, QUESTION
from tests.helpers.scripted_chat import FINISH, scripted_chat
from tests.helpers.stack import ROOT, Stack, wait_until

AGENTS = ROOT / "examples" / "agents"
PROGRAMS = sorted(AGENTS.glob("*_agent.py"))
MOST_LINES, MOST_LINES_OF_DRIVE = 40, 60
TIMEOUT_S = 240


def run(program: str, question: str, url: str, key: str) -> str:
    """What it prints; it has two variables beside what every program needs."""
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, str(AGENTS / program), question],
            env={
                "PATH": os.environ["PATH"],
                "HOME": home,
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_KEY": key,
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def world(captured: CaptureWorld) -> CaptureWorld:
    """The real service, with a model that has a product worked out by a tool."""
    return captured


TASK = {"question": QUESTION, "answer": PRODUCT}


@pytest.mark.parametrize(
    ("program", "chains", "scored"),
    [
        ("langgraph_agent.py", 1, 1.0),
        ("openai_agents_agent.py", 1, 1.0),
        ("pydantic_ai_agent.py", 1, 1.0),
        ("calculator_agent.py", 1, 1.0),
        # It tells a turn as another text than was sampled, so each call begins a conversation of its own; and
        # its answer is the call of a tool, which the handler does not read.
        ("smolagents_agent.py", 2, 0.0),
    ],
)
def test_a_program_is_trained_token_for_token_by_two_variables(world, program, chains, scored):
    rollout_id, access = world.submit(TASK)
    assert run(program, QUESTION, access.base_url, access.api_key) == f"{ANSWER}\n"
    world.finish(access)
    rollout = world.ended(rollout_id, TIMEOUT_S)
    assert (rollout.state, rollout.reward) == (State.COMPLETED, scored), rollout.error
    assert len(rollout.trajectory.chains) == chains
    assert world.hold_prompts(rollout) == rollout.trajectory.receipt.calls == 2


def test_the_driver_takes_rollouts_from_their_submission_to_their_rewards(world, tmp_path):
    """Of two tasks, of which the program prints what one expects."""
    tasks = [TASK, {"question": QUESTION, "answer": "17"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    argv = [str(AGENTS / "drive.py"), str(AGENTS / "calculator_agent.py"), str(tmp_path / "tasks.jsonl")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ROLLOUT_URL": world.stack.url}
    for more, finished in (["--expect", "answer"], "posted"), ([], "scored"):
        command = [sys.executable, *argv, "--handler", "calculator", *more]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        lines = [line.split() for line in done.stdout.splitlines()]
        assert [line[1:] for line in lines] == [
            ["completed", "reward", "1.0"],
            ["completed", "reward", "0.0"],
        ]
        artifacts = world.stack.client.get(lines[0][0]).trajectory.artifacts
        assert ("agent.reward" in artifacts) == (finished == "posted")


def outputs(*commands: str) -> list[str]:
    """What the calculator tells a model that calls them in turn."""
    calls = [("execute_bash", {"command": command}) for command in commands]
    with scripted_chat(*calls, "done") as model:
        assert run("calculator_agent.py", "1 plus 1", model.url, "the-key") == "done\n"
    return [said["content"] for said in model.calls[-1]["messages"] if said["role"] == "tool"]


def test_the_calculator_tells_a_command_as_the_services_own_tool_does():
    assert outputs("true", "echo 1; false", "echo $((1/0))") == [
        "[no output]",
        "1\n[exit code 1]",
        'bash: line 1: 1/0: division by 0 (error token is "0")\n[exit code 1]',
    ]


def test_what_a_model_in_training_says_does_no_harm_to_the_machine_of_its_trainer(tmp_path):
    mark = tmp_path / "mark"
    tried = ("ls", "/bin/ls", f"echo x > {mark}", "kill -9 $PPID", "echo key=$OPENAI_API_KEY.")
    (told, endless) = outputs("\n".join(tried), "while :; do :; done")
    for words in ("ls: command not found", "/bin/ls: restricted", "kill: command not found", "key=."):
        assert words in told
    assert not mark.exists() and "the-key" not in told
    assert endless == "[exit code -9]", "its processor time is limited"


def test_programs_are_short_and_know_nothing_of_the_service():
    assert len(PROGRAMS) == 5
    for program in PROGRAMS:
        text = program.read_text()
        assert len(text.splitlines()) <= MOST_LINES and "rollout" not in text.lower(), program
    assert len((AGENTS / "drive.py").read_text().splitlines()) <= MOST_LINES_OF_DRIVE


class Workers:
    """In the place of workers: bring what is submitted to RUN."""

    def __init__(self, stack: Stack) -> None:
        FleetStore(stack.redis.client).put_handlers([HandlerInfo(name="calculator")])
        self.store = RolloutStore(stack.redis.client, Settings(redis_url=stack.redis.url, lease_s=600))

    def bring_to_run(self, rollout_id: str, attempt: int = 1):
        claim = self.store.claim(rollout_id, attempt, Stage.INIT, "w")
        self.store.finish(claim, Finish(State.READY))
        return self.store.claim(rollout_id, attempt, Stage.RUN, "w")


@pytest.fixture
def service(tmp_path):
    """A gateway that takes the scripted model for its capture, and its workers."""
    call = ("execute_bash", {"command": "echo $((37*85))"})
    with (
        scripted_chat(call, "It is 3145.") as model,
        Stack(tmp_path, tmp_path / "sbx", {"ROLLOUT_CAPTURE_URL": model.url}) as stack,
    ):
        yield stack, model, Workers(stack)


def submit(stack, tag: str) -> str:
    request = RolloutRequest(handler="calculator", task=TASK, tags=[tag], agent=Agent(harness=EXTERNAL))
    return stack.client.submit(request)[0].id


def test_each_attempt_under_a_tag_is_driven_once_whoever_has_submitted_it(service):
    stack, model, workers = service
    client, program = stack.client, AGENTS / "calculator_agent.py"
    with driven(client, "mine", program, "question", 4):
        lost, other, mine = (submit(stack, tag) for tag in ("mine", "another", "mine"))
        claims = [workers.bring_to_run(rollout_id) for rollout_id in (lost, other, mine)]
        keys = [client.agent(rollout_id).reward_key for rollout_id in (lost, mine)]
        wait_until(lambda: len(model.done) == 2, TIMEOUT_S, "two programs")
        workers.store.finish(claims[0], Finish("again", delay_s=0))
        workers.bring_to_run(lost, 2)
        keys.append(client.agent(lost).reward_key)
        wait_until(lambda: len(model.done) >= 3, TIMEOUT_S, "the next attempt")
    assert sorted(key for _, key, _ in model.done) == sorted(keys) and len(set(keys)) == 3
    assert {(path, body) for path, _, body in model.done} == {(FINISH, None)}, "the handler scores"
    assert not [thread for thread in threading.enumerate() if thread.name == "agents"]


def test_a_program_that_fails_is_told_of_and_leaves_its_rollout_to_the_handler(service, tmp_path, capfd):
    stack, model, workers = service
    program = Path(tmp_path, "broken.py")
    program.write_text("import missing_module")
    rollout_id = submit(stack, "t")
    with driven(stack.client, "t", program, "question", 1):
        workers.bring_to_run(rollout_id)
        wait_until(lambda: model.done, TIMEOUT_S, "the program's end")
    assert model.done[0][0] == FINISH and "missing_module" in capfd.readouterr().err
