"""Messages of Anthropic: `POST /v1/messages` and `/v1/messages/count_tokens`.

Refused: content other than text, tools that Anthropic's servers run in a history, an answer that the program
begins itself. Left out of the prompt: tools without a schema, which Anthropic's servers or its models bring.
Schemas of output, forced choices of tools and stop strings are recorded and not obeyed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import Raw, Struct

from rollout.trajectory import Message, ToolCall
from services.capture.call import Answer, ModelCall, Refusal
from services.capture.dialects.fields import Dialect, Fields, decoded, invalid, unserved
from services.capture.dialects.messages import (
    Content,
    conversation,
    joined,
    message,
    offered,
    result,
    said,
    text_of,
    tool_call,
)
from services.capture.dialects.writing import Kind, Stream, arguments, encoded, event, told

_ASKED = "temperature top_p top_k stop_sequences thinking tool_choice output_config context_management"
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
"""A line of Claude Code's system text that differs from call to call."""
_TYPES = {"unauthorized": "authentication_error", "busy": "rate_limit_error"}
_TYPES |= {"too_large": "request_too_large", "unavailable": "overloaded_error", "internal": "api_error"}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_SIGNATURE = "cm9sbG91dA=="
"""SDKs want one of each block of thinking; it says nothing and is never read."""


class _Block(Struct):
    type: str = "text"
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: Raw = Raw(b"null")
    is_error: bool | None = None


class _Message(Struct):
    role: str
    content: str | list[_Block]


class _Tool(Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


def _messages(raw: Raw, where: str) -> Iterator[Message]:
    """What one entry of a history says: results of tools come first."""
    entry = decoded(raw, _Message, where)
    if entry.role not in ("user", "assistant", "system"):
        raise unserved(f"{where}.role", entry.role)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    results = 0
    blocks = [_Block(text=entry.content)] if isinstance(entry.content, str) else entry.content
    for index, block in enumerate(blocks):
        path = f"{where}.content[{index}]"
        match entry.role, block.type:
            case _, "text":
                texts.append(block.text)
            case "assistant", "thinking":
                thoughts.append(block.thinking)
            case "assistant", "redacted_thinking":
                pass
            case "assistant", "tool_use":
                calls.append(tool_call(block.id, block.name, block.input, f"{path}.input"))
            case "user", "tool_result":
                results += 1
                content = decoded(block.content, Content, f"{path}.content")
                text = text_of(content, f"{path}.content", by_tool=True)
                yield result(text, block.tool_use_id, failed=block.is_error)
            case _, other:
                raise unserved(f"{path}.type", other)
    if entry.role == "assistant":
        yield said("".join(texts), "".join(thoughts), calls)
    elif texts or not results:
        yield message(entry.role, joined(texts))


def _block(kind: Kind, text: str = "", signature: str = "") -> dict[str, Any]:
    if kind == "text":
        return {"type": "text", "text": text, "citations": None}
    return {"type": "thinking", "thinking": text, "signature": signature}


def _usage(prompt_tokens: int, cached_tokens: int, sampled_tokens: int) -> dict[str, Any]:
    # Anthropic counts what was read from a cache beside the rest of the prompt, not within it.
    given = {"input_tokens": prompt_tokens - cached_tokens, "cache_read_input_tokens": cached_tokens}
    return given | {"cache_creation_input_tokens": 0, "output_tokens": sampled_tokens}


def _head(call_id: str, model: str, usage: dict[str, Any]) -> dict[str, Any]:
    """A message without its content and its end."""
    empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    return {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": model} | empty


class _AnthropicStream(Stream):
    _index = -1
    _error_name = "error"

    def begin(self) -> bytes:
        head = _head(self._call_id, self._call.model, _usage(self._prompt_tokens, 0, 0))
        return self._event("message_start", message=head)

    def heartbeat(self) -> bytes:
        return self._event("ping")

    def _open(self, kind: Kind) -> bytes:
        return self._start(_block(kind))

    def _piece(self, kind: Kind, text: str) -> bytes:
        name = "text" if kind == "text" else "thinking"
        return self._delta(f"{name}_delta", name, text)

    def _shut(self, kind: Kind) -> bytes:
        out = self._delta("signature_delta", "signature", _SIGNATURE) if kind == "reasoning" else b""
        return out + self._event("content_block_stop", index=self._index)

    def _close(self, answer: Answer) -> bytes:
        out = b""
        for made in answer.message.tool_calls:
            out += self._start({"type": "tool_use", "id": made.id, "name": made.name, "input": {}})
            out += self._delta("input_json_delta", "partial_json", arguments(made))
            out += self._event("content_block_stop", index=self._index)
        stop = {"stop_reason": _STOPS[answer.finish], "stop_sequence": None}
        usage = _usage(answer.prompt_tokens, answer.cached_tokens, answer.sampled_tokens)
        return out + self._event("message_delta", delta=stop, usage=usage) + self._event("message_stop")

    @staticmethod
    def error(refusal: Refusal) -> Any:
        text = str(refusal)
        if refusal.kind == "context":
            # By these words programs know that they must shorten their history.
            text = f"prompt is too long: {refusal.tokens} tokens > {refusal.most_tokens} maximum"
        kind = _TYPES.get(refusal.kind, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": text}}

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return self._event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        return self._event("content_block_delta", index=self._index, delta={"type": kind, field: text})

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)


class Anthropic(Dialect):
    """Messages."""

    name = "anthropic"
    stream = _AnthropicStream

    def _read(self, fields: Fields) -> ModelCall:
        system = text_of(fields.take("system", Content), "system")
        lead = [message("system", _BILLING.sub("", system))]
        entries = fields.take("messages", list[Raw], [])
        history = conversation(fields.recent, entries, _messages, where="messages", lead=lead, merge=True)
        if history.messages[-1].role == "assistant":
            raise invalid("messages", "an answer that the program begins itself is not served here")
        tools = [
            offered(tool.name, tool.description, tool.input_schema, where)
            for where, tool in fields.items("tools", _Tool)
            if tool.input_schema is not None
        ]
        if fields.inner("tool_choice").take("type", str) == "none":
            tools = []
        limit = fields.most_tokens("max_tokens")
        return self._call(fields, history, tools=tools, max_tokens=limit, asked=fields.asked(_ASKED))

    def answer(self, call: ModelCall, answer: Answer) -> bytes:
        content = [_block(kind, text, _SIGNATURE) for kind, text in told(answer)]
        for made in answer.message.tool_calls:
            content.append({"type": "tool_use", "id": made.id, "name": made.name, "input": made.arguments})
        usage = _usage(answer.prompt_tokens, answer.cached_tokens, answer.sampled_tokens)
        end = {"content": content, "stop_reason": _STOPS[answer.finish]}
        return encoded(_head(answer.call_id, call.model, usage) | end)

    def count(self, tokens: int) -> bytes:
        return encoded({"input_tokens": tokens})
