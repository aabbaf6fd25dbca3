"""The lines of a Dockerfile as instructions, by the rules of BuildKit's parser (moby/buildkit,
frontend/dockerfile/parser).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from sandbox.errors import ImageError
from sandbox.images.dockerfile import words

MOST_BYTES, MOST_INSTRUCTIONS, MOST_WHY = 1 << 20, 1000, 4000
DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(.+)")
FLAG = re.compile(r"--([a-zA-Z-]+)(?:=(\S*))?(?:\s+|$)")
HEREDOC = re.compile(r"\d*<<(-?)([^<]+)")
WITH_HEREDOCS = ("RUN", "COPY", "ADD")


@dataclass(frozen=True)
class Heredoc:
    """A text that follows the line of its instruction."""

    word: str
    """As the line has it, `<<EOF`."""
    name: str
    content: str
    expand: bool
    """Whether variables are replaced: not if the name was quoted."""


@dataclass(frozen=True)
class Instruction:
    """One instruction, its variables not yet replaced."""

    place: str
    """`FILE:LINE`, where it begins."""
    keyword: str
    """In capitals."""
    flags: tuple[tuple[str, str], ...]
    rest: str
    heredocs: tuple[Heredoc, ...] = ()
    escape: str = "\\"

    def refuse(self, why: str) -> NoReturn:
        """Raises ImageError with its place."""
        raise ImageError(f"{self.place}: {self.keyword}: {why[:MOST_WHY]}")

    def array(self) -> list[str] | None:
        """Its JSON form; None where it has none."""
        if not self.rest.startswith("["):
            return None
        try:
            value = json.loads(self.rest)
        except (ValueError, RecursionError):
            return None
        if not all(isinstance(item, str) for item in value):
            self.refuse("an array in JSON form must hold only strings")
        return value

    def flag(self, *known: str, ignored: tuple[str, ...] = ()) -> dict[str, str]:
        """Its flags, all of them `known`, or `ignored`, which are left out."""
        for name, _ in self.flags:
            if name not in (*known, *ignored):
                self.refuse(f"the flag --{name} is not supported")
        return {name: value for name, value in self.flags if name not in ignored}


def read(path: Path) -> list[Instruction]:
    """Raises ImageError with file and line."""
    try:
        content = path.read_bytes()[: MOST_BYTES + 1]
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise ImageError(f"{path} is larger than {MOST_BYTES >> 20} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ImageError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    return parse(text, path.name)


def parse(text: str, name: str = "Dockerfile") -> list[Instruction]:
    """The instructions of a Dockerfile's text; `name` is said in errors. Raises ImageError."""
    lines = text.split("\n")
    escape = _escape(lines, name)
    continued = re.compile(rf"(?<!{re.escape(escape)}){re.escape(escape)}[ \t]*$")
    instructions = []
    number = 0
    while number < len(lines):
        begin, line = number + 1, _stripped(lines[number]).lstrip()
        number += 1
        if not line:
            continue
        pieces = [line]
        while continued.search(pieces[-1]):
            pieces[-1] = continued.sub("", pieces[-1])
            # Comments and empty lines within an instruction are passed over.
            while number < len(lines) and not _stripped(lines[number]).strip():
                number += 1
            if number == len(lines):
                break
            pieces.append(_stripped(lines[number]))
            number += 1
        if not (whole := "".join(pieces).strip()):
            continue
        instruction = _instruction(f"{name}:{begin}", whole, escape)
        if len(instructions) == MOST_INSTRUCTIONS:
            instruction.refuse(f"there are more than {MOST_INSTRUCTIONS} instructions")
        heredocs = []
        for word, dash, quoted in _heredocs(instruction):
            delimiter, body = quoted.replace('"', "").replace("'", ""), []
            while number < len(lines):
                row = lines[number].rstrip("\r")
                number += 1
                if (row.lstrip("\t") if dash else row) == delimiter:
                    break
                body.append(lines[number - 1] + "\n")
            else:
                instruction.refuse(f"the text after {word} has no end: there is no line {delimiter!r}")
            heredocs.append(Heredoc(word, delimiter, "".join(body), delimiter == quoted))
        instructions.append(replace(instruction, heredocs=tuple(heredocs)))
    return instructions


def _stripped(line: str) -> str:
    """Without its end; nothing, where it is a comment."""
    return "" if line.lstrip().startswith("#") else line.rstrip("\r")


def _escape(lines: list[str], name: str) -> str:
    """Of the directives before all else only this one says something here."""
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        match = DIRECTIVE.fullmatch(line.strip())
        if match is None or match[1].lower() not in ("escape", "syntax", "check"):
            break
        directive, value = match[1].lower(), match[2]
        if directive in seen:
            raise ImageError(f"{name}:{number}: the directive {directive} is there twice")
        seen.add(directive)
        if directive == "escape":
            if value not in ("\\", "`"):
                raise ImageError(f"{name}:{number}: escape={value} is neither \\ nor `")
            return value
    return "\\"


def _instruction(place: str, line: str, escape: str) -> Instruction:
    keyword, rest, flags = *(*line.split(None, 1), "")[:2], []
    while match := FLAG.match(rest):
        flags.append((match[1].lower(), match[2] or ""))
        rest = rest[match.end() :]
    return Instruction(place, keyword.upper(), tuple(flags), rest.strip(), escape=escape)


def _heredocs(instruction: Instruction) -> list[tuple[str, str, str]]:
    """(word, dash, name with its quotes) of each that the line announces."""
    if instruction.keyword not in WITH_HEREDOCS or "<<" not in instruction.rest or instruction.array():
        return []
    found = [(word, HEREDOC.fullmatch(word)) for word in words.split(instruction.rest, instruction.escape)]
    return [(word, match[1], match[2]) for word, match in found if match]
