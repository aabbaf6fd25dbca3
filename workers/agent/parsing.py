"""What a sampled turn says: reasoning, text, and tool calls, well-formed or not.

Sampled text may be anything. Whatever it is, parsing takes time linear in its length and ends with
a turn that the record can hold: what JSON cannot carry there and back makes a call malformed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from rollout.schema import new_id
from rollout.trajectory import Message, ToolCall

MAX_DEPTH = 32
"""Levels of nesting in a call's arguments; readers of JSON give up at 200 or so."""

SHOWN = 200
"""Characters of a malformed call that are told."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
THOUGHT = _THINK, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class Malformed:
    """A tool call that cannot be run."""

    reason: str
    """One line for the policy to learn from."""


@dataclass
class ParsedTurn:
    """What the model said, from the ids it sampled."""

    message: Message
    attempts: list[ToolCall | Malformed] = field(default_factory=list)
    """Every tool call in the order in which the model made them."""

    @property
    def malformed(self) -> list[str]:
        """One line for each tool call that could not be parsed."""
        return [attempt.reason for attempt in self.attempts if isinstance(attempt, Malformed)]

    @property
    def places(self) -> list[tuple[int, str]]:
        """Place among the attempts, and reason, of those that could not be parsed."""
        attempts = enumerate(self.attempts)
        return [(place, attempt.reason) for place, attempt in attempts if isinstance(attempt, Malformed)]

    @classmethod
    def of(cls, message: Message, places: list[tuple[int, str]]) -> ParsedTurn:
        """The turn of a message and these `places`."""
        attempts: list[ToolCall | Malformed] = list(message.tool_calls)
        for place, reason in places:
            attempts.insert(place, Malformed(reason))
        return cls(message, attempts)


def parsed_turn(content: str, reasoning: str | None, attempts: list[ToolCall | Malformed]) -> ParsedTurn:
    """The turn as a message with its well-formed calls."""
    calls = [attempt for attempt in attempts if isinstance(attempt, ToolCall)]
    message = Message(role="assistant", content=content, reasoning=reasoning or None, tool_calls=calls)
    return ParsedTurn(message, attempts)


def tool_call(name: Any, arguments: Any, raw: str, call_id: str | None = None) -> ToolCall | Malformed:
    """A call with a name and an object of arguments that JSON can carry; missing arguments are none."""
    if not isinstance(name, str) or not name:
        return Malformed(f"no name: {_shown(raw)}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return Malformed(f"arguments are not an object: {_shown(raw)}")
    fault = _fault(name) or _fault(arguments)
    if fault:
        return Malformed(f"{fault}: {_shown(raw)}")
    return ToolCall(id=call_id or "call-" + new_id()[-12:], name=name, arguments=arguments)


def _shown(raw: str) -> str:
    return raw.strip()[:SHOWN]


def _fault(value: Any, depth: int = 0) -> str | None:
    """Why a value would not come back from JSON as it is."""
    if depth > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH} levels"
    if isinstance(value, str):
        return "half a surrogate pair" if any("\ud800" <= c <= "\udfff" for c in value) else None
    if isinstance(value, float):
        return None if math.isfinite(value) else "not a finite number"
    if isinstance(value, dict):
        return _fault("".join(value)) or _first_fault(value.values(), depth)
    return _first_fault(value, depth) if isinstance(value, list) else None


def _first_fault(values: Any, depth: int) -> str | None:
    return next((fault for value in values if (fault := _fault(value, depth + 1))), None)


def parse_text(text: str, thinking: bool = False) -> ParsedTurn:
    """A turn in the Hermes form: `<think>…</think>`, text, `<tool_call>{json}</tool_call>` ….

    Args:
        text: Decoded turn, control tokens of the text (`<tool_call>` …) included.
        thinking: The prompt ends within an opened `<think>`.
    """
    reasoning, answer = _split_reasoning(text, thinking)
    attempts: list[ToolCall | Malformed] = []
    content = []
    at = 0
    # By `find` and not by one expression, which would backtrack over long runs of spaces.
    while (start := answer.find(_OPEN, at)) != -1:
        content.append(answer[at:start])
        start += len(_OPEN)
        end = answer.find(_CLOSE, start)
        if end == -1:
            attempts.append(Malformed(f"unclosed {_OPEN}: {_shown(answer[start:])}"))
            at = len(answer)
            break
        attempts.append(_hermes_call(answer[start:end]))
        at = end + len(_CLOSE)
    content.append(answer[at:])
    return parsed_turn("".join(content).strip(), reasoning.strip(), attempts)


def _split_reasoning(text: str, thinking: bool) -> tuple[str, str]:
    """Reasoning and answer. The first `</think>` ends the reasoning for good; without one, a call does."""
    if text.lstrip().startswith(_THINK):
        thinking, text = True, text.lstrip()[len(_THINK) :]
    end = text.find(_THOUGHT)
    call = text.find(_OPEN)
    if end != -1 and (thinking or call == -1 or end < call):
        return text[:end], text[end + len(_THOUGHT) :]
    if not thinking:
        return "", text
    return (text, "") if call == -1 else (text[:call], text[call:])


def _hermes_call(raw: str) -> ToolCall | Malformed:
    try:
        call = json.loads(raw)
    except (ValueError, RecursionError) as error:
        # Also a number of too many digits, and nesting beyond the interpreter's stack.
        reason = "invalid JSON" if isinstance(error, json.JSONDecodeError) else str(error).split(" while")[0]
        return Malformed(f"{reason}: {_shown(raw)}")
    if not isinstance(call, dict):
        return Malformed(f"not an object: {_shown(raw)}")
    return tool_call(call.get("name"), call.get("arguments"), raw)
