"""A model call as capture has it inside, whatever the dialect, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rollout.trajectory import Message
from services.capture.history import History

Finish = Literal["stop", "length", "tool_calls"]
Kind = Literal["invalid", "unauthorized", "ended", "context", "too_large", "busy", "unavailable", "internal"]
STATUS: dict[Kind, int] = {
    "invalid": 400,
    "unauthorized": 401,
    "ended": 410,
    "context": 400,
    "too_large": 413,
    "busy": 429,
    "unavailable": 503,
    "internal": 500,
}


class Refusal(Exception):
    """A call that is not answered by the model. Each dialect says it in its own way; `context` has one of its
    own in all of them, by which programs know that they must shorten their history."""

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        retry_after_s: int | None = None,
        tokens: int = 0,
        most_tokens: int = 0,
    ) -> None:
        """`tokens`, `most_tokens`: of a prompt that is too long, and what there is room for, for dialects."""
        super().__init__(message)
        self.kind: Kind = kind
        self.status = STATUS[kind]
        self.retry_after_s = retry_after_s
        self.tokens = tokens
        self.most_tokens = most_tokens


@dataclass(frozen=True)
class ModelCall:
    """What a program asks of the model."""

    messages: list[Message]
    """At most one of the system, which comes first; then users', assistants' and tools', in order. What comes
    of the system later is a user's."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """`{"type": "function", "function": {"name", "description", "parameters"}}`, as codecs render them."""
    max_tokens: int | None = None
    """Most ids that the program wants sampled; None = as many as there is room for."""
    stream: bool = False
    model: str = ""
    """What the program calls the model."""
    asked: dict[str, Any] = field(default_factory=dict)
    """Parameters of sampling that it asked for: recorded, not obeyed."""
    history: History | None = field(default=None, compare=False, repr=False)
    """How the messages were read, for calls that go on from this one."""
    size: int = 0
    """Bytes of the body that it was read from."""


@dataclass(frozen=True)
class Answer:
    """A turn as a program is told it."""

    call_id: str
    message: Message
    """The assistant's: text, reasoning, calls of tools with their ids."""
    finish: Finish
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int = 0
    created: int = 0
    """Seconds since the epoch."""
