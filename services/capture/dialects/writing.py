"""What the dialects share in writing: JSON, events, and a stream that adds up to its answer."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from typing import Any

import msgspec

from rollout.trajectory import ToolCall
from services.capture.call import Answer, ModelCall, Stream

_ENCODER = msgspec.json.Encoder()
_LINE_ENDS = re.compile("\x85|\u2028|\u2029".encode())
"""Some readers of events take these for the ends of lines."""


def encoded(value: Any) -> bytes:
    """A value as JSON."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:  # a model may write half of a surrogate pair
        return json.dumps(value, separators=(",", ":")).encode()


def arguments(call: ToolCall) -> str:
    """The arguments of a call as a text of JSON."""
    return encoded(call.arguments).decode()


def event(value: Any, name: str = "") -> bytes:
    """An event of a stream."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _LINE_ENDS.sub(_escaped, encoded(value)) + b"\n\n"


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


class WireStream(Stream):
    """A stream that knows what it has sent."""

    def __init__(self, call: ModelCall, call_id: str, created: int, prompt_tokens: int) -> None:
        self._call = call
        self._call_id = call_id
        self._created = created
        self._prompt_tokens = prompt_tokens
        self._text = ""
        self._reasoning = ""

    def heartbeat(self) -> bytes:
        return b": waiting\n\n"

    def delta(self, *, text: str = "", reasoning: str = "") -> bytes:
        self._reasoning += reasoning
        self._text += text
        return (self._piece("reasoning", reasoning) if reasoning else b"") + (
            self._piece("text", text) if text else b""
        )

    def end(self, answer: Answer) -> bytes:
        text, reasoning = answer.message.text, answer.message.reasoning or ""
        if not (text.startswith(self._text) and reasoning.startswith(self._reasoning)):
            raise ValueError(f"call {self._call_id}: what was streamed is no beginning of its answer")
        rest = self.delta(text=text[len(self._text) :], reasoning=reasoning[len(self._reasoning) :])
        return rest + self._close(answer)

    @abstractmethod
    def _piece(self, kind: str, text: str) -> bytes:
        """Some more of the text or of the reasoning, which is not empty."""

    @abstractmethod
    def _close(self, answer: Answer) -> bytes:
        """The calls of tools, and the end."""
