"""Bodies of programs, which may say anything: decoded field by field, so that an error names the field."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from services.capture.call import Answer, ModelCall, Refusal
from services.capture.dialects.writing import Stream, encoded
from services.capture.history import History

MOST_DEPTH = 100
"""Levels of arguments and of schemas of tools: what writes them again later must not run out of stack."""
MOST_ASKED = 2_000
"""Bytes of a parameter that is recorded; of a longer one the record says its length alone."""
MOST_TOKENS = 1 << 31
"""More than any context."""
_ESCAPE = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)
_decoder = cache(msgspec.json.Decoder)


def invalid(where: str, problem: str) -> Refusal:
    """The refusal of a body, which names the field."""
    text = problem.replace("`$", f"`{where}") if "`$" in problem else f"`{where or 'body'}`: {problem}"
    return Refusal("invalid", text if len(text) <= 400 else f"{text[:400]}…")


def unserved(where: str, value: Any) -> Refusal:
    """The refusal of what is not served."""
    return invalid(where, f"{value!r} is not served here")


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


def shallow(value: Any, where: str, depth: int = MOST_DEPTH) -> Any:
    """The value, unless it is nested too deeply."""
    if not depth:
        raise invalid(where, "it is nested too deeply")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(inner, dict | list):
            shallow(inner, where, depth - 1)
    return value


class Fields:
    """The fields of an object, each decoded when it is asked for."""

    def __init__(self, raw: bytes | Raw, where: str = "", recent: Iterable[History] = ()) -> None:
        """`recent`: of calls that this one may go on from."""
        self._raw: dict[str, Raw] = decoded(raw, dict[str, Raw], where)
        self._where = where
        self.recent = recent

    def path(self, name: str) -> str:
        """A field as an error names it."""
        return f"{self._where}.{name}" if self._where else name

    def has(self, name: str) -> bool:
        """Whether it is there, and not null."""
        return name in self._raw and memoryview(self._raw[name]) != b"null"

    def take(self, name: str, kind: Any, default: Any = None) -> Any:
        """A field's value; the default where it is missing or null.

        Raises:
            Refusal: `invalid`: its type is another.
        """
        return decoded(self._raw[name], kind, self.path(name)) if self.has(name) else default

    def inner(self, *names: str) -> Fields:
        """The fields of an object within objects; none where it is missing."""
        fields = self
        for name in names:
            fields = Fields(fields._raw[name] if fields.has(name) else b"{}", fields.path(name))
        return fields

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
                return min(limit, MOST_TOKENS)
        return None

    def asked(self, names: str) -> dict[str, Any]:
        """What is recorded of these, where they are told; names with blanks between them."""
        return {name: self._recorded(name) for name in names.split() if self.has(name)}

    def _recorded(self, name: str) -> Any:
        raw = bytes(memoryview(self._raw[name]))
        if len(raw) > MOST_ASKED:
            return f"<{len(raw)} bytes>"
        value = shallow(self.take(name, Any), self.path(name))
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:  # an integer of more than 64 bits, which the record cannot hold
            return raw.decode()
        return value

    def only(self, name: str, *values: Any) -> None:
        """Refuse a call that asks for another value than these."""
        if self.has(name) and (value := self.take(name, Any)) not in values:
            raise unserved(self.path(name), value)

    def refuse(self, names: str) -> None:
        """Refuse a call that asks for one of these, unless with a value that changes nothing."""
        for name in names.split():
            if self.take(name, Any) not in (None, False, 0, [], {}):
                raise invalid(self.path(name), "it is not served here: leave it out")


class Dialect(ABC):
    """One API of model calls, whose bodies are read by their fields. Stateless."""

    name: str
    stream_type = "text/event-stream"
    """Content type of its streams."""
    stream: ClassVar[type[Stream]]
    """A streamed answer, to be begun."""

    def read(
        self,
        body: bytes,
        *,
        model: str = "",
        stream: bool | None = None,
        recent: Iterable[History] = (),
    ) -> ModelCall:
        """The call in a body.

        Args:
            model, stream: What the path says, where it does.
            recent: Histories of calls in this dialect that it may go on from.

        Raises:
            Refusal: `invalid`, which names the field; also for what is not served here.
        """
        try:
            call = self._read(Fields(body, recent=recent))
        except Refusal:
            # A program of JavaScript that cut a text in the middle of a pair sends half of it.
            mended = _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], body)
            if mended == body:
                raise
            call = self._read(Fields(mended))
        stream = call.stream if stream is None else stream
        return replace(call, model=model or call.model, stream=stream, size=len(body))

    @abstractmethod
    def answer(self, call: ModelCall, answer: Answer) -> bytes:
        """The JSON of a whole answer."""

    def refusal(self, refusal: Refusal) -> bytes:
        """The JSON of an error; its status is `refusal.status`."""
        return encoded(self.stream.error(refusal))

    @abstractmethod
    def _read(self, fields: Fields) -> ModelCall: ...

    def _call(self, fields: Fields, history: History, **read: Any) -> ModelCall:
        """A call of which the body tells model and stream."""
        model, stream = fields.take("model", str, ""), fields.take("stream", bool, False)
        return ModelCall(history.messages, model=model, stream=stream, history=history, **read)
