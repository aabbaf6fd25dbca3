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
from tests.helpers.scripted_chat import CHAT, RESPONSES, scripted_chat
from tests.helpers.stack import ROOT, Stack, wait_until

AGENTS = ROOT / "examples" / "agents"
PROGRAMS = sorted(AGENTS.glob("*_agent.py"))
MOST_LINES, MOST_LINES_OF_DRIVE = 40, 60
QUESTION, ANSWER = "What is 37 times 85?", "37 times 85 is 3145."
PRODUCT = ("multiply", {"a": 37, "b": 85})
TIMEOUT_S = 240


def run(program: str, question: str, url: str, **more: str) -> str:
    """What it prints; it has two variables beside what every program needs."""
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, str(AGENTS / program), question],
            env={
                "PATH": os.environ["PATH"],
                "HOME": home,
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_KEY": "the-key",
                **more,
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("program", "path", "last"),
    [
        ("langgraph_agent.py", CHAT, ANSWER),
        ("openai_agents_agent.py", RESPONSES, ANSWER),
        ("pydantic_ai_agent.py", CHAT, ANSWER),
        ("smolagents_agent.py", CHAT, ("final_answer", {"answer": ANSWER})),
    ],
)
def test_a_program_works_with_two_variables_and_its_librarys_defaults(program, path, last):
    with scripted_chat(PRODUCT, last) as model:
        assert run(program, QUESTION, model.url) == f"{ANSWER}\n"
    assert [(call["path"], call["key"]) for call in model.calls] == [(path, "the-key")] * 2
    first, second = model.calls
    names = {tool.get("name") or tool["function"]["name"] for tool in first["tools"]}
    assert {"add", "multiply"} <= names
    told = json.dumps(second.get("messages") or second["input"])
    assert QUESTION in told and "3145" in told and "3145" not in json.dumps(first)


def test_the_calculator_runs_what_the_model_calls_though_it_offers_no_tool():
    call = ("execute_bash", {"command": "echo $((37*85))"})
    with scripted_chat(call, "3145") as model:
        assert run("calculator_agent.py", "37 times 85", model.url) == "3145\n"
    first, second = model.calls
    assert "tools" not in first and first["messages"] == [{"role": "user", "content": "37 times 85"}]
    (asked, said, told) = second["messages"]
    assert asked == first["messages"][0]
    assert said["role"] == "assistant" and said["tool_calls"][0]["function"]["name"] == call[0]
    assert told == {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3145"}


def outputs(*commands: str) -> list[str]:
    """What the calculator tells a model that calls them in turn."""
    calls = [("execute_bash", {"command": command}) for command in commands]
    with scripted_chat(*calls, "done") as model:
        assert run("calculator_agent.py", "1 plus 1", model.url) == "done\n"
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
    """In the place of workers: bring what is submitted to RUN, and end it when a reward has come."""

    def __init__(self, stack: Stack) -> None:
        FleetStore(stack.redis.client).put_handlers([HandlerInfo(name="calculator")])
        self.store = RolloutStore(stack.redis.client, Settings(redis_url=stack.redis.url, lease_s=600))

    def bring_to_run(self, rollout_id: str, attempt: int = 1):
        claim = self.store.claim(rollout_id, attempt, Stage.INIT, "w")
        self.store.finish(claim, Finish(State.READY))
        return self.store.claim(rollout_id, attempt, Stage.RUN, "w")

    def end(self, claim, reward: str) -> None:
        self.store.finish(claim, Finish(State.EVALUATING))
        claim = self.store.claim(claim.rollout_id, claim.attempt, Stage.EVAL, "w")
        self.store.finish(claim, Finish(State.COMPLETED, {"reward": reward}))


@pytest.fixture
def service(tmp_path):
    """A gateway whose capture is the scripted model, and its workers."""
    call = ("execute_bash", {"command": "echo $((37*85))"})
    with (
        scripted_chat(call, "It is 3145.") as model,
        Stack(tmp_path, tmp_path / "sbx", {"ROLLOUT_CAPTURE_URL": model.url}) as stack,
    ):
        yield stack, model, Workers(stack)


TASK = {"question": "37 times 85", "answer": "3145"}


def test_the_driver_takes_a_rollout_from_its_submission_to_its_reward(service, tmp_path):
    stack, model, workers = service
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")
    command = [sys.executable, "examples/agents/drive.py", "examples/agents/calculator_agent.py"]
    command += [str(tmp_path / "tasks.jsonl"), "--handler", "calculator", "--expect", "answer"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ROLLOUT_URL": stack.url}
    driver = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    try:
        (waiting,) = wait_until(lambda: stack.client.list("queued").rollouts, TIMEOUT_S, "the submission")
        claim = workers.bring_to_run(waiting.id)
        access = stack.client.agent(waiting.id)
        wait_until(lambda: model.rewards, TIMEOUT_S, "the reward")
        workers.end(claim, "1.0")
        printed, _ = driver.communicate(timeout=TIMEOUT_S)
    finally:
        driver.kill()
        driver.wait()
    assert model.rewards == [(access.reward_key, {"reward": 1.0})]
    assert [call["key"] for call in model.calls] == [access.api_key] * 2
    assert driver.returncode == 0 and printed == f"{waiting.id}  completed  reward 1.0  \n"


def test_each_attempt_under_a_tag_is_driven_once_whoever_has_submitted_it(service):
    stack, model, workers = service
    client, program = stack.client, AGENTS / "calculator_agent.py"

    def submit(tag):
        request = RolloutRequest(handler="calculator", task=TASK, tags=[tag], agent=Agent(harness=EXTERNAL))
        return client.submit(request)[0].id

    with driven(client, "mine", program, "question", 4):
        lost, other, mine = submit("mine"), submit("another"), submit("mine")
        claims = [workers.bring_to_run(rollout_id) for rollout_id in (lost, other, mine)]
        keys = [client.agent(rollout_id).reward_key for rollout_id in (lost, mine)]
        wait_until(lambda: len(model.rewards) == 2, TIMEOUT_S, "two programs")
        workers.store.finish(claims[0], Finish("again", delay_s=0))
        workers.bring_to_run(lost, 2)
        keys.append(client.agent(lost).reward_key)
        wait_until(lambda: len(model.rewards) >= 3, TIMEOUT_S, "the next attempt")
    assert sorted(key for key, _ in model.rewards) == sorted(keys) and len(set(keys)) == 3
    assert [worth for _, worth in model.rewards] == [{}] * 3, "the handler scores"
    assert not [thread for thread in threading.enumerate() if thread.name == "agents"]


def test_a_program_that_fails_is_told_of_and_leaves_its_rollout_to_the_handler(service, tmp_path, capfd):
    stack, model, workers = service
    program = Path(tmp_path, "broken.py")
    program.write_text("import missing_module")
    request = RolloutRequest(handler="calculator", task=TASK, tags=["t"], agent=Agent(harness=EXTERNAL))
    (entry,) = stack.client.submit(request)
    with driven(stack.client, "t", program, "question", 1):
        workers.bring_to_run(entry.id)
        wait_until(lambda: model.rewards, TIMEOUT_S, "the program's end")
    assert model.rewards[0][1] == {} and "missing_module" in capfd.readouterr().err
