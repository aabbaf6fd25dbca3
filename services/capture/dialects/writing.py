"""What the dialects share in writing: JSON, events, and a stream that adds up to its answer."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import Any, Literal

import msgspec

from rollout.trajectory import ToolCall
from services.capture.call import Answer, ModelCall, Refusal

_CODES = {"unauthorized": "invalid_api_key", "context": "context_length_exceeded", "ended": "session_ended"}
_CODES |= {"busy": "rate_limit_exceeded", "too_large": "request_too_large"}
_TYPES = {"busy": "rate_limit_error", "unavailable": "server_error", "internal": "server_error"}
"""Codes and types of errors of OpenAI's two APIs."""
Kind = Literal["reasoning", "text"]
_ENCODER = msgspec.json.Encoder()
_LINE_ENDS = re.compile("\x85|\u2028|\u2029".encode())
"""Some readers of events take these for the ends of lines."""


def encoded(value: Any) -> bytes:
    """A value as JSON."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:  # a model may write half of a surrogate pair
        plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(plain, separators=(",", ":")).encode()


def arguments(call: ToolCall) -> str:
    """The arguments of a call as a text of JSON."""
    return encoded(call.arguments).decode()


def event(value: Any, name: str = "") -> bytes:
    """An event of a stream."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _LINE_ENDS.sub(_escaped, encoded(value)) + b"\n\n"


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """An error as OpenAI's two APIs tell it."""
    text = str(refusal)
    if refusal.kind == "context" and refusal.most_tokens:
        text = (
            f"This model's maximum context length is {refusal.most_tokens} tokens. However, your messages "
            f"resulted in {refusal.tokens} tokens. Please reduce the length of the messages."
        )
    kind = _TYPES.get(refusal.kind, "invalid_request_error")
    return {"message": text, "type": kind, "param": None, "code": _CODES.get(refusal.kind)}


def told(answer: Answer) -> list[tuple[Kind, str]]:
    """What was thought and what was said, where there is any."""
    said: dict[Kind, str] = {"reasoning": answer.message.reasoning or "", "text": answer.message.text}
    return [(kind, text) for kind, text in said.items() if text]


class Stream(ABC):
    """The answer to one streamed call, as bytes in order: begin, deltas and heartbeats, then end or fail.

    What acts on the program (a call of a tool, the last event) is in `end` alone, which is sent when the turn
    is written.
    """

    _error_name = ""

    def __init__(self, call: ModelCall, call_id: str, created: int, prompt_tokens: int) -> None:
        self._call, self._call_id = call, call_id
        self._created, self._prompt_tokens = created, prompt_tokens
        self._pieces: dict[Kind, list[str]] = {"reasoning": [], "text": []}
        self._kind: Kind | None = None

    @abstractmethod
    def begin(self) -> bytes:
        """What is sent before anything is sampled; may be empty."""

    def heartbeat(self) -> bytes:
        """What keeps the connection alive and means nothing."""
        return b": waiting\n\n"

    def delta(self, *, text: str = "", reasoning: str = "") -> bytes:
        """What was sampled since. Reasoning comes before text."""
        return self._more("reasoning", reasoning) + self._more("text", text)

    def _more(self, kind: Kind, text: str) -> bytes:
        if not text:
            return b""
        out = b""
        if kind != self._kind:
            out = self._stop() + self._open(kind)
            self._kind = kind
        self._pieces[kind].append(text)
        return out + self._piece(kind, text)

    def _sent(self, kind: Kind) -> str:
        return "".join(self._pieces[kind])

    def _stop(self) -> bytes:
        kind, self._kind = self._kind, None
        return self._shut(kind) if kind else b""

    def end(self, answer: Answer) -> bytes:
        """What of the answer was not sent as a delta, its calls of tools, and what closes the stream."""
        out = b""
        wholes = dict(told(answer))
        for kind in self._pieces:
            whole, sent = wholes.get(kind, ""), self._sent(kind)
            if not whole.startswith(sent):
                raise ValueError(f"call {self._call_id}: what was streamed is no beginning of its answer")
            out += self._more(kind, whole[len(sent) :])
        return out + self._stop() + self._close(answer)

    def fail(self, refusal: Refusal) -> bytes:
        """The dialect's error in the middle of a stream."""
        return event(self.error(refusal), self._error_name)

    @staticmethod
    @abstractmethod
    def error(refusal: Refusal) -> Any:
        """The dialect's error, before it is JSON."""

    def _open(self, kind: Kind) -> bytes:
        """What comes before the first piece of a kind."""
        return b""

    def _shut(self, kind: Kind) -> bytes:
        """What comes behind the last piece of a kind."""
        return b""

    @abstractmethod
    def _piece(self, kind: Kind, text: str) -> bytes:
        """Some more of the text or of the reasoning, which is not empty."""

    @abstractmethod
    def _close(self, answer: Answer) -> bytes:
        """The calls of tools, and the end."""
