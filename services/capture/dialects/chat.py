"""Chat Completions of OpenAI: `POST /v1/chat/completions`.

Refused: more than one choice, log-probs, biases, audio, output by a grammar, content other than text,
functions as they were before tools. A forced choice of a tool is recorded and not obeyed, as are stop
strings: programs that send them know models that do not obey.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from rollout.trajectory import Message
from services.capture.call import Answer, ModelCall, Refusal, Stream
from services.capture.dialects.reading import (
    FREE_TEXT,
    Content,
    Fields,
    WireDialect,
    conversation,
    invalid,
    message,
    offered,
    text_of,
    tool_call,
)
from services.capture.dialects.writing import WireStream, arguments, encoded, event

_ASKED = (
    "temperature top_p top_k min_p seed stop presence_penalty frequency_penalty repetition_penalty "
    "tool_choice reasoning_effort reasoning enable_thinking thinking chat_template_kwargs verbosity "
    "stream_options"
)
_CODES = {"unauthorized": "invalid_api_key", "context": "context_length_exceeded", "ended": "session_ended"}
_CODES |= {"busy": "rate_limit_exceeded", "not_found": "not_found", "too_large": "request_too_large"}
_TYPES = {"busy": "rate_limit_error", "unavailable": "server_error", "internal": "server_error"}


class _Function(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Custom(Struct):
    name: str
    input: str = ""
    description: str | None = None


class _Tool(Struct):
    """A tool that is offered, or a call of one."""

    type: str = "function"
    id: str | None = None
    function: _Function | None = None
    custom: _Custom | None = None


class _Message(Struct):
    role: str
    content: Content = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: list[_Tool] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


def _message(entry: _Message, where: str) -> Message:
    seam = "" if entry.role == "assistant" else "\n"
    text = text_of(entry.content, f"{where}.content", seam=seam)
    if entry.role in ("system", "developer"):
        return message("system", text)
    if entry.role == "user":
        return message("user", text)
    if entry.role == "tool":
        return message("tool", text, tool_call_id=entry.tool_call_id)
    if entry.role != "assistant":
        raise invalid(f"{where}.role", f"{entry.role!r} is not served here")
    if entry.function_call is not None:
        raise invalid(f"{where}.function_call", "it is not served here: use tool_calls")
    reasoning = entry.reasoning_content or (entry.reasoning if isinstance(entry.reasoning, str) else None)
    calls = []
    for index, call in enumerate(entry.tool_calls or []):
        path = f"{where}.tool_calls[{index}]"
        if call.function:
            calls.append(
                tool_call(
                    call.id or "", call.function.name, call.function.arguments, f"{path}.function.arguments"
                )
            )
        elif call.custom:
            calls.append(tool_call(call.id or "", call.custom.name, {"input": call.custom.input}, path))
        else:
            raise invalid(path, f"a call of type {call.type!r} is not served here")
    return message("assistant", text, reasoning=reasoning or None, tool_calls=calls)


def _tools(fields: Fields) -> tuple[list[dict[str, Any]], list[str]]:
    tools, custom = [], []
    for where, tool in fields.items("tools", _Tool):
        if tool.function:
            function = tool.function
            path = f"{where}.function"
            tools.append(offered(function.name, function.description, function.parameters, path))
        elif tool.custom:
            tools.append(offered(tool.custom.name, tool.custom.description, FREE_TEXT, f"{where}.custom"))
            custom.append(tool.custom.name)
        else:
            raise invalid(where, f"a tool of type {tool.type!r} is not served here")
    return ([], []) if fields.take("tool_choice", Any) == "none" else (tools, custom)


def error(refusal: Refusal) -> dict[str, Any]:
    """An error as OpenAI's two APIs tell it."""
    text = str(refusal)
    if refusal.kind == "context" and refusal.most_tokens:
        text = (
            f"This model's maximum context length is {refusal.most_tokens} tokens. However, your messages "
            f"resulted in {refusal.tokens} tokens. Please reduce the length of the messages."
        )
    kind = _TYPES.get(refusal.kind, "invalid_request_error")
    return {"message": text, "type": kind, "param": None, "code": _CODES.get(refusal.kind)}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def _calls(call: ModelCall, answer: Answer) -> list[dict[str, Any]]:
    custom = call.asked.get("custom_tools", ())
    return [
        {"id": made.id, "type": "custom"}
        | {"custom": {"name": made.name, "input": str(made.arguments.get("input", ""))}}
        if made.name in custom
        else {"id": made.id, "type": "function"}
        | {"function": {"name": made.name, "arguments": arguments(made)}}
        for made in answer.message.tool_calls
    ]


class Chat(WireDialect):
    """Chat Completions."""

    name = "chat"

    def _read(self, fields: Fields, model: str, stream: bool | None) -> ModelCall:
        if fields.take("n", int, 1) != 1:
            raise invalid("n", "one choice alone is served here")
        if (fields.inner("response_format").take("type", str) or "text") != "text":
            raise invalid(
                "response_format", "output by a grammar is not served here: a policy samples freely"
            )
        if fields.take("modalities", list[str], ["text"]) != ["text"]:
            raise invalid("modalities", "text alone is served here")
        fields.refuse("logprobs", "top_logprobs", "logit_bias", "audio", "functions", "web_search_options")
        tools, custom = _tools(fields)
        return ModelCall(
            messages=conversation(
                (_message(entry, where) for where, entry in fields.items("messages", _Message)),
                where="messages",
            ),
            tools=tools,
            max_tokens=fields.most_tokens("max_completion_tokens", "max_tokens"),
            stream=fields.take("stream", bool, False),
            model=fields.take("model", str, model),
            asked=fields.asked(_ASKED) | ({"custom_tools": custom} if custom else {}),
        )

    def answer(self, call: ModelCall, answer: Answer) -> bytes:
        said: dict[str, Any] = {
            "role": "assistant",
            "content": answer.message.text or None,
            "refusal": None,
        }
        if answer.message.reasoning:
            said["reasoning_content"] = answer.message.reasoning
        if answer.message.tool_calls:
            said["tool_calls"] = _calls(call, answer)
        choice = {"index": 0, "message": said, "logprobs": None, "finish_reason": answer.finish}
        return encoded(
            {
                "id": f"chatcmpl-{answer.call_id}",
                "object": "chat.completion",
                "created": answer.created,
                "model": call.model,
                "choices": [choice],
                "usage": _usage(answer),
            }
        )

    def stream(self, call: ModelCall, call_id: str, created: int, prompt_tokens: int) -> Stream:
        return _ChatStream(call, call_id, created, prompt_tokens)

    def refusal(self, refusal: Refusal) -> bytes:
        return encoded({"error": error(refusal)})


class _ChatStream(WireStream):
    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def _piece(self, kind: str, text: str) -> bytes:
        return self._chunk({"content" if kind == "text" else "reasoning_content": text})

    def _close(self, answer: Answer) -> bytes:
        out = b""
        if calls := _calls(self._call, answer):
            out += self._chunk({"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]})
        out += self._chunk({}, finish=answer.finish)
        options = self._call.asked.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            out += event(self._head() | {"choices": [], "usage": _usage(answer)})
        return out + b"data: [DONE]\n\n"

    def fail(self, refusal: Refusal) -> bytes:
        return event({"error": error(refusal)})

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._call_id}",
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._call.model,
        }

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event(self._head() | {"choices": [choice]})
