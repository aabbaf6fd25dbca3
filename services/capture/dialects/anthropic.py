"""Messages of Anthropic: `POST /v1/messages` and `/v1/messages/count_tokens`.

Refused: content other than text, tools that Anthropic's servers run in a history, an answer that the program
begins itself. Left out of the prompt: tools without a schema, which Anthropic's servers or its models bring.
Schemas of output, forced choices of tools and stop strings are recorded and not obeyed.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import Raw, Struct

from rollout.trajectory import Message
from services.capture.call import Answer, ModelCall, Refusal, Stream
from services.capture.dialects.reading import (
    Content,
    Fields,
    Part,
    WireDialect,
    conversation,
    decoded,
    invalid,
    joined,
    message,
    offered,
    text_of,
    tool_call,
)
from services.capture.dialects.writing import WireStream, arguments, encoded, event

_ASKED = (
    "temperature top_p top_k stop_sequences thinking tool_choice output_config output_format "
    "context_management effort speed"
)
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
"""A line of Claude Code's system text that differs from call to call."""
_TYPES = {
    "unauthorized": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "busy": "rate_limit_error",
    "unavailable": "overloaded_error",
    "internal": "api_error",
}
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
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


def _result(block: _Block, where: str) -> Message:
    text = text_of(decoded(block.content, Content, where), where)
    if block.is_error and "error" not in text[:100].lower():
        text = f"Error: {text}"
    return message("tool", text, tool_call_id=block.tool_use_id)


def _given(blocks: list[_Block], where: str) -> list[Message]:
    """A user's message: the results of tools in it come first."""
    results: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block.type == "tool_result":
            results.append(_result(block, f"{where}[{index}].content"))
        elif block.type == "text":
            texts.append(block.text)
        else:
            raise invalid(f"{where}[{index}].type", f"{block.type!r} is not served here")
    return results + ([message("user", joined(texts))] if texts or not results else [])


def _said(blocks: list[_Block], where: str) -> Message:
    text = reasoning = ""
    calls = []
    for index, block in enumerate(blocks):
        if block.type == "text":
            text += block.text
        elif block.type == "thinking":
            reasoning += block.thinking
        elif block.type == "tool_use":
            calls.append(tool_call(block.id, block.name, block.input, f"{where}[{index}].input"))
        elif block.type != "redacted_thinking":
            raise invalid(f"{where}[{index}].type", f"{block.type!r} is not served here")
    return message("assistant", text, reasoning=reasoning or None, tool_calls=calls)


def _messages(entry: _Message, where: str) -> list[Message]:
    blocks = [_Block(text=entry.content)] if isinstance(entry.content, str) else entry.content
    path = f"{where}.content"
    if entry.role == "user":
        return _given(blocks, path)
    if entry.role == "assistant":
        return [_said(blocks, path)]
    if entry.role == "system":
        return [message("system", given.text) for given in _given(blocks, path)]
    raise invalid(f"{where}.role", f"{entry.role!r} is not served here")


class Anthropic(WireDialect):
    """Messages."""

    name = "anthropic"

    def _read(self, fields: Fields, model: str, stream: bool | None) -> ModelCall:
        system = text_of(fields.take("system", str | list[Part]), "system")
        messages = [message("system", _BILLING.sub("", system))]
        for where, entry in fields.items("messages", _Message):
            messages += _messages(entry, where)
        if messages[-1].role == "assistant":
            raise invalid("messages", "an answer that the program begins itself is not served here")
        tools = [
            offered(tool.name, tool.description, tool.input_schema, where)
            for where, tool in fields.items("tools", _Tool)
            if tool.input_schema is not None
        ]
        if (fields.take("tool_choice", dict[str, Any]) or {}).get("type") == "none":
            tools = []
        return ModelCall(
            messages=conversation(messages, where="messages", merge=True),
            tools=tools,
            max_tokens=fields.most_tokens("max_tokens"),
            stream=fields.take("stream", bool, False),
            model=fields.take("model", str, model),
            asked=fields.asked(_ASKED),
        )

    def answer(self, call: ModelCall, answer: Answer) -> bytes:
        content: list[dict[str, Any]] = []
        if answer.message.reasoning:
            content.append(
                _open("reasoning") | {"thinking": answer.message.reasoning, "signature": _SIGNATURE}
            )
        if answer.message.text:
            content.append(_open("text") | {"text": answer.message.text})
        for made in answer.message.tool_calls:
            content.append({"type": "tool_use", "id": made.id, "name": made.name, "input": made.arguments})
        head = _head(answer.call_id, call.model, answer.prompt_tokens, answer.cached_tokens)
        head["usage"]["output_tokens"] = answer.sampled_tokens
        return encoded(head | {"content": content, "stop_reason": _STOPS[answer.finish]})

    def stream(self, call: ModelCall, call_id: str, created: int, prompt_tokens: int) -> Stream:
        return _AnthropicStream(call, call_id, created, prompt_tokens)

    def refusal(self, refusal: Refusal) -> bytes:
        return encoded(_error(refusal))

    def count(self, tokens: int) -> bytes:
        return encoded({"input_tokens": tokens})


def _error(refusal: Refusal) -> dict[str, Any]:
    text = str(refusal)
    if refusal.kind == "context":
        # By these words programs know that they must shorten their history.
        text = f"prompt is too long: {refusal.tokens} tokens > {refusal.most_tokens} maximum"
    kind = _TYPES.get(refusal.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def _open(kind: str) -> dict[str, Any]:
    """A block of content before there is anything in it."""
    if kind == "text":
        return {"type": "text", "text": "", "citations": None}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _usage(prompt_tokens: int, cached_tokens: int, sampled_tokens: int) -> dict[str, Any]:
    return {
        # Anthropic counts what was read from a cache beside the rest of the prompt, not within it.
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": sampled_tokens,
    }


def _head(call_id: str, model: str, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(prompt_tokens, cached_tokens, 0),
    }


class _AnthropicStream(WireStream):
    _index = -1
    _kind = ""

    def begin(self) -> bytes:
        head = _head(self._call_id, self._call.model, self._prompt_tokens, 0)
        return _event("message_start", message=head)

    def heartbeat(self) -> bytes:
        return _event("ping")

    def _piece(self, kind: str, text: str) -> bytes:
        out = b""
        if kind != self._kind:
            out = self._stop() + self._start(_open(kind))
            self._kind = kind
        name, field = ("text_delta", "text") if kind == "text" else ("thinking_delta", "thinking")
        return out + self._delta({"type": name, field: text})

    def _close(self, answer: Answer) -> bytes:
        out = self._stop()
        for made in answer.message.tool_calls:
            out += self._start({"type": "tool_use", "id": made.id, "name": made.name, "input": {}})
            self._kind = "tool"
            out += self._delta({"type": "input_json_delta", "partial_json": arguments(made)}) + self._stop()
        stop = {"stop_reason": _STOPS[answer.finish], "stop_sequence": None}
        usage = _usage(answer.prompt_tokens, answer.cached_tokens, answer.sampled_tokens)
        return out + _event("message_delta", delta=stop, usage=usage) + _event("message_stop")

    def fail(self, refusal: Refusal) -> bytes:
        return event(_error(refusal), "error")

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        """The end of the block that is open."""
        if not self._kind:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        out = signed if self._kind == "reasoning" else b""
        self._kind = ""
        return out + _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
