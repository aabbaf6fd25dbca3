"""Words of an instruction: how a line falls into them, and what stands for variables in one.

As BuildKit does it (frontend/dockerfile/shell and the parser beside it), not as a shell would.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

NAME = re.compile(r"[0-9]+|[^\W\d]\w*|[@*#?\-$!]")
"""Of a variable, or of what a shell would put in its place, which is nothing here."""
MOST_CHARS = 128 << 10
"""Of a text with its variables replaced: no argument can be longer, and `A=$A$A` doubles each time."""


def split(text: str, escape: str) -> list[str]:
    """The words between spaces; quotes keep spaces together, and stay, as escapes do."""
    words, word, quote = [], "", ""
    characters = iter(text)
    for character in characters:
        if character == escape and quote != "'":
            following = next(characters, "")
            word += character + following if following else ""
        elif character.isspace() and not quote:
            words += [word] if word else []
            word = ""
        else:
            word += character
            if quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
    return [*words, word] if word else words


def expand(text: str, variables: Mapping[str, str], escape: str = "\\", quotes: bool = True) -> str:
    """`text` with the values of its variables, and without its quotes and escapes.

    `quotes`: whether they are quotes, and not text. Raises ValueError saying what is wrong.
    """
    return _Expansion(text, variables, escape, quotes).until(None)


class _Expansion:
    def __init__(self, text: str, variables: Mapping[str, str], escape: str, quotes: bool):
        self.text, self.variables, self.escape, self.quotes = text, variables, escape, quotes
        self.place = 0

    def rest(self) -> Iterator[str]:
        """Character by character, wherever the last reader stopped."""
        while self.place < len(self.text):
            self.place += 1
            yield self.text[self.place - 1]

    def until(self, stop: str | None, quoted: bool = False) -> str:
        """The value of all up to an unquoted `stop`, or to the end. `quoted`: between double quotes, where
        only `"`, `$` and the escape itself can be escaped.
        """
        value = ""
        for character in self.rest():
            if character == stop:
                return value
            if len(value) > MOST_CHARS:
                raise ValueError(f"with its variables it is too long: more than {MOST_CHARS >> 10} KiB")
            if character == "$":
                value += self.variable()
            elif character == self.escape:
                following = next(self.rest(), "")
                kept = quoted and following not in (*'"$', self.escape)
                value += character + following if kept else following
            elif character == "'" and self.quotes and not quoted:
                value += self.literal()
            elif character == '"' and self.quotes:
                value += self.until('"', quoted=True)
            else:
                value += character
        if stop is not None:
            raise ValueError(f"a {stop} is missing")
        return value

    def literal(self) -> str:
        """Up to the single quote, as it is."""
        end = self.text.find("'", self.place)
        if end < 0:
            raise ValueError("a ' is missing")
        begin, self.place = self.place, end + 1
        return self.text[begin:end]

    def variable(self) -> str:
        """What stands for `$NAME` or `${NAME…}`, of which the `$` is read."""
        braces = self.text.startswith("{", self.place)
        match = NAME.match(self.text, self.place + braces)
        if match is None:
            if braces:
                raise ValueError(f"bad substitution {self.text[self.place - 1 :]!r}")
            return "$"
        self.place = match.end()
        value = self.variables.get(match[0])
        if not braces:
            return value or ""
        operator = next(self.rest(), "")
        if operator == "}":
            return value or ""
        if operator == ":":
            operator = next(self.rest(), "")
            value = value or None
        if not operator or operator not in "-+?":
            raise ValueError(
                f"${{{match[0]}{operator}…}} is not supported; of the forms with a word there are "
                ":-, :+ and :?, with or without the colon"
            )
        word = self.until("}")
        if operator == "?" and value is None:
            raise ValueError(f"{match[0]}: {word or 'is not set'}")
        if operator == "+":
            return "" if value is None else word
        return word if value is None else value
