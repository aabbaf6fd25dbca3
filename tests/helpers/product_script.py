"""A model for the programs of examples/agents: it has a product worked out by a tool, in Qwen3's format.

Asked anything else it is `agent_script`.

For `--script tests.helpers.product_script:turn` of the fake engine, started as `agent_script` says.
"""

from __future__ import annotations

import json

from tests.helpers import agent_script
from tests.helpers.agent_script import THOUGHT, rest_of_turn

QUESTION, ANSWER, PRODUCT = "What is 37 times 85?", "37 times 85 is 3145.", "3145"
MULTIPLY = {"name": "multiply", "arguments": {"a": 37, "b": 85}}
COMMAND = {"name": "execute_bash", "arguments": {"command": "echo $((37*85))"}}
FINAL = {"name": "final_answer", "arguments": {"answer": ANSWER}}
"""How a program of smolagents is told."""


def turn(prompt: list[int], number: int) -> list[int]:
    """The rest of the turn that these ids begin."""
    return rest_of_turn(prompt, says)


def says(before: str) -> str:
    """The call of a tool, a command where no tool is offered; then what it came to."""
    if QUESTION not in before:
        return agent_script.says(before)
    if PRODUCT not in before:
        return _calls(MULTIPLY if '"multiply"' in before else COMMAND)
    return _calls(FINAL) if '"final_answer"' in before else f"{THOUGHT}{ANSWER}"


def _calls(call: dict) -> str:
    return f"{THOUGHT}<tool_call>\n{json.dumps(call)}\n</tool_call>"
