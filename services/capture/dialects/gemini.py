"""Gemini: `generateContent`, `streamGenerateContent` and `countTokens` below `/v1beta/models/<model>:`.

Refused: several candidates, log-probs, stored content, content other than text. Left out of the prompt: tools
that Google's servers run. Schemas of output, forced calls and stop strings are recorded and not obeyed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Raw, Struct, field

from rollout.trajectory import Message, ToolCall
from services.capture.call import Answer, ModelCall, Refusal
from services.capture.dialects.fields import Dialect, Fields, decoded, invalid, shallow, unserved
from services.capture.dialects.messages import (
    conversation,
    joined,
    message,
    offered,
    result,
    said,
    tool_call,
    unseen,
)
from services.capture.dialects.writing import Kind, Stream, encoded, event, told
from services.capture.history import History

_ASKED = (
    "temperature topP topK seed stopSequences presencePenalty frequencyPenalty thinkingConfig "
    "responseMimeType responseSchema responseJsonSchema"
)
_STATUS = {"unauthorized": "UNAUTHENTICATED", "ended": "FAILED_PRECONDITION"}
_STATUS |= {"busy": "RESOURCE_EXHAUSTED", "unavailable": "UNAVAILABLE", "internal": "INTERNAL"}
_COUNTS = {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
"""Of a schema; Google writes these numbers as texts."""


class _Call(Struct):
    name: str
    id: str | None = None
    args: dict[str, Any] | None = None


class _Result(Struct, rename="camel"):
    name: str
    id: str | None = None
    response: dict[str, Any] | None = None
    parts: list[Any] | None = None


class _Part(Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    function_call: _Call | None = None
    function_response: _Result | None = None


class _Content(Struct):
    parts: list[_Part] | None = None
    role: str | None = None


class _Declared(Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None
    schema_of_sdk: dict[str, Any] | None = field(name="parameters_json_schema", default=None)
    """Google's SDK of Python writes this one its own way."""


class _Tool(Struct, rename="camel"):
    function_declarations: list[_Declared] | None = None
    of_rest: list[_Declared] | None = field(name="function_declarations", default=None)


def _result(given: _Result, where: str) -> Message:
    response = shallow(given.response or {}, where)
    text = next(iter(response.values()), "") if len(response) == 1 else None
    if not (isinstance(text, str) and response.keys() <= {"output", "result", "error"}):
        text = encoded(response).decode()
    text = joined([text, *(unseen("content") for _ in given.parts or ())])
    return result(text, given.id, failed="error" in response, name=given.name)


def _messages(raw: Raw, where: str) -> Iterator[Message]:
    return _of_content(decoded(raw, _Content, where), where)


def _of_content(content: _Content, where: str) -> Iterator[Message]:
    """What one entry of a history says: results of tools come first."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    results = 0
    for index, part in enumerate(content.parts or []):
        path = f"{where}.parts[{index}]"
        if call := part.function_call:
            calls.append(tool_call(call.id, call.name, call.args, f"{path}.functionCall.args"))
        elif part.function_response:
            results += 1
            yield _result(part.function_response, f"{path}.functionResponse")
        elif part.text is None and results:  # what the tool has shown beside its result
            texts.append(unseen("content"))
        elif part.text is None:
            raise invalid(path, "neither text nor a call nor a result: nothing else is served here")
        else:
            (thoughts if part.thought else texts).append(part.text)
    if content.role == "model":
        yield said("".join(texts), "".join(thoughts), calls)
    elif content.role not in (None, "user", "function", "tool"):
        raise unserved(f"{where}.role", content.role)
    elif texts or not results:
        yield message("user", joined(texts))


def _pair(history: History) -> None:
    """Give each call an id, and each result that of the oldest open call of its name."""
    unanswered, number, done = history.state or ((), 0, 0)
    unanswered, paired = list(unanswered), history.messages[:done]
    for entry in history.messages[done:]:
        if calls := entry.tool_calls:
            if "" in [call.id for call in calls]:
                named = enumerate(calls, number)
                calls = [
                    call if call.id else call.model_copy(update={"id": f"call_{at}"}) for at, call in named
                ]
                entry = entry.model_copy(update={"tool_calls": calls})
            unanswered += calls
            number += len(calls)
        elif unanswered and entry.role == "tool":
            known, name = entry.tool_call_id, entry.name
            found = next((c for c in unanswered if known in (None, c.id) and c.name == name), None)
            if found is not None:
                unanswered.remove(found)
                entry = entry if known else entry.model_copy(update={"tool_call_id": found.id})
        paired.append(entry)
    history.messages, history.state = paired, (unanswered, number, len(paired))


def _schema(value: Any) -> Any:
    """A schema of OpenAPI, as Gemini has it, as JSON Schema."""
    if isinstance(value, list):
        return [_schema(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    out: dict[str, Any] = {}
    for key, entry in value.items():
        if key == "type" and isinstance(entry, str):
            out[key] = entry.lower()
        elif key in _COUNTS and isinstance(entry, str) and entry.isdecimal() and len(entry) < 20:
            out[key] = int(entry)
        else:
            out[key] = entry if key in ("enum", "default", "example") else _schema(entry)
    if out.get("nullable") is True and isinstance(out.get("type"), str):
        del out["nullable"]
        out["type"] = [out["type"], "null"]
    return out


def _tools(fields: Fields) -> list[dict[str, Any]]:
    tools = []
    for where, tool in fields.items("tools", _Tool):
        for index, declared in enumerate(tool.function_declarations or tool.of_rest or []):
            path = f"{where}.functionDeclarations[{index}]"
            schema = declared.parameters_json_schema or declared.schema_of_sdk
            schema = schema or _schema(shallow(declared.parameters, path))
            tools.append(offered(declared.name, declared.description, schema, path))
    mode = fields.inner("toolConfig", "functionCallingConfig").take("mode", str)
    return [] if mode == "NONE" else tools


def _part(kind: Kind, text: str) -> dict[str, Any]:
    return {"text": text, "thought": True} if kind == "reasoning" else {"text": text}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    calls = answer.message.tool_calls
    return [{"functionCall": {"id": made.id, "name": made.name, "args": made.arguments}} for made in calls]


def _chunk(
    call: ModelCall, call_id: str, parts: list[dict[str, Any]], answer: Answer | None = None
) -> dict[str, Any]:
    """A response, or a piece of one; the last, which tells usage, has the answer."""
    candidate = {"content": {"parts": parts, "role": "model"}, "index": 0}
    chunk = {"candidates": [candidate], "modelVersion": call.model, "responseId": call_id}
    if answer is not None:
        candidate["finishReason"] = "MAX_TOKENS" if answer.finish == "length" else "STOP"
        chunk["usageMetadata"] = {
            "promptTokenCount": answer.prompt_tokens,
            "candidatesTokenCount": answer.sampled_tokens,
            "totalTokenCount": answer.prompt_tokens + answer.sampled_tokens,
            "cachedContentTokenCount": answer.cached_tokens,
        }
    return chunk


class _GeminiStream(Stream):
    def begin(self) -> bytes:
        return b""

    def heartbeat(self) -> bytes:
        return b"\n\n"  # Google's SDKs read a comment as a broken piece of JSON

    def _piece(self, kind: Kind, text: str) -> bytes:
        return self._entry(_chunk(self._call, self._call_id, [_part(kind, text)]))

    def _close(self, answer: Answer) -> bytes:
        parts = _calls(answer) or [_part("text", "")]
        return self._entry(_chunk(self._call, self._call_id, parts, answer))

    def fail(self, refusal: Refusal) -> bytes:
        return encoded(self.error(refusal)) + b"\n"  # no event: Google's SDKs look for it as it is

    @staticmethod
    def error(refusal: Refusal) -> Any:
        text = str(refusal)
        if refusal.kind == "context":
            most = f"the maximum number of tokens allowed ({refusal.most_tokens})"
            text = f"The input token count ({refusal.tokens}) exceeds {most}."
        status = _STATUS.get(refusal.kind, "INVALID_ARGUMENT")
        return {"error": {"code": refusal.status, "message": text, "status": status}}

    def _entry(self, chunk: dict[str, Any]) -> bytes:
        return event(chunk)


class _ListStream(_GeminiStream):
    _comma = b"["

    def _close(self, answer: Answer) -> bytes:
        return super()._close(answer) + b"]"

    def fail(self, refusal: Refusal) -> bytes:
        return self._entry(self.error(refusal)) + b"]"

    def _entry(self, chunk: dict[str, Any]) -> bytes:
        comma, self._comma = self._comma, b",\n"
        return comma + encoded(chunk)


class Gemini(Dialect):
    """The API of Gemini; its streams are events, or the entries of one list where `sse` is false."""

    name = "gemini"

    def __init__(self, *, sse: bool = True) -> None:
        self.stream = _GeminiStream if sse else _ListStream
        self.stream_type = "text/event-stream" if sse else "application/json"

    def _read(self, fields: Fields) -> ModelCall:
        if fields.has("generateContentRequest"):  # of countTokens
            fields = fields.inner("generateContentRequest")
        config = fields.inner("generationConfig")
        config.only("candidateCount", 1)
        config.only("responseModalities", ["TEXT"], ["text"], [])
        config.refuse("responseLogprobs logprobs speechConfig")
        fields.refuse("cachedContent system_instruction generation_config tool_config cached_content")
        system = fields.take("systemInstruction", _Content, _Content())
        given = _of_content(_Content(system.parts), "systemInstruction")
        lead = [message("system", entry.text) for entry in given]
        entries = fields.take("contents", list[Raw], [])
        history = conversation(fields.recent, entries, _messages, where="contents", lead=lead, merge=True)
        _pair(history)
        limit = config.most_tokens("maxOutputTokens")
        asked = config.asked(_ASKED) | fields.asked("toolConfig")
        return self._call(fields, history, tools=_tools(fields), max_tokens=limit, asked=asked)

    def answer(self, call: ModelCall, answer: Answer) -> bytes:
        parts = [_part(kind, text) for kind, text in told(answer)] + _calls(answer)
        return encoded(_chunk(call, answer.call_id, parts, answer))

    def count(self, tokens: int) -> bytes:
        return encoded({"totalTokens": tokens})
