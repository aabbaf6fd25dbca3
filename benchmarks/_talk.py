"""A conversation of a program with the model, turn by turn, as the bodies of all four dialects."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from rollout.trajectory import Message
from tests.helpers.stack import ROOT

TOOL = "execute_bash"
COMMAND = "python -m pytest -q tests/unit && git status --short && git diff --stat HEAD~1"
SAID = "Let me look at what the tests say now, and at what has changed since."
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CALL = json.dumps({"name": TOOL, "arguments": {"command": COMMAND}})
TURN = f"<think>\n\n</think>\n\n{SAID}\n<tool_call>\n{CALL}\n</tool_call><|im_end|>"
"""What the engine samples, in Qwen3's format."""
JSON_BYTES = 220
"""Of a turn with its answer, around what they say."""


class Shape(NamedTuple):
    """Sizes in bytes: what comes before the first turn (system text, question, tools); each turn."""

    first: int
    turn: int = 1000


@cache
def _sources() -> str:
    """What programs show a model: this project's own code, some 500 kB."""
    text = "".join(path.read_text() for path in sorted((ROOT / "workers").rglob("*.py")))
    return text.encode("ascii", "ignore").decode()


class Talk:
    """One program's conversation. No two say the same, and no two turns of one do."""

    def __init__(self, shape: Shape, number: int) -> None:
        self._random = random.Random(number)
        self._left = shape.turn - len(SAID) - len(COMMAND) - JSON_BYTES
        self.description = self._text(shape.first // 3)
        self.system, self.question = self._text(shape.first // 2), self._text(shape.first // 6)
        self.outputs: list[str] = []

    def _text(self, size: int) -> str:
        start = self._random.randrange(len(_sources()) - size)
        return _sources()[start : start + size]

    @property
    def messages(self) -> list[Message]:
        """Of the first prompt."""
        texts = (("system", self.system), ("user", self.question))
        return [Message(role=role, content=text) for role, text in texts]

    def answer(self) -> str:
        """The next turn was made; what its tool answers."""
        self.outputs.append(self._text(self._left))
        return self.outputs[-1]

    def body(self, dialect: str, stream: bool = False) -> bytes:
        """A call with all so far."""
        made = _DIALECTS[dialect](self) | ({"stream": True} if stream else {})
        return json.dumps(made, separators=(",", ":")).encode()


def _chat(talk: Talk) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": talk.system}]
    messages.append({"role": "user", "content": talk.question})
    for number, output in enumerate(talk.outputs):
        function = {"name": TOOL, "arguments": json.dumps({"command": COMMAND})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": SAID, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": output})
    tool = {"name": TOOL, "description": talk.description, "parameters": SCHEMA}
    return {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": tool}]}


def _responses(talk: Talk) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": talk.question}]
    for number, output in enumerate(talk.outputs):
        said = [{"type": "output_text", "text": SAID, "annotations": []}]
        call = {"type": "function_call", "call_id": f"c{number}", "name": TOOL}
        items.append({"type": "message", "role": "assistant", "content": said})
        items.append(call | {"arguments": json.dumps({"command": COMMAND})})
        items.append({"type": "function_call_output", "call_id": f"c{number}", "output": output})
    tool = {"type": "function", "name": TOOL, "description": talk.description, "parameters": SCHEMA}
    return {"model": "policy", "instructions": talk.system, "input": items, "tools": [tool]}


def _anthropic(talk: Talk) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": talk.question}]
    for number, output in enumerate(talk.outputs):
        use = {"type": "tool_use", "id": f"c{number}", "name": TOOL, "input": {"command": COMMAND}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": output}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": SAID}, use]})
        messages.append({"role": "user", "content": [result]})
    tool = {"name": TOOL, "description": talk.description, "input_schema": SCHEMA}
    system = [{"type": "text", "text": talk.system}]
    return {"model": "policy", "max_tokens": 8000, "system": system, "messages": messages, "tools": [tool]}


def _gemini(talk: Talk) -> dict[str, Any]:
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": talk.question}]}]
    for output in talk.outputs:
        call = {"functionCall": {"name": TOOL, "args": {"command": COMMAND}}}
        contents.append({"role": "model", "parts": [{"text": SAID}, call]})
        response = {"functionResponse": {"name": TOOL, "response": {"output": output}}}
        contents.append({"role": "user", "parts": [response]})
    tool = {"name": TOOL, "description": talk.description, "parameters": SCHEMA}
    system = {"parts": [{"text": talk.system}]}
    return {
        "systemInstruction": system,
        "contents": contents,
        "tools": [{"functionDeclarations": [tool]}],
    }


_DIALECTS: dict[str, Callable[[Talk], dict[str, Any]]] = {
    "chat": _chat,
    "responses": _responses,
    "anthropic": _anthropic,
    "gemini": _gemini,
}
DIALECTS = tuple(_DIALECTS)
