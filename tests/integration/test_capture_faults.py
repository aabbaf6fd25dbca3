"""What goes wrong around a program must neither end as its score nor be seen in what is trained."""

from __future__ import annotations

import json
import time

import pytest

from rollout.schema import Agent, RolloutRequest, State
from tests.helpers.capture import GATE, CaptureWorld, gate_is_open
from tests.integration.test_capture import SHELL, in_sandbox, tree_of


@pytest.fixture
def world(captured: CaptureWorld) -> CaptureWorld:
    return captured


def test_a_program_goes_on_where_the_worker_of_run_is_stopped_in_order(world: CaptureWorld):
    plan = ["echo $((1 + 1)) >> a", "cat a", "sleep 1", "cat a", "! it is 2"]
    undisturbed = world.ended(in_sandbox(world, plan))
    with world.slow_engine(factor=100.0):
        rollout_id = in_sandbox(world, plan)
        world.await_calls(rollout_id, 2)
        world.replace_run_worker(stop=True)
        rollout = world.ended(rollout_id, 120)
    assert (rollout.state, rollout.reward, rollout.attempt) == (State.COMPLETED, 1.0, 1), rollout.error
    assert tree_of(rollout) == tree_of(undisturbed)


IMPATIENT = """
import json, os, subprocess, sys, time, urllib.request
messages, tools, code, stream = [{"role": "user", "content": sys.argv[1]}], *map(json.loads, sys.argv[2:])
def ask():
    body = json.dumps({"model": "m", "messages": messages, "tools": tools, "stream": stream}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    text = urllib.request.urlopen(request, timeout=30).read().decode()
    if not stream:
        return json.loads(text)["choices"][0]["message"]
    assert "data: [DONE]" in text
    pieces = [json.loads(line[6:])["choices"] for line in text.splitlines() if line.startswith("data: {")]
    deltas = [piece[0]["delta"] for piece in pieces if piece]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    return {"role": "assistant", "content": "".join(d.get("content") or "" for d in deltas)} | (
        {"tool_calls": calls} if calls else {})
try:
    while True:
        messages.append(ask())
        if not messages[-1].get("tool_calls"):
            break
        for call in messages[-1]["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
except Exception as error:
    print("gives up", repr(error))
    sys.exit(code)
"""


def impatient(world: CaptureWorld, plan: list[str], code: int, stream: bool = False) -> str:
    """A program in a sandbox that asks once, and ends with this exit code where that fails."""
    question = f"PLAN: {json.dumps(plan)}"
    command = [
        "python3",
        "-c",
        IMPATIENT,
        "{instruction}",
        json.dumps([SHELL]),
        str(code),
        json.dumps(stream),
    ]
    (submitted,) = world.stack.client.submit(
        RolloutRequest(
            handler="calculator",
            task={"question": question, "answer": "2"},
            agent=Agent(harness="command", command=command),
        )
    )
    return submitted.id


def test_a_program_that_cannot_reach_capture_is_tried_again_and_not_scored(world: CaptureWorld):
    rollout_ids = [impatient(world, [f"{GATE}; echo 2", "! it is 2"], code) for code in (0, 1)]
    for rollout_id in rollout_ids:
        world.await_calls(rollout_id, 1)
    for process in world.captures:
        process.kill()
    with gate_is_open():
        time.sleep(35)
        world.captures = [world.stack.start(old.name, world.capture_argv) for old in world.captures]
        for rollout_id in rollout_ids:
            rollout = world.ended(rollout_id, 120)
            # New processes load a tokenizer: one more attempt may lose its patience meanwhile.
            assert (rollout.state, rollout.reward) == (State.COMPLETED, 1.0), rollout.error
            assert rollout.attempt > 1 and world.hold_prompts(rollout) == 2


def test_a_program_whose_stream_a_killed_process_broke_is_not_scored_for_it(world: CaptureWorld):
    with world.slow_engine(factor=500.0):
        rollout_id = impatient(world, ["! it is 2 " + "and more " * 20], 1, stream=True)
        world.await_calls(rollout_id, 1, begun=True)
        time.sleep(1.5)
        for number in range(len(world.captures)):
            world.kill_capture(number)
    rollout = world.ended(rollout_id, 120)
    # Where nothing had been passed on yet the bridge asks again, and nothing was lost.
    assert rollout.state is State.COMPLETED and rollout.attempt <= 2, rollout.error
    assert "gives up" not in rollout.trajectory.artifacts["agent.output"]


def test_a_program_does_not_notice_that_the_processes_of_capture_are_replaced_in_order(world: CaptureWorld):
    with world.slow_engine(factor=100.0):
        rollout_id = impatient(world, ["echo 2", "! it is 2"], 1)
        world.await_calls(rollout_id, 1, begun=True)
        for number, old in enumerate(world.captures):
            world.captures[number] = world.stack.start(old.name, world.capture_argv)
            old.ask_to_stop()
    rollout = world.ended(rollout_id, 120)
    assert (rollout.state, rollout.reward, rollout.attempt) == (State.COMPLETED, 1.0, 1), rollout.error
