"""What the dialects share in reading: bodies of programs that may say anything at all."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import Raw, Struct

from rollout.trajectory import Message, Role, TextPart, ToolCall
from services.capture.call import Dialect, ModelCall, Refusal

MOST_DEPTH = 100
"""Levels of arguments and of schemas of tools: what writes them again later must not run out of stack."""
MOST_ASKED = 2_000
"""Bytes of a parameter that is recorded; of a longer one the record says its length alone."""
_NULL = b"null"
_ESCAPE = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)
_decoder = cache(msgspec.json.Decoder)


def invalid(where: str, problem: str) -> Refusal:
    """The refusal of a body, which names the field."""
    text = problem.replace("`$", f"`{where}") if "`$" in problem else f"`{where or 'body'}`: {problem}"
    return Refusal("invalid", text if len(text) <= 400 else f"{text[:400]}…")


def decoded(raw: bytes | Raw, kind: Any, where: str) -> Any:
    """What JSON says, as the type `kind`.

    Raises:
        Refusal: `invalid`: it is not JSON, or of another type.
    """
    try:
        return _decoder(kind).decode(raw)
    except RecursionError:
        raise invalid(where, "it is nested too deeply") from None
    except ValueError as error:  # of JSON, of the type, of UTF-8
        raise invalid(where, str(error)) from None


class Fields:
    """The fields of an object, each decoded when it is asked for."""

    def __init__(self, raw: bytes | Raw, where: str = "") -> None:
        self._raw: dict[str, Raw] = decoded(raw, dict[str, Raw], where)
        self._where = where

    def path(self, name: str) -> str:
        """A field as an error names it."""
        return f"{self._where}.{name}" if self._where else name

    def has(self, name: str) -> bool:
        """Whether it is there, and not null."""
        return name in self._raw and not (
            len(memoryview(self._raw[name])) == 4 and bytes(self._raw[name]) == _NULL
        )

    def take(self, name: str, kind: Any, default: Any = None) -> Any:
        """A field's value; the default where it is missing or null.

        Raises:
            Refusal: `invalid`: its type is another.
        """
        return decoded(self._raw[name], kind, self.path(name)) if self.has(name) else default

    def inner(self, name: str) -> Fields:
        """The fields of an object in a field; none where it is missing."""
        return Fields(self._raw[name] if self.has(name) else b"{}", self.path(name))

    def items(self, name: str, kind: Any) -> Iterator[tuple[str, Any]]:
        """The entries of a list, each with its path."""
        for index, raw in enumerate(self.take(name, list[Raw], [])):
            where = f"{self.path(name)}[{index}]"
            yield where, decoded(raw, kind, where)

    def most_tokens(self, *names: str) -> int | None:
        """The first limit on sampled ids that is told."""
        for name in names:
            if (limit := self.take(name, int)) is not None:
                if limit < 1:
                    raise invalid(self.path(name), f"it must be at least 1, not {limit}")
                return limit
        return None

    def asked(self, names: str) -> dict[str, Any]:
        """What is recorded of these, where they are told; names with blanks between them."""
        return {name: self._recorded(name) for name in names.split() if self.has(name)}

    def _recorded(self, name: str) -> Any:
        size = len(bytes(self._raw[name]))
        return f"<{size} bytes>" if size > MOST_ASKED else shallow(self.take(name, Any), self.path(name))

    def refuse(self, *names: str) -> None:
        """Refuse a call that asks for one of these, unless with a value that changes nothing."""
        for name in names:
            if self.take(name, Any) not in (None, False, 0, [], {}):
                raise invalid(self.path(name), "it is not served here: leave it out")


class WireDialect(Dialect):
    """A dialect that reads a body by its fields."""

    stream_type = "text/event-stream"
    """Content type of its streams."""

    def read(self, body: bytes, *, model: str = "", stream: bool | None = None) -> ModelCall:
        try:
            return self._read(Fields(body), model, stream)
        except Refusal:
            # A program of JavaScript that cut a text in the middle of a pair sends half of it.
            mended = _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], body)
            if mended == body:
                raise
            return self._read(Fields(mended), model, stream)

    @abstractmethod
    def _read(self, fields: Fields, model: str, stream: bool | None) -> ModelCall: ...


class Part(Struct):
    """A piece of content, in all dialects that call it by its type."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"})
Content = str | list[Part] | None


def text_of(content: Content, where: str, *, seam: str = "\n") -> str:
    """The text of content.

    Raises:
        Refusal: `invalid`: a part is something else, an image for example.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in TEXTS:
            raise invalid(f"{where}[{index}].type", f"{part.type!r} is not served here, text alone is")
    return joined((part.text or part.refusal or "" for part in content), seam)


def joined(texts: Iterable[str], seam: str = "\n") -> str:
    """Texts as one; with the seam between two, unless a line ends there anyway."""
    whole = ""
    for text in texts:
        if whole and text and not (whole.endswith("\n") or text.startswith("\n")):
            whole += seam
        whole += text
    return whole


def message(role: Role, text: str, **fields: Any) -> Message:
    """A message of one text."""
    return Message(role=role, content=[TextPart(text=text)] if text else [], **fields)


def tool_call(call_id: str, name: str, arguments: str | dict[str, Any] | None, where: str) -> ToolCall:
    """A call of a tool in a history.

    Raises:
        Refusal: `invalid`: its arguments are no object.
    """
    if not isinstance(arguments, dict):
        arguments = decoded(arguments.encode(), dict[str, Any], where) if arguments else {}
    return ToolCall(id=call_id, name=name, arguments=shallow(arguments, where))


def offered(name: str, description: str | None, parameters: Any, where: str) -> dict[str, Any]:
    """A tool as codecs render it."""
    if not name:
        raise invalid(f"{where}.name", "a tool needs a name")
    schema = shallow(parameters, where) or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": schema},
    }


FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of a tool that takes a text instead of arguments."""


def shallow(value: Any, where: str, depth: int = MOST_DEPTH) -> Any:
    """The value, unless it is nested too deeply."""
    if isinstance(value, dict | list):
        if not depth:
            raise invalid(where, "it is nested too deeply")
        for inner in value.values() if isinstance(value, dict) else value:
            if isinstance(inner, dict | list):
                shallow(inner, where, depth - 1)
    return value


def conversation(messages: Iterable[Message], *, where: str, merge: bool = False) -> list[Message]:
    """Messages as a `ModelCall` has them: what of the system leads is one message, what comes later a user's.

    Args:
        merge: Whether assistant's messages that follow each other are parts of one turn.
    """
    system: list[str] = []
    rest: list[Message] = []
    for entry in messages:
        if entry.role == "system" and not rest:
            system.append(entry.text)
        elif entry.role == "system":
            rest.append(message("user", entry.text))
        elif merge and rest and rest[-1].role == entry.role == "assistant":
            rest[-1] = _merged(rest[-1], entry)
        else:
            rest.append(entry)
    text = joined(system, "\n\n")
    if not (text or rest):
        raise invalid(where, "there are no messages")
    return [message("system", text), *rest] if text else rest


def _merged(first: Message, second: Message) -> Message:
    return message(
        "assistant",
        first.text + second.text,
        reasoning=(first.reasoning or "") + (second.reasoning or "") or None,
        tool_calls=first.tool_calls + second.tool_calls,
    )
