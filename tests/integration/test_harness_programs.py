"""Real programs through the whole service: in sandboxes, without a network, on a scripted engine.

Those that tests of the pack install run each time; the others, and full contexts, run in the long form, where
somebody has built them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from rollout.schema import Agent, Limits, Rollout, RolloutRequest, State
from rollout.trajectory import FinishReason
from tests.helpers.capture import CaptureWorld
from tests.helpers.long_forms import HARNESSES
from workers.harnesses import catalogue, commands, pack

ALL = ("claude_code", "codex", "gemini_cli", "qwen_code", "mini_swe_agent", "opencode", "openhands", "pi")
PROGRAMS = HARNESSES("programs", short=ALL[:4], long=ALL)
LONG = ["expr 40000 + 2042 > a; cat a", "seq 1 20000", "cat a", "! it is 2"]
FULL = [
    "expr 40000 + 2042 > a; cat a",
    "18 * yes the {n}. line of many quiet words that say nothing new | head -n 400",
    "cat a",
    "! it is 2",
]
UNCOMPACTED = ("gemini_cli", "mini_swe_agent")
"""One shortens its history between prompts alone, the other never."""


@pytest.fixture
def world(captured: CaptureWorld) -> CaptureWorld:
    return captured


def done(world: CaptureWorld, name: str, plan: list[str]) -> Rollout:
    """The rollout of a program that follows a plan, with all that holds of every one seen to."""
    harness = catalogue.find(name)
    try:
        if name in ALL[:4]:
            pack.build(harness, print)
        pack.require(harness)
    except pack.PackError as error:
        pytest.skip(f"{error} (deploy/setup/harnesses.sh)")
    request = RolloutRequest(
        handler="calculator",
        task={"question": f"PLAN: {json.dumps(plan)}", "answer": "2"},
        agent=Agent(harness=name),
        limits=Limits(max_turns=60, max_attempts=1),
    )
    (submitted,) = world.stack.client.submit(request)
    rollout = world.ended(submitted.id, 180)
    assert rollout.state is State.COMPLETED, rollout.error
    receipt = rollout.trajectory.receipt
    assert world.hold_prompts(rollout) == receipt.calls
    assert (receipt.harness, receipt.drift, receipt.retries) == (name, 0, 0)
    sampled = [s.call_id for chain in rollout.trajectory.chains for s in chain.segments if s.sampled]
    assert len(sampled) == len(set(sampled)) == receipt.calls, "each turn is learned from once"
    return rollout


def heard(rollout: Rollout) -> list[str]:
    """What tools said in the last chain."""
    return [message.text for message in rollout.trajectory.messages if message.role == "tool"]


def follows_its_plan(rollout: Rollout) -> Any:
    assert (rollout.reward, rollout.finish_reason) == (1.0, FinishReason.STOP)
    assert rollout.metrics["agent_exit_code"] == 0
    assert rollout.trajectory.artifacts["agent.output"]
    return rollout.trajectory


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_its_task_token_for_token(world: CaptureWorld, name: str):
    """One conversation, of which every call but the first attaches, a long output in it too."""
    rollout = done(world, name, LONG)
    trajectory = follows_its_plan(rollout)
    assert [chain.role for chain in trajectory.chains] == ["agent"]
    receipt = trajectory.receipt
    assert (receipt.calls, receipt.branches, receipt.refused, receipt.share_delivered) == (4, 1, 0, 1.0)
    told = heard(rollout)
    assert "42042" in told[0], told[0]
    # Each program shows another part of it, as text or as JSON, and tells where the rest is.
    assert sum(letter.isdigit() for letter in told[1]) > 1000 and len(told[1]) < 60_000, told[1]
    assert "42042" in told[2], "the file was not there any more"


@HARNESSES.only
@pytest.mark.parametrize("name", ALL)
def test_a_program_whose_context_is_full_goes_on_or_ends_for_a_reason(world: CaptureWorld, name: str):
    rollout = done(world, name, FULL)
    roles = [chain.role for chain in rollout.trajectory.chains]
    if name in UNCOMPACTED:
        assert roles == ["agent"]
        assert rollout.finish_reason in (FinishReason.CONTEXT_LENGTH, FinishReason.STOP)
        return
    trajectory = follows_its_plan(rollout)
    assert "compaction" in roles and set(roles) == {"agent", "compaction"}
    assert trajectory.receipt.share_delivered == 1.0
    last = trajectory.chains[-1]
    assert last.role == "agent" and trajectory.chains[last.parent].role == "compaction"
    assert "42042" in heard(rollout)[-1]


@HARNESSES.only
def test_the_check_tells_what_works_and_what_does_not():
    """On a stack of its own, of which nothing is left."""
    ran = CliRunner().invoke(commands.harness, ["check", "codex", "no_such_program"])
    assert ran.exit_code == 1, ran.output
    lines = {line.split()[0]: line.split() for line in ran.stdout.splitlines() if line.strip()}
    assert lines["codex"][3:6] == ["0", "100%", "0"] and lines["codex"][-1] == "ok"
    assert int(lines["codex"][1]) > 20 and int(lines["codex"][6]) >= 1
    assert "there is no harness 'no_such_program'" in " ".join(lines["no_such_program"])
