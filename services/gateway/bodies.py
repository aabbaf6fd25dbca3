"""Bodies of requests as JSON that every reader takes for the same, in bounded memory.

RFC 8259 leaves open what a name that comes twice means, how large a number may be and how deep values may
nest; readers differ, and what one of them took must not be what another one stumbles over. So all of it is
refused here, with the field that it is in.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from flask import request

from services.gateway.problems import ApiProblem, invalid

MAX_DEPTH = 64
"""Levels of a body. Readers of answers, in which a request is a few levels deeper, take 200."""
MAX_VALUES = 2_000_000
"""Values of a body: one may take 100 bytes of memory where it took 3 of the body."""
MAX_DIGITS = 400
"""Characters of a number. The largest one that has a place in a float of 64 bits has 309."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NUMBER_SHOWN = 20


class _Refused:
    """Stands in a parsed body where something cannot be taken, and says why."""

    def __init__(self, why: str) -> None:
        self.why = why


def body_json(*, empty: Any = None) -> Any:
    """The JSON body.

    Args:
        empty: What no body at all stands for; None = it is needed.

    Raises:
        ApiProblem: 415 for another media type or character set, 400 for what is not JSON or cannot be kept.
    """
    data = request.get_data(cache=False)
    if not data and empty is not None:
        return empty
    if not request.is_json:
        raise ApiProblem(415, "Unsupported media type", "send Content-Type: application/json")
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise ApiProblem(415, "Unsupported media type", f"charset {charset[:40]!r}: JSON is sent as UTF-8")
    return read_json(data)


def read_json(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ApiProblem: 400 naming the field.
    """
    # The second time without texts: most marks may be in those.
    if _marks(data) > MAX_VALUES and _marks(_STRING.sub(b"", data)) > MAX_VALUES:
        raise invalid("(body)", f"holds more than {MAX_VALUES} values; send several calls")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise invalid("(body)", f"not UTF-8 at byte {error.start}") from None
    if text.startswith("\ufeff"):
        raise invalid("(body)", "begins with a byte order mark (BOM), which JSON has none of")
    decoder = _Decoder()
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise invalid("(body)", f"not valid JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise _too_deep("(body)") from None
    _require_fit(value, whole=decoder.refused or _SURROGATE.search(text) is not None)
    return value


def _marks(data: bytes) -> int:
    return sum(map(data.count, (b",", b"[", b"{")))


def _too_deep(field: str) -> ApiProblem:
    return invalid(field, f"nested deeper than {MAX_DEPTH} levels")


class _Decoder(json.JSONDecoder):
    """Parses, with a `_Refused` where something cannot be taken."""

    def __init__(self) -> None:
        self.refused = False
        super().__init__(
            object_pairs_hook=self._object,
            parse_float=self._float,
            parse_int=self._int,
            parse_constant=lambda name: self._refuse(f"{name} is no number in JSON"),
        )

    def _refuse(self, why: str) -> _Refused:
        self.refused = True
        return _Refused(why)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    value[name] = self._refuse("comes twice in one object: which one is meant?")
                seen.add(name)
        return value

    def _int(self, text: str) -> Any:
        if len(text) > MAX_DIGITS or math.isinf(float(text)):
            return self._refuse(f"{text[:_NUMBER_SHOWN]}…, a number of {len(text)} digits, is too large")
        return int(text)

    def _float(self, text: str) -> Any:
        if len(text) > MAX_DIGITS:
            return self._refuse(f"a number of {len(text)} characters is too long")
        value = float(text)
        return self._refuse(f"{text[:_NUMBER_SHOWN]} is too large") if math.isinf(value) else value


def _require_fit(value: Any, *, whole: bool) -> None:
    """ApiProblem that names the field for what nests too deep; with `whole` each value is looked at, too."""
    if isinstance(value, _Refused):
        raise invalid("(body)", value.why)
    open_ = [(value, None, 1)] if isinstance(value, dict | list) else []
    while open_:
        holder, path, depth = open_.pop()
        if depth > MAX_DEPTH:
            raise _too_deep(_named(path))
        named = isinstance(holder, dict)
        for name, item in holder.items() if named else enumerate(holder):
            kind = type(item)
            if kind is dict or kind is list:
                open_.append((item, (path, name), depth + 1))
            elif whole:
                if named:
                    _require_text(name, (path, name))
                if kind is _Refused:
                    raise invalid(_named((path, name)), item.why)
                if kind is str:
                    _require_text(item, (path, name))
    if isinstance(value, str) and whole:
        _require_text(value, None)


def _require_text(text: str, path: tuple | None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(_named(path), "holds half of a surrogate pair, which is no character") from None


def _named(path: tuple | None) -> str:
    """A path as errors have it: `requests.0.task`."""
    parts: list[str] = []
    while path is not None:
        path, name = path
        parts.append(str(name).encode(errors="backslashreplace").decode())
    return ".".join(reversed(parts)) or "(body)"
