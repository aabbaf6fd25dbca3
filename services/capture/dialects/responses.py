"""Responses of OpenAI: `POST /v1/responses`, without a memory: a program sends its history each time.

Refused: what refers to earlier responses or to stored items, log-probs, output by a grammar, work in the
background, content other than text, items of tools that OpenAI's servers run. Left out of the prompt: those
tools, which Codex always offers. Forced choices of tools are recorded and not obeyed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Raw, Struct

from rollout.trajectory import Message
from services.capture.call import Answer, ModelCall, Refusal, Stream
from services.capture.dialects import chat
from services.capture.dialects.reading import (
    FREE_TEXT,
    Content,
    Fields,
    Part,
    WireDialect,
    conversation,
    decoded,
    invalid,
    message,
    offered,
    text_of,
    tool_call,
)
from services.capture.dialects.writing import WireStream, arguments, encoded, event

_ASKED = "temperature top_p reasoning tool_choice text truncation max_tool_calls presence_penalty frequency_penalty"
_REFUSED = ("previous_response_id", "conversation", "background", "prompt", "top_logprobs")
_ERRORS = {"busy": "rate_limit_exceeded", "context": "context_length_exceeded", "invalid": "invalid_prompt"}


class _Item(Struct):
    type: str = "message"
    role: str = "user"
    content: Content = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: Raw = Raw(b"null")


class _Tool(Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[Raw] | None = None


def _within(namespace: str | None, name: str) -> str:
    """The name by which the model knows a tool of a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def _message(item: _Item, where: str) -> Message:
    kind, name = item.type, _within(item.namespace, item.name or "")
    if kind == "message":
        text = text_of(item.content, f"{where}.content", seam="" if item.role == "assistant" else "\n")
        if item.role in ("system", "developer"):
            return message("system", text)
        if item.role == "user":
            return message("user", text)
        if item.role == "assistant":
            return message("assistant", text)
        raise invalid(f"{where}.role", f"{item.role!r} is not served here")
    if kind == "reasoning":
        text = text_of(item.content or item.summary, f"{where}.content", seam="")
        return message("assistant", "", reasoning=text or None)
    if kind == "function_call":
        call = tool_call(item.call_id or "", name, item.arguments, f"{where}.arguments")
        return message("assistant", "", tool_calls=[call])
    if kind in ("custom_tool_call", "local_shell_call"):
        given = {"input": item.input or ""} if kind == "custom_tool_call" else item.action
        call = tool_call(item.call_id or "", name or "local_shell", given, f"{where}.action")
        return message("assistant", "", tool_calls=[call])
    if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        text = text_of(decoded(item.output, Content, f"{where}.output"), f"{where}.output")
        return message("tool", text, tool_call_id=item.call_id)
    if kind == "item_reference":
        raise invalid(where, "nothing is stored here that could be referred to: send the item itself")
    raise invalid(f"{where}.type", f"{kind!r} is not served here")


def _tools(fields: Fields) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The tools to offer, and what an answer must know of them."""
    tools: list[dict[str, Any]] = []
    custom: list[str] = []
    spaces: dict[str, list[str]] = {}

    def take(tool: _Tool, where: str, namespace: str | None = None) -> None:
        name = _within(namespace, tool.name)
        if tool.type == "namespace":
            for index, raw in enumerate(tool.tools or [] if namespace is None else []):
                path = f"{where}.tools[{index}]"
                take(decoded(raw, _Tool, path), path, tool.name)
            return
        if tool.type not in ("function", "custom"):
            return
        if tool.type == "custom":
            custom.append(name)
        if namespace:
            spaces[name] = [namespace, tool.name]
        tools.append(
            offered(name, tool.description, FREE_TEXT if tool.type == "custom" else tool.parameters, where)
        )

    for where, tool in fields.items("tools", _Tool):
        take(tool, where)
    if fields.take("tool_choice", Any) == "none":
        return [], {}
    told = {"custom_tools": custom, "namespaces": spaces}
    return tools, {name: value for name, value in told.items() if value}


class Responses(WireDialect):
    """Responses."""

    name = "responses"

    def _read(self, fields: Fields, model: str, stream: bool | None) -> ModelCall:
        fields.refuse(*_REFUSED)
        if "message.output_text.logprobs" in fields.take("include", list[str], []):
            raise invalid("include", "log-probs are not told here")
        if (fields.inner("text").inner("format").take("type", str) or "text") != "text":
            raise invalid("text.format", "output by a grammar is not served here: a policy samples freely")
        messages = [message("system", fields.take("instructions", str, ""))]
        given = fields.take("input", str | list[Raw], [])
        if isinstance(given, str):
            messages.append(message("user", given))
        else:
            messages += [_message(item, where) for where, item in fields.items("input", _Item)]
        tools, told = _tools(fields)
        return ModelCall(
            messages=conversation(messages, where="input", merge=True),
            tools=tools,
            max_tokens=fields.most_tokens("max_output_tokens"),
            stream=fields.take("stream", bool, False),
            model=fields.take("model", str, model),
            asked=fields.asked(_ASKED) | told,
        )

    def answer(self, call: ModelCall, answer: Answer) -> bytes:
        return encoded(_response(call, answer.call_id, answer.created, list(_items(call, answer)), answer))

    def stream(self, call: ModelCall, call_id: str, created: int, prompt_tokens: int) -> Stream:
        return _ResponsesStream(call, call_id, created, prompt_tokens)

    def refusal(self, refusal: Refusal) -> bytes:
        return encoded({"error": _error(refusal)})


def _error(refusal: Refusal) -> dict[str, Any]:
    told = chat.error(refusal)
    if refusal.kind == "context":
        told["message"] = (
            "Your input exceeds the context window of this model. Please adjust your input and try again."
        )
    return told


def _response(
    call: ModelCall, call_id: str, created: int, output: list[dict[str, Any]], answer: Answer | None = None
) -> dict[str, Any]:
    """A response; without an answer one that is in progress."""
    cut = answer is not None and answer.finish == "length"
    response: dict[str, Any] = {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": created,
        "status": "in_progress" if answer is None else "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "max_output_tokens": call.max_tokens,
        "model": call.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "usage": None,
    }
    if answer is not None:
        response["usage"] = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        }
    return response


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _said(kind: str, call_id: str, parts: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
    """An item of what was said, or thought."""
    if kind == "reasoning":
        return {"type": "reasoning", "id": f"rs_{call_id}", "summary": [], "content": parts, "status": status}
    return {
        "type": "message",
        "id": f"msg_{call_id}",
        "role": "assistant",
        "content": parts,
        "status": status,
    }


def _calls(call: ModelCall, answer: Answer) -> Iterator[dict[str, Any]]:
    """Items of the calls of tools."""
    for at, made in enumerate(answer.message.tool_calls):
        namespace, name = call.asked.get("namespaces", {}).get(made.name, (None, made.name))
        item = {"id": f"fc_{answer.call_id}_{at}", "call_id": made.id, "name": name, "status": "completed"}
        if namespace:
            item["namespace"] = namespace
        if made.name in call.asked.get("custom_tools", ()):
            yield item | {"type": "custom_tool_call", "input": str(made.arguments.get("input", ""))}
        else:
            yield item | {"type": "function_call", "arguments": arguments(made)}


def _items(call: ModelCall, answer: Answer) -> Iterator[dict[str, Any]]:
    texts = {"reasoning": answer.message.reasoning or "", "text": answer.message.text}
    for kind, text in texts.items():
        if text:
            yield _said(kind, answer.call_id, [_part(kind, text)])
    yield from _calls(call, answer)


class _ResponsesStream(WireStream):
    _number = -1
    _kind = ""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._done: list[dict[str, Any]] = []

    def begin(self) -> bytes:
        response = self._response()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _piece(self, kind: str, text: str) -> bytes:
        out = b""
        if kind != self._kind:
            out = self._stop()
            self._kind = kind
            out += self._added(_said(kind, self._call_id, [], "in_progress"))
            out += self._within_part("response.content_part.added", part=_part(kind, ""))
        return out + self._within_part(f"{self._name()}.delta", delta=text, **self._logprobs())

    def _stop(self) -> bytes:
        """The end of the item that is open."""
        if not self._kind:
            return b""
        text = self._text if self._kind == "text" else self._reasoning
        part = _part(self._kind, text)
        out = self._within_part(f"{self._name()}.done", text=text, **self._logprobs())
        out += self._within_part("response.content_part.done", part=part)
        out += self._finished(_said(self._kind, self._call_id, [part]))
        self._kind = ""
        return out

    def _close(self, answer: Answer) -> bytes:
        out = self._stop()
        for item in _calls(self._call, answer):
            field = "arguments" if item["type"] == "function_call" else "input"
            name = "function_call_arguments" if field == "arguments" else "custom_tool_call_input"
            place = {"item_id": item["id"], "output_index": len(self._done)}
            out += self._added(item | {field: "", "status": "in_progress"})
            out += self._event(f"response.{name}.delta", delta=item[field], **place)
            out += self._event(f"response.{name}.done", **{field: item[field]}, name=item["name"], **place)
            out += self._finished(item)
        response = self._response(answer)
        return out + self._event(f"response.{response['status']}", response=response)

    def fail(self, refusal: Refusal) -> bytes:
        told = _error(refusal)
        failed = self._response() | {"status": "failed"}
        failed["error"] = {
            "code": _ERRORS.get(refusal.kind, "server_error"),
            "message": told["message"],
        }
        # OpenAI's SDK looks at the first of these, Codex at the second.
        out = self._event("response.failed", response=failed)
        return self._event("error", code=told["code"], message=told["message"], param=None, error=told) + out

    def _response(self, answer: Answer | None = None) -> dict[str, Any]:
        return _response(self._call, self._call_id, self._created, self._done, answer)

    def _name(self) -> str:
        return "response.output_text" if self._kind == "text" else "response.reasoning_text"

    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._kind == "text" else {}

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _finished(self, item: dict[str, Any]) -> bytes:
        self._done.append(item)
        return self._event("response.output_item.done", output_index=len(self._done) - 1, item=item)

    def _within_part(self, kind: str, **fields: Any) -> bytes:
        item = _said(self._kind, self._call_id, [])["id"]
        return self._event(kind, item_id=item, output_index=len(self._done), content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)
