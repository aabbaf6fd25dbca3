"""A program that drives a handler's turns begins where the handler's own tools would, in real sandboxes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.schema import Agent, Limits, RolloutRequest, State
from tests.helpers import swe_toy
from tests.helpers.capture import CaptureWorld
from tests.helpers.long_forms import HARNESSES
from tests.helpers.stack import ROOT
from tests.integration.test_capture import PROGRAM, SHELL
from tests.integration.test_harness_programs import ALL
from workers.harnesses import catalogue, pack

PROGRAMS = HARNESSES("programs in a repository", short=("command",), long=("command", *ALL))
ENVIRONMENT = 'export PYTHONPATH="$PWD" PATH="$PWD/env/bin:$PATH" CONDA_DEFAULT_ENV=calc-env'
SAY = """say='printf "%s|" "$PWD" "$PATH" "$CONDA_DEFAULT_ENV"'"""
PLAN = [
    f'{SAY}; sh -c "$say"; bash -c "$say"; bash -lc "$say"; echo end',
    "sed -i 's/ + 1//' calc.py",
    "! done",
]


@pytest.fixture
def world(captured: CaptureWorld) -> CaptureWorld:
    return captured


def require(name: str) -> None:
    """Skip the test where somebody would have to build the program."""
    try:
        pack.require(catalogue.find(name))
    except pack.PackError as error:
        pytest.skip(f"{error} (deploy/setup/harnesses.sh)")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_fixes_an_issue_where_the_repository_and_its_environment_are(
    world: CaptureWorld, name: str
):
    """And so do the shells that it starts, login shells too, which begin with the image's profile."""
    command = ["python3", "-c", PROGRAM, "{instruction}", json.dumps([SHELL])]
    agent = Agent(harness="command", command=command) if name == "command" else Agent(harness=name)
    require(name)
    row = swe_toy.instance()
    row["spec"]["setup"] = [ENVIRONMENT]
    row["problem_statement"] += f" PLAN: {json.dumps(PLAN)}"
    request = RolloutRequest(handler="swe", task=row, n=2, agent=agent, limits=Limits(max_attempts=1))
    rollout, other = (world.ended(it.id, 180) for it in world.stack.client.submit(request))
    assert rollout.state is State.COMPLETED, rollout.error
    assert other.trajectory.prompt_ids == rollout.trajectory.prompt_ids, "a group's prompts are one prefix"
    told = next(message.text for message in rollout.trajectory.messages if message.role == "tool")
    places = told[told.index(swe_toy.REPO) : told.index("|end")].split("|")
    assert places[0::3] == [swe_toy.REPO] * 3
    assert all(path.startswith(f"{swe_toy.REPO}/env/bin:") for path in places[1::3]), places
    assert places[2::3] == ["calc-env"] * 3
    assert rollout.reward == 1.0, rollout.trajectory.artifacts["report"]
    assert world.hold_prompts(rollout) == rollout.trajectory.receipt.calls


@HARNESSES.only
def test_the_example_of_the_page_runs_as_written(world: CaptureWorld, tmp_path: Path):
    """But for its problem, in which the scripted model is told what to do, and the number of rollouts."""
    text = (ROOT / "docs" / "agents.md").read_text()
    (code,) = re.findall(r"<!-- tested: agent -->\n```python\n(.*?)```", text, re.DOTALL)
    require("claude_code")
    problem = "What is the sum of the primes below 20?"
    plan = json.dumps(["echo $((2 + 3 + 5 + 7 + 11 + 13 + 17 + 19))", r"! It is \boxed{77}."])
    assert code.count(f'"{problem}"') == code.count("n=4") == 1
    file = tmp_path / "first_agent.py"
    file.write_text(code.replace(f'"{problem}"', repr(f"{problem} PLAN: {plan}")).replace("n=4", "n=1"))
    env = {**world.stack.env, "ROLLOUT_URL": world.stack.url}
    told = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    assert re.findall(r"^completed (\S+) None$", told.stdout, re.MULTILINE) == ["1.0"], told.stdout
    assert told.stdout.count("harness='claude_code'") == 1
