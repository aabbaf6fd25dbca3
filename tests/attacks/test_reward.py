"""Attacks on the reward: by an agent of a whole rollout, and by what a scorer is made to run."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rollout.schema import Limits, Rollout
from rollout.trajectory import Message
from sandbox import spec
from tests.attacks import attack
from tests.helpers.sandboxes import own_sandboxes
from tests.helpers.stack import ROOT
from workers import errors
from workers.agent.replay import Action, Call
from workers.agent.tools import ExecuteBash, Finish
from workers.errors import TaskError
from workers.handlers import AgentHandler, EvalContext, Reward
from workers.handlers.base import AnyTask
from workers.handlers.code import CodeText
from workers.testing import play

SECRET = "hunter2hunter2"
FINISH = Action(tool_calls=[Call(name="finish", arguments={"message": "done"})])


@dataclass
class Service:
    """The service as it is, or with the wall under test taken down."""

    control: bool
    monkeypatch: pytest.MonkeyPatch
    place: str = "service"


@pytest.fixture(scope="module", autouse=True)
def sandbox_directory() -> Iterator[None]:
    """A sandbox host of these attacks' own."""
    with own_sandboxes():
        yield


@pytest.fixture(params=["service", "control"])
def target(request, monkeypatch) -> Iterator[Service]:
    return Service(request.param == "control", monkeypatch)


class Checked(AgentHandler[AnyTask]):
    """Make a file; the check is the one of `rollout handlers new`."""

    name = "checked"
    tools = (ExecuteBash(), Finish())
    uses_sandbox = True
    limits = spec.Limits(disk_mb=20)

    def prompt(self, task: AnyTask) -> list[Message]:
        return [Message(role="user", content="Create done.txt.")]

    async def evaluate(self, ctx: EvalContext[AnyTask]) -> Reward:
        async with ctx.sandboxes.fresh(ctx, image=self.image, workspace_of=ctx.sandbox) as box:
            result = await box.exec(["bash", "-c", "grep -q solved done.txt"], timeout=240)
        return Reward(float(result.exit_code == 0))


class Typed(Checked):
    """The same check as it was: typed into the agent's shell."""

    async def evaluate(self, ctx: EvalContext[AnyTask]) -> Reward:
        result = await ctx.sandbox.bash("grep -q solved done.txt", timeout=240)
        return Reward(float(result.exit_code == 0))


class Alongside(Checked):
    """The same program, but in the sandbox whose programs the agent may have replaced."""

    async def evaluate(self, ctx: EvalContext[AnyTask]) -> Reward:
        result = await ctx.sandbox.exec(["bash", "-c", "grep -q solved done.txt"], timeout=240)
        return Reward(float(result.exit_code == 0))


def run(handler: AgentHandler[Any], *commands: str, **options: Any) -> Rollout:
    actions = [
        Action(tool_calls=[Call(name="execute_bash", arguments={"command": line})]) for line in commands
    ]
    (done,) = play(handler, {}, [*actions, FINISH], limits=Limits(max_attempts=1), **options)
    return done


# -- a reward that was not earned ------------------------------------------------------------------------


@attack(stopped_by="the check is a program of the server's, in no shell of the agent's")
def test_be_rewarded_for_a_shell_that_says_yes(target):
    return run(Typed() if target.control else Checked(), "grep() { return 0; }").reward == 1.0


FAKE = """
for name in grep bash sh; do
    cp "$(type -P true)" /tmp/fake && mv -f /tmp/fake "$(readlink -f "$(type -P $name)")"
done
"""


@attack(stopped_by="a fresh sandbox of the image, with a copy of the workspace")
def test_be_rewarded_for_replacing_the_programs_of_the_image(target):
    return run(Alongside() if target.control else Checked(), FAKE).reward == 1.0


@attack(stopped_by="a workspace that cannot be copied scores 0")
def test_drop_the_sample_by_a_workspace_that_nobody_can_read(target):
    if target.control:  # as it was when such a failure was the handler's
        target.monkeypatch.setattr("workers.sandboxes.AgentFault", errors.HandlerError)
    done = run(Checked(), "mkdir closed; touch closed/x; chmod 000 closed")
    assert done.drop or done.reward == 0.0
    return done.drop


FILL = "for i in 1 2 3 4 5 6; do head -c 30M /dev/zero >file$RANDOM$i; sleep 2; done"


@attack(stopped_by="blame agent: scored 0")
def test_drop_the_sample_by_going_over_the_limits(target):
    if target.control:  # as it was: the task was blamed
        target.monkeypatch.setattr("workers.errors.AgentFault", TaskError)
    done = run(Checked(), *[FILL] * 6)
    assert done.drop or done.reward == 0.0
    return done.drop


@attack(stopped_by="the server is the namespace's init: no process inside can end it")
def test_drop_the_sample_by_killing_the_server(target):
    runtime = {"sandbox_runtime": "local-unsafe"} if target.control else {}
    return run(Checked(), "kill -9 $PPID; sleep 1", **runtime).drop


# -- hidden tests ------------------------------------------------------------------------------------------

CASES = {
    "prompt": "Sleep on it.",
    "tests": [{"stdin": "", "stdout": "42"}],
    "time_limit_s": 1.0,
}


PATIENT_S = 5.0
"""The limit in the control, whose solution has to have begun before it is over."""


def judged(target: Service, number: int) -> bool:
    """Whether a program that is too slow, and signals its runner, is rewarded. The control is the runner that
    was inside.
    """
    solution = SLOW.format(number=number, seconds=PATIENT_S + 1 if target.control else 2)
    if not target.control:
        actions = [Action(content=f"```python\n{solution}\n```")]
        (done,) = play(CodeText(), CASES, actions, limits=Limits(max_attempts=1))
        assert done.reward is not None
        return done.reward == 1.0
    runner = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=open('/dev/stdout', 'w'))\n"
        f"try: child.wait({PATIENT_S})\n"
        "except subprocess.TimeoutExpired: child.kill(); print('timeout')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", runner, solution], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        # A stopped runner whose child has not begun says nothing for ever.
        told, _, _ = select.select([process.stdout], [], [], 4 * PATIENT_S)
        line = process.stdout.readline() if told else ""
        process.kill()
    return line.strip() == "42"


SLOW = "import os, time\nos.kill(os.getppid(), {number})\ntime.sleep({seconds})\nprint(42, flush=True)\n"


@attack(stopped_by="each case is timed by the server, which is init")
def test_be_rewarded_past_the_time_limit_by_killing_the_runner(target):
    return judged(target, 9)


@attack(stopped_by="each case is timed by the server, which is init")
def test_be_rewarded_past_the_time_limit_by_stopping_the_runner(target):
    return judged(target, 19)


# -- scorers -------------------------------------------------------------------------------------------------

IN_A_SCORER = """
import asyncio, json, sys
from workers.scoring import ScorerPool
async def main():
    pool = ScorerPool(size=1, memory_mb=2048, max_calls=1)
    print(json.dumps(await pool.score(sys.argv[1], json.loads(sys.argv[2]), timeout_s=60)))
    pool.close()
asyncio.run(main())
"""
IN_THE_WORKER = """
import importlib, json, sys
module, _, name = sys.argv[1].partition(":")
print(json.dumps(getattr(importlib.import_module(module), name)(json.loads(sys.argv[2]))))
"""


def scored(target: Service, function: str, payload: Any = None) -> str:
    """What a function says that a scorer runs; of the control: that the worker itself runs."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            IN_THE_WORKER if target.control else IN_A_SCORER,
            f"tests.helpers.scorers:{function}",
            json.dumps(payload),
        ],
        env={**os.environ, "ROLLOUT_REDIS_URL": f"redis://:{SECRET}@127.0.0.1:1/0", "BROKER": SECRET},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@attack(stopped_by="a scorer gets the variables that a program needs, and no others")
def test_read_the_password_of_redis_from_the_scorer_s_environment(target):
    return SECRET in scored(target, "environment", ["ROLLOUT_REDIS_URL", "BROKER"])


@attack(stopped_by="a /proc without the machine's processes, and no privilege to uncover it")
def test_read_the_password_of_redis_from_the_worker_s_environment(target):
    return SECRET in scored(target, "environment_of_relatives")


@attack(stopped_by="a /proc without the machine's processes, and no privilege to uncover it")
def test_write_the_worker_s_memory_from_a_scorer(target):
    return "opened" in scored(target, "memory_of_parent")


@attack(stopped_by="a network namespace of its own")
def test_reach_the_network_from_a_scorer(target):
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "connected" in scored(target, "connect", server.getsockname()[1])


@attack(stopped_by="a dataset whose entries are made by running code is refused")
def test_have_a_scorer_execute_a_dataset_s_programs(target):
    from workers.scoring import reasoning_tasks  # all of reasoning-gym: too long for who only collects

    if target.control:
        target.monkeypatch.setattr(reasoning_tasks, "_EXECUTING", frozenset())
    return "question" in reasoning_tasks.entry({"dataset": "codeio", "seed": 1, "index": 0})
