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
from services.capture.call import Answer, ModelCall, Refusal
from services.capture.dialects.fields import Dialect, Fields, decoded, invalid, unserved
from services.capture.dialects.messages import (
    FREE_TEXT,
    Content,
    Part,
    conversation,
    message,
    of_role,
    offered,
    result,
    said,
    text_of,
    tool_call,
)
from services.capture.dialects.writing import Kind, Stream, arguments, encoded, event, openai_error, told

_ASKED = "temperature top_p reasoning tool_choice text truncation max_tool_calls"
_REFUSED = "previous_response_id conversation background prompt top_logprobs"
_ERRORS = {"busy": "rate_limit_exceeded", "context": "context_length_exceeded", "invalid": "invalid_prompt"}
_TOO_LONG = "Your input exceeds the context window of this model. Please adjust your input and try again."


class _Item(Struct):
    type: str = "message"
    role: str = "user"
    content: Content = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str = ""
    namespace: str | None = None
    arguments: str | None = None
    input: str = ""
    action: dict[str, Any] | None = None
    output: Raw = Raw(b"null")


class _Tool(Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[Raw] | None = None
    namespace: str | None = None


def _known_as(thing: _Item | _Tool) -> str:
    """The name by which the model knows a tool."""
    return f"{thing.namespace.rstrip('_')}__{thing.name}" if thing.namespace else thing.name


def _messages(raw: Raw, where: str) -> Iterator[Message]:
    item = decoded(raw, _Item, where)
    match item.type:
        case "message":
            yield of_role(item.role, item.content, where)
        case "reasoning":
            yield said("", text_of(item.content or item.summary, f"{where}.content", seam=""))
        case "function_call":
            yield said(calls=[tool_call(item.call_id, _known_as(item), item.arguments, f"{where}.arguments")])
        case "custom_tool_call":
            yield said(calls=[tool_call(item.call_id, _known_as(item), {"input": item.input}, where)])
        case "local_shell_call":
            yield said(calls=[tool_call(item.call_id, "local_shell", item.action, f"{where}.action")])
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            path = f"{where}.output"
            yield result(text_of(decoded(item.output, Content, path), path, by_tool=True), item.call_id)
        case "item_reference":
            raise invalid(where, "nothing is stored here that could be referred to: send the item itself")
        case other:
            raise unserved(f"{where}.type", other)


def _run_by_programs(where: str, tool: _Tool) -> Iterator[tuple[str, _Tool]]:
    """The tools in an entry that the program runs itself, each with its path."""
    if tool.type in ("function", "custom"):
        yield where, tool
    for index, raw in enumerate(tool.tools or [] if tool.type == "namespace" else []):
        path = f"{where}.tools[{index}]"
        inner = decoded(raw, _Tool, path)
        inner.namespace = tool.name
        if inner.type in ("function", "custom"):
            yield path, inner


def _tools(fields: Fields) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The tools to offer, and what an answer must know of them."""
    tools: list[dict[str, Any]] = []
    custom: list[str] = []
    spaces: dict[str, list[str]] = {}
    for place, entry in fields.items("tools", _Tool):
        for where, tool in _run_by_programs(place, entry):
            name = _known_as(tool)
            free = tool.type == "custom"
            custom += [name] if free else []
            spaces |= {name: [tool.namespace, tool.name]} if tool.namespace else {}
            tools.append(offered(name, tool.description, FREE_TEXT if free else tool.parameters, where))
    if fields.take("tool_choice", Any) == "none":
        return [], {}
    return tools, {name: value for name, value in (("custom_tools", custom), ("namespaces", spaces)) if value}


def _response(
    call: ModelCall, call_id: str, created: int, output: list[dict[str, Any]], answer: Answer | None = None
) -> dict[str, Any]:
    """A response; without an answer one that is in progress."""
    status, why, usage = "in_progress", None, None
    if answer is not None:
        status = "incomplete" if answer.finish == "length" else "completed"
        why = {"reason": "max_output_tokens"} if answer.finish == "length" else None
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        }
    head = {"id": f"resp_{call_id}", "object": "response", "created_at": created, "status": status}
    head |= {"error": None, "incomplete_details": why, "model": call.model, "output": output, "usage": usage}
    asked = {"max_output_tokens": call.max_tokens, "instructions": None, "previous_response_id": None}
    asked |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "store": False, "metadata": {}}
    return head | asked


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _said(kind: Kind, call_id: str, text: str | None, status: str = "completed") -> dict[str, Any]:
    """An item of what was said, or thought; without a text it is empty yet."""
    item = {"content": [] if text is None else [_part(kind, text)], "status": status}
    if kind == "reasoning":
        return {"type": "reasoning", "id": f"rs_{call_id}", "summary": []} | item
    return {"type": "message", "id": f"msg_{call_id}", "role": "assistant"} | item


def _calls(call: ModelCall, answer: Answer) -> Iterator[dict[str, Any]]:
    """Items of the calls of tools."""
    for at, made in enumerate(answer.message.tool_calls):
        namespace, name = call.asked.get("namespaces", {}).get(made.name, (None, made.name))
        item = {"id": f"fc_{answer.call_id}_{at}", "call_id": made.id, "name": name, "status": "completed"}
        item |= {"namespace": namespace} if namespace else {}
        if made.name in call.asked.get("custom_tools", ()):
            yield item | {"type": "custom_tool_call", "input": str(made.arguments.get("input", ""))}
        else:
            yield item | {"type": "function_call", "arguments": arguments(made)}


class _ResponsesStream(Stream):
    _number = -1

    def begin(self) -> bytes:
        self._done: list[dict[str, Any]] = []
        response = self._response()
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _open(self, kind: Kind) -> bytes:
        out = self._added(_said(kind, self._call_id, None, "in_progress"))
        return out + self._of_part(kind, "response.content_part.added", part=_part(kind, ""))

    def _piece(self, kind: Kind, text: str) -> bytes:
        return self._of_text(kind, "delta", delta=text)

    def _shut(self, kind: Kind) -> bytes:
        text = self._sent(kind)
        out = self._of_text(kind, "done", text=text)
        out += self._of_part(kind, "response.content_part.done", part=_part(kind, text))
        return out + self._finished(_said(kind, self._call_id, text))

    def _close(self, answer: Answer) -> bytes:
        out = b""
        for item in _calls(self._call, answer):
            free = item["type"] == "custom_tool_call"
            field, name = (
                ("input", "custom_tool_call_input") if free else ("arguments", "function_call_arguments")
            )
            place = {"item_id": item["id"], "output_index": len(self._done)}
            out += self._added(item | {field: "", "status": "in_progress"})
            out += self._event(f"response.{name}.delta", delta=item[field], **place)
            out += self._event(f"response.{name}.done", **{field: item[field]}, name=item["name"], **place)
            out += self._finished(item)
        response = self._response(answer)
        return out + self._event(f"response.{response['status']}", response=response)

    def fail(self, refusal: Refusal) -> bytes:
        error = self.error(refusal)["error"]
        code = _ERRORS.get(refusal.kind, "server_error")
        failed = {"status": "failed", "error": {"code": code, "message": error["message"]}}
        # OpenAI's SDK looks at the first of these, Codex at the second.
        out = self._event("error", code=error["code"], message=error["message"], param=None, error=error)
        return out + self._event("response.failed", response=self._response() | failed)

    @staticmethod
    def error(refusal: Refusal) -> Any:
        words = {"message": _TOO_LONG} if refusal.kind == "context" else {}
        return {"error": openai_error(refusal) | words}

    def _response(self, answer: Answer | None = None) -> dict[str, Any]:
        return _response(self._call, self._call_id, self._created, self._done, answer)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _finished(self, item: dict[str, Any]) -> bytes:
        self._done.append(item)
        return self._event("response.output_item.done", output_index=len(self._done) - 1, item=item)

    def _of_part(self, kind: Kind, name: str, **fields: Any) -> bytes:
        place = {"item_id": _said(kind, self._call_id, None)["id"], "output_index": len(self._done)}
        return self._event(name, **place, content_index=0, **fields)

    def _of_text(self, kind: Kind, end: str, **fields: Any) -> bytes:
        if kind == "reasoning":
            return self._of_part(kind, f"response.reasoning_text.{end}", **fields)
        return self._of_part(kind, f"response.output_text.{end}", logprobs=[], **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)


class Responses(Dialect):
    """Responses."""

    name = "responses"
    stream = _ResponsesStream

    def _read(self, fields: Fields) -> ModelCall:
        fields.refuse(_REFUSED)
        if "message.output_text.logprobs" in fields.take("include", list[str], []):
            raise invalid("include", "log-probs are not told here")
        fields.inner("text", "format").only("type", "text")
        lead = [message("system", fields.take("instructions", str, ""))]
        given = fields.take("input", str | list[Raw], [])
        if isinstance(given, str):
            lead, given = [*lead, message("user", given)], []
        history = conversation(fields.recent, given, _messages, where="input", lead=lead, merge=True)
        tools, known = _tools(fields)
        known |= fields.asked(_ASKED)
        limit = fields.most_tokens("max_output_tokens")
        return self._call(fields, history, tools=tools, max_tokens=limit, asked=known)

    def answer(self, call: ModelCall, answer: Answer) -> bytes:
        items = [_said(kind, answer.call_id, text) for kind, text in told(answer)]
        items += _calls(call, answer)
        return encoded(_response(call, answer.call_id, answer.created, items, answer))
