"""Capture as a service: real Redis, gateway, workers and capture processes, vendors' clients, a scripted engine.

Every prompt that the engine saw is held, id by id, against what the trajectory says of the call.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from rollout.schema import Agent, Limits, Rollout, RolloutRequest, State
from rollout.trajectory import calls_of
from tests.helpers import agent_script
from tests.helpers.capture import CaptureWorld, capture_world

PLAN = 'Do this. PLAN: ["echo hello", "seq 1 3", "! all done"]'
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[CaptureWorld]:
    with capture_world(tmp_path_factory.mktemp("capture"), processes=2) as world:
        yield world


def chat(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(model="m", messages=messages, tools=[SHELL], **more).choices[0]


def follow(client: openai.OpenAI, messages: list[Any], stream: bool = False) -> str:
    """An agent's loop as anybody writes it."""
    while True:
        choice = chat(client, messages)
        messages.append(choice.message.model_dump(exclude_none=True))
        if not choice.message.tool_calls:
            return choice.message.content
        for call in choice.message.tool_calls:
            command = json.loads(call.function.arguments)["command"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"ran {command}"})


def test_a_program_elsewhere_is_trained_token_for_token(world: CaptureWorld):
    rollout_id, access = world.submit()
    client = openai.OpenAI(base_url=f"{access.base_url}/v1", api_key=access.api_key, max_retries=0)
    assert follow(client, [{"role": "user", "content": PLAN}]) == "all done"
    world.reward(access, 0.5)
    rollout = world.ended(rollout_id)
    assert (rollout.state, rollout.reward) == (State.COMPLETED, 0.5)
    (chain,) = rollout.trajectory.chains
    assert len(list(calls_of(chain))) == 6
    world.hold_prompts(rollout)
