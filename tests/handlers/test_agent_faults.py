"""An agent that breaks what it works in is scored all the same: nothing that it does drops its sample."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.schema import Blame, Limits, Rollout, State
from rollout.trajectory import FinishReason, Message
from sandbox import spec
from sandbox.errors import NotAllowed, SandboxError, SandboxGone, SandboxSpoiled
from workers.agent.replay import Action, Call
from workers.agent.tools import ExecuteBash, ExecuteIPythonCell, Finish
from workers.errors import from_sandbox
from workers.handlers import AgentHandler, EvalContext, InitContext, Reward
from workers.handlers.base import AnyTask
from workers.testing import play

FINISH = Action(tool_calls=[Call(name="finish", arguments={"message": "done"})])


class Shelled(AgentHandler[AnyTask]):
    """A shell; the check is a file in the workspace."""

    name = "shelled"
    tools = (ExecuteBash(), Finish())
    uses_sandbox = True
    limits = spec.Limits(disk_mb=20, memory_mb=512)

    def prompt(self, task: AnyTask) -> list[Message]:
        return [Message(role="user", content="Make done.txt.")]

    async def evaluate(self, ctx: EvalContext[AnyTask]) -> Reward:
        result = await ctx.sandbox.exec(["test", "-f", "done.txt"])
        return Reward(0.5 + 0.5 * (result.exit_code == 0))


def agent(*commands: str, handler: AgentHandler[Any] | None = None) -> Rollout:
    actions = [
        Action(tool_calls=[Call(name="execute_bash", arguments={"command": line})]) for line in commands
    ]
    (done,) = play(handler or Shelled(), {}, [*actions, FINISH], limits=Limits(max_attempts=1))
    return done


KILLS = "kill -STOP -1 1; kill -9 1; kill -9 -1; kill -9 $$"
BREAKS = {
    "its bash is gone": 'mv "$(readlink -f "$(type -P bash)")" /tmp/gone; exit',
    "its bash is another program": 'cp -f "$(type -P true)" "$(readlink -f "$(type -P bash)")"; exit',
    "its bash never gets ready": 'b=$(readlink -f /bin/bash); rm "$b"; printf "#!/bin/sh\nsleep 99" >"$b"; '
    'chmod +x "$b"; exit',
    "the command file is a directory": "rm -rf /run/sbx/cmd; mkdir -p /run/sbx/cmd/x",
    "the private directory is closed": "chmod 000 /run/sbx",
    "the root is closed": "chmod 000 /",
    "the root is closed, and the shell ends": "chmod 000 /; exit",
    "every process is killed": KILLS,
    "every process is killed again and again": '(trap "" HUP; while :; do for p in /proc/[0-9]*; do '
    '[ "${p#/proc/}" = "$BASHPID" ] || kill -9 "${p#/proc/}"; done; done) >/dev/null 2>&1 & disown; exit',
    "the workspace is closed": "chmod 000 /workspace; exit",
}


@pytest.mark.parametrize("how", BREAKS)
def test_an_agent_that_breaks_its_shell_is_scored(how):
    done = agent(BREAKS[how], "echo still here")
    assert (done.state, done.drop, done.error) == (State.COMPLETED, False, None)
    assert done.reward == 0.5
    assert done.finish_reason is FinishReason.STOP


SPOILS = {
    "what it works in is closed": "chmod 000 /run /",
    "what it works in is closed, and the shell ends": "chmod 000 /run; exit",
    "each bash ends at once": "echo exit >/etc/bash.bashrc; exit",
    "each bash waits for ever": "rm -f /etc/bash.bashrc; mkfifo /etc/bash.bashrc; exit",
}


@pytest.mark.parametrize("how", SPOILS)
def test_an_agent_that_leaves_the_server_no_shell_is_scored(how):
    done = agent("touch done.txt", SPOILS[how], "echo still here")
    assert (done.state, done.drop, done.error) == (State.COMPLETED, False, None)
    assert done.reward == 1.0
    assert done.finish_reason is FinishReason.SANDBOX_LIMIT
    assert any("SandboxSpoiled" in warning for warning in done.trajectory.warnings)


def test_an_agent_that_works_on_after_killing_everything_is_rewarded_for_it():
    assert agent(KILLS, "touch done.txt").reward == 1.0


class Calculating(Shelled):
    """With IPython."""

    name = "calculating"
    tools = (ExecuteIPythonCell(), *Shelled.tools)


BREAK_KERNEL = """
import os, pathlib, site
place = pathlib.Path(site.getsitepackages()[0], "end.pth")
place.parent.mkdir(parents=True, exist_ok=True)
place.write_text("import os; os._exit(3)")
os._exit(0)
"""


def test_an_agent_that_keeps_its_kernel_from_starting_is_scored():
    cells = [Call(name="execute_ipython_cell", arguments={"code": code}) for code in (BREAK_KERNEL, "1")]
    actions = [Action(tool_calls=[cell]) for cell in cells]
    (done,) = play(Calculating(), {}, [*actions, FINISH], limits=Limits(max_attempts=1))
    assert (done.state, done.drop, done.error) == (State.COMPLETED, False, None)
    assert (done.reward, done.finish_reason) == (0.5, FinishReason.SANDBOX_LIMIT)
    assert any("ended while starting" in warning for warning in done.trajectory.warnings)


FILL = "for i in 1 2 3 4 5 6; do head -c 30M /dev/zero >file$RANDOM$i; sleep 2; done"


def test_an_agent_whose_sandbox_is_ended_for_its_limits_is_scored_and_not_dropped():
    done = agent("touch done.txt", *[FILL] * 8)
    assert (done.state, done.drop, done.error) == (State.COMPLETED, False, None)
    assert done.finish_reason is FinishReason.SANDBOX_LIMIT
    assert done.reward == 0.0
    assert any("limit" in warning for warning in done.trajectory.warnings)


class Answered(Shelled):
    """Needs no sandbox to score."""

    name = "answered"

    async def evaluate(self, ctx: EvalContext[AnyTask]) -> Reward:
        return Reward(0.25)


def test_a_handler_that_needs_no_sandbox_scores_what_was_reached():
    done = agent(*[FILL] * 8, handler=Answered())
    assert (done.state, done.reward) == (State.COMPLETED, 0.25)
    assert done.finish_reason is FinishReason.SANDBOX_LIMIT


class Greedy(Shelled):
    """Its own setup goes over the limits."""

    name = "greedy"

    async def init(self, ctx: InitContext[AnyTask]) -> None:
        await super().init(ctx)
        for _ in range(8):
            await ctx.sandbox.bash(FILL, 60)


def test_before_an_agent_did_anything_it_is_not_blamed():
    done = agent("true", handler=Greedy())
    assert (done.state, done.error.blame, done.drop) == (State.FAILED, Blame.TASK, True)


@pytest.mark.parametrize(
    ("error", "fate", "blame", "retry"),
    [
        (SandboxGone("x"), spec.Fate("limited", "was ended"), Blame.AGENT, False),
        (SandboxGone("x"), spec.Fate("died", "ended by itself"), Blame.SANDBOX, True),
        (SandboxGone("x"), spec.Fate("node", "was ended"), Blame.INFRASTRUCTURE, True),
        (SandboxSpoiled("x"), None, Blame.AGENT, False),
        (NotAllowed("x"), None, Blame.TASK, False),
        (SandboxGone("x"), spec.Fate("expired", "outlived"), Blame.SANDBOX, True),
        (SandboxGone("x"), None, Blame.SANDBOX, True),
        (SandboxError("x"), None, Blame.SANDBOX, True),
    ],
)
def test_how_a_sandbox_ended_decides_who_is_blamed(error, fate, blame, retry):
    fault = from_sandbox(error, fate)
    assert (fault.blame, fault.retry) == (blame, retry)
