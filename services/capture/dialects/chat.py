"""Chat Completions of OpenAI: `POST /v1/chat/completions`.

Refused: more than one choice, log-probs, biases, audio, output by a grammar, content other than text, tools
other than functions, and functions as they were before tools. A forced choice of a tool is recorded and not
obeyed, as are stop strings: programs that send them know models that do not obey.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Raw, Struct

from rollout.trajectory import Message
from services.capture.call import Answer, ModelCall, Refusal
from services.capture.dialects.fields import Dialect, Fields, decoded, invalid, unserved
from services.capture.dialects.messages import (
    Content,
    conversation,
    of_role,
    offered,
    result,
    text_of,
    tool_call,
)
from services.capture.dialects.writing import Kind, Stream, arguments, encoded, event, openai_error

_ASKED = (
    "temperature top_p top_k min_p seed stop presence_penalty frequency_penalty repetition_penalty verbosity "
    "tool_choice reasoning_effort reasoning enable_thinking thinking chat_template_kwargs stream_options"
)
_REFUSED = "logprobs top_logprobs logit_bias audio functions web_search_options"


class _Function(Struct):
    """A function that is offered, or a call of one."""

    name: str
    arguments: str | dict[str, Any] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Struct):
    type: str = "function"
    id: str | None = None
    function: _Function | None = None


class _Message(Struct):
    role: str
    content: Content = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: list[_Tool] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


def _function(tool: _Tool, where: str) -> _Function:
    if tool.function is None:
        raise unserved(f"{where}.type", tool.type)
    return tool.function


def _messages(raw: Raw, where: str) -> Iterator[Message]:
    entry = decoded(raw, _Message, where)
    if entry.role == "tool":
        yield result(text_of(entry.content, f"{where}.content", by_tool=True), entry.tool_call_id)
        return
    message = of_role(entry.role, entry.content, where)
    if entry.role == "assistant":
        if entry.function_call is not None:
            raise invalid(f"{where}.function_call", "it is not served here: use tool_calls")
        reasoning = entry.reasoning_content or entry.reasoning
        message.reasoning = reasoning if reasoning and isinstance(reasoning, str) else None
        for index, tool in enumerate(entry.tool_calls or []):
            path = f"{where}.tool_calls[{index}]"
            call = _function(tool, path)
            made = tool_call(tool.id, call.name, call.arguments, f"{path}.function.arguments")
            message.tool_calls.append(made)
    yield message


def _tools(fields: Fields) -> list[dict[str, Any]]:
    tools = []
    for where, tool in fields.items("tools", _Tool):
        function = _function(tool, where)
        tools.append(offered(function.name, function.description, function.parameters, f"{where}.function"))
    return [] if fields.take("tool_choice", Any) == "none" else tools


def _head(kind: str, call: ModelCall, call_id: str, created: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{call_id}", "object": kind, "created": created, "model": call.model}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": made.id, "type": "function", "function": {"name": made.name, "arguments": arguments(made)}}
        for made in answer.message.tool_calls
    ]


class _ChatStream(Stream):
    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def _piece(self, kind: Kind, text: str) -> bytes:
        return self._chunk({"content" if kind == "text" else "reasoning_content": text})

    def _close(self, answer: Answer) -> bytes:
        out = b""
        if calls := _calls(answer):
            out += self._chunk({"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]})
        out += self._chunk({}, finish=answer.finish)
        options = self._call.asked.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            out += self._event([], usage=_usage(answer))
        return out + b"data: [DONE]\n\n"

    @staticmethod
    def error(refusal: Refusal) -> Any:
        return {"error": openai_error(refusal)}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = _head("chat.completion.chunk", self._call, self._call_id, self._created)
        return event(head | {"choices": choices} | more)


class Chat(Dialect):
    """Chat Completions."""

    name = "chat"
    stream = _ChatStream

    def _read(self, fields: Fields) -> ModelCall:
        fields.only("n", 1)
        fields.only("modalities", ["text"])
        fields.inner("response_format").only("type", "text")
        fields.refuse(_REFUSED)
        entries = fields.take("messages", list[Raw], [])
        history = conversation(fields.recent, entries, _messages, where="messages")
        limit = fields.most_tokens("max_completion_tokens", "max_tokens")
        asked = fields.asked(_ASKED)
        return self._call(fields, history, tools=_tools(fields), max_tokens=limit, asked=asked)

    def answer(self, call: ModelCall, answer: Answer) -> bytes:
        said = {"role": "assistant", "content": answer.message.text or None, "refusal": None}
        if answer.message.reasoning:
            said["reasoning_content"] = answer.message.reasoning
        if calls := _calls(answer):
            said["tool_calls"] = calls
        choice = {"index": 0, "message": said, "logprobs": None, "finish_reason": answer.finish}
        head = _head("chat.completion", call, answer.call_id, answer.created)
        return encoded(head | {"choices": [choice], "usage": _usage(answer)})
