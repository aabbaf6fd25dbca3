"""A Dockerfile and the directory beside it: checked when they are read, and named by what they ask for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sandbox.errors import ImageError
from sandbox.images.dockerfile import lines
from sandbox.images.dockerfile.context import MOST_ENTRIES, Found, Ignored, digest, find
from sandbox.images.dockerfile.plan import Plan, Planner, Step
from sandbox.images.environment import ImageConfig

VERSION = 1
"""Of what is built from the same Dockerfile; another one gives other names."""
NAME_CHARS = 20


@dataclass(frozen=True)
class Source:
    """A Dockerfile, read, and the directory that it copies from."""

    context: Path
    instructions: tuple[lines.Instruction, ...]
    arguments: Mapping[str, str]
    ignored: Ignored
    _found: dict[tuple[tuple[str, ...], bool], Found] = field(default_factory=dict)
    _contents: dict[Path, str] = field(default_factory=dict)

    def plan(self, bases: Mapping[str, ImageConfig] | None = None) -> Plan:
        """`bases`: what the images declare that it starts from, by reference. Raises ImageError."""
        return Planner(self.arguments, bases or {}).plan(list(self.instructions), "Dockerfile")

    def found(self, step: Step) -> Found:
        """What a step copies of the context. Raises ImageError where that is not there."""
        key = (step.sources, step.unpack)
        try:
            if key not in self._found:
                self._found[key] = find(self.context, step.sources, self.ignored, step.unpack)
                if sum(len(found.entries) for found in self._found.values()) > MOST_ENTRIES:
                    raise ValueError(f"with all before it, it copies more than {MOST_ENTRIES} files")
            return self._found[key]
        except (ValueError, OSError) as error:
            step.instruction.refuse(str(error))

    def digest(self, step: Step) -> str:
        """Of the step and what it copies of the context."""
        content = ""
        if step.sources and step.origin is None:
            content = digest(self.found(step), self._contents)
        return hash_of(step.request, step.sources, step.unpack, content)

    def name(self) -> str:
        """See `image_name`."""
        stages = [
            (stage.base, asdict(stage.config), [(self.digest(step), step.origin) for step in stage.steps])
            for stage in self.plan().stages
        ]
        if any(map(_names_by_variable, self.instructions)):
            # The variable may be one of the image that it starts from, which is not looked at here.
            stages.append(("", {}, [(digest(find(self.context, ["."], self.ignored), self._contents), None)]))
        return f"dockerfile-{hash_of(stages)[:NAME_CHARS]}"


def _names_by_variable(instruction: lines.Instruction) -> bool:
    """Whether what it copies is named with a variable."""
    words = instruction.array() or instruction.rest.split()
    return instruction.keyword in ("COPY", "ADD") and any("$" in word for word in words[:-1])


def hash_of(*parts: object) -> str:
    """SHA-256 in hexadecimal of what JSON can say."""
    return hashlib.sha256(json.dumps([VERSION, *parts], sort_keys=True).encode()).hexdigest()


def dockerfile_of(place: Path) -> Path | None:
    """The Dockerfile that a source of an image is, or holds; None if it is something else."""
    if place.is_dir():
        is_root = any((place / name).is_dir() for name in ("usr", "bin"))
        return place / "Dockerfile" if (place / "Dockerfile").is_file() and not is_root else None
    is_one = place.name.startswith("Dockerfile") or place.suffix.lower() == ".dockerfile"
    return place if is_one and place.is_file() else None


def load(place: Path, arguments: Mapping[str, str] | None = None) -> Source:
    """The Dockerfile in a directory, or the file itself, whose directory it copies from.

    Raises ImageError, with file and line, for what is wrong or not supported.
    """
    dockerfile = (place / "Dockerfile" if place.is_dir() else place).absolute()
    context = dockerfile.parent
    instructions = tuple(lines.read(dockerfile))
    try:
        ignored = Ignored.of(context, dockerfile)
    except ValueError as error:
        raise ImageError(str(error)) from None
    source = Source(context, instructions, dict(arguments or {}), ignored)
    for stage in source.plan().stages:
        for step in stage.steps:
            if step.sources and step.origin is None:
                source.found(step)
    return source


def image_name(context: Path, arguments: Mapping[str, str] | None = None) -> str:
    """The name of the image of a Dockerfile: of its instructions and what they copy, and nothing else.

    Nothing is built, and the images that it starts from need not be here. Raises as `load`.
    """
    return load(context, arguments).name()
