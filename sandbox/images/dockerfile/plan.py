"""What a Dockerfile asks for: its stages, what each of them copies and runs, and what the image declares."""

from __future__ import annotations

import dataclasses
import platform
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox.images.dockerfile import words
from sandbox.images.dockerfile.lines import Heredoc, Instruction
from sandbox.images.environment import ImageConfig

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PIPES = "/dev/pipes"
"""Where a RUN finds what is its own and no part of the image, as with BuildKit."""
NO_EFFECT = ("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "MAINTAINER", "STOPSIGNAL", "VOLUME")
SCRIPT = re.compile(r"(?!\.+$)[\w.-]{1,100}", re.ASCII)
"""Name of a heredoc that is run as a file."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
"""Arguments that need no ARG, and count for no cache."""
REMOTE = re.compile(r"(https?|ftp|git|ssh)://|git@|.*\.git(#|$)")
MOST_VARIABLES, MOST_STAGES, MOST_REFERENCE = 256 << 10, 100, 512
MOST_EXPANDED = 8 << 20
"""Characters of all texts of a Dockerfile with their variables replaced: `$A $A $A` makes much of little."""
REFERENCE = re.compile(
    r"(?:[\w-][\w.-]*(?::\d+)?/)*[\w-][\w.-]*(?::[\w.-]+)?(?:@sha256:[0-9a-f]{64})?", re.ASCII
)
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Step:
    """An instruction that changes files."""

    instruction: Instruction
    request: Mapping[str, Any]
    """What is asked of `inside`."""
    sources: tuple[str, ...] = ()
    """Of COPY and ADD."""
    origin: int | str | None = None
    """Where these are: a stage, an image, or None for the context."""
    unpack: bool = False
    """Whether archives among them are unpacked."""
    free: Mapping[str, str] = field(default_factory=dict)
    """Variables of a RUN that its layer's name does not depend on."""


@dataclass
class Stage:
    """From one FROM to the next."""

    start: Instruction
    base: int | str | None
    """An earlier stage, the reference of an image, or None for `scratch`."""
    name: str
    config: ImageConfig
    arguments: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        """What stands for variables now: an ENV goes before an ARG of its name."""
        return {"PATH": PATH} | self.arguments | dict(self.config.env)

    @property
    def size(self) -> int:
        """Characters of all that it declares."""
        tables = (self.arguments, self.config.env, self.config.labels)
        return sum(len(name) + len(value) for table in tables for name, value in table.items())

    def set(self, **changes: Any) -> None:
        """Change what the image declares."""
        self.config = dataclasses.replace(self.config, **changes)


@dataclass(frozen=True)
class Plan:
    """A whole Dockerfile; the last stage is the image."""

    stages: tuple[Stage, ...]
    notices: tuple[str, ...]
    """What of it has no effect here, each with its place."""


class Planner:
    """Goes through the instructions of a Dockerfile. `bases`: what an image, by its reference, declares."""

    def __init__(self, arguments: Mapping[str, str], bases: Mapping[str, ImageConfig]):
        architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
        self.platform = f"linux/{architecture}"
        automatic = {"PLATFORM": self.platform, "OS": "linux", "ARCH": architecture, "VARIANT": ""}
        self.arguments = {f"{side}{k}": v for side in ("BUILD", "TARGET") for k, v in automatic.items()}
        self.arguments |= arguments
        self.proxies = {name: value for name, value in arguments.items() if name.upper() in PROXIES}
        self.unused = set(arguments) - set(self.proxies)
        self.bases = bases
        self.globals: dict[str, str] = {}
        self.stages: list[Stage] = []
        self.notices: list[str] = []
        self.expanded = 0

    def plan(self, instructions: list[Instruction], name: str) -> Plan:
        """Raises ImageError with file and line, for all that is not supported."""
        for instruction in instructions:
            keyword = instruction.keyword
            if keyword in NO_EFFECT:
                self.tell(instruction, "has no effect in a sandbox")
            elif not self.stages and keyword not in ("FROM", "ARG"):
                instruction.refuse("there is no FROM before it")
            elif (handle := getattr(self, f"_{keyword.lower()}", None)) is None or not keyword.isalpha():
                instruction.refuse("this instruction is not supported")
            else:
                try:
                    handle(instruction)
                except (ValueError, RecursionError) as error:
                    instruction.refuse(str(error))
                if self.stages and self.stages[-1].size > MOST_VARIABLES:
                    instruction.refuse(f"variables and labels are longer than {MOST_VARIABLES >> 10} KiB")
        if not self.stages:
            Instruction(f"{name}:1", "FROM", (), "").refuse("the file has none")
        if self.unused:
            unknown = ", ".join(sorted(self.unused))
            self.stages[-1].start.refuse(f"no ARG declares the build argument {unknown}")
        return Plan(tuple(self.stages), tuple(self.notices))

    def tell(self, instruction: Instruction, what: str) -> None:
        """Note what somebody may not expect."""
        self.notices.append(f"{instruction.place}: {instruction.keyword} {what}")

    def expand(
        self, instruction: Instruction, text: str, scope: Mapping[str, str] | None = None, quotes: bool = True
    ) -> str:
        """`text` with the values of the stage's variables, or of `scope`. Raises ValueError."""
        scope = self.stages[-1].variables if scope is None else scope
        value = words.expand(text, scope, instruction.escape, quotes)
        self.expanded += len(value)
        if self.expanded > MOST_EXPANDED:
            raise ValueError(f"with its variables the file is longer than {MOST_EXPANDED >> 20} MiB")
        return value

    # -- instructions ------------------------------------------------------------------

    def _from(self, instruction: Instruction) -> None:
        flags = instruction.flag("platform")
        match = re.fullmatch(r"(\S+)(?:\s+[aA][sS]\s+([a-zA-Z][a-zA-Z0-9_.-]*))?", instruction.rest)
        if match is None:
            instruction.refuse("it takes an image, and perhaps `AS name`")
        if len(self.stages) == MOST_STAGES:
            instruction.refuse(f"there are more than {MOST_STAGES} stages")
        scope = {**self.arguments, **self.globals}
        if "platform" in flags:
            platform = self.expand(instruction, flags["platform"], scope)
            if platform.removesuffix("/v8") != self.platform:
                instruction.refuse(f"--platform={platform} is not this machine's, {self.platform}")
        reference = self.expand(instruction, match[1], scope)
        if not reference:
            instruction.refuse(f"{match[1]} stands for nothing; give the argument a value with --build-arg")
        base = self.origin(instruction, reference, numbers=False)
        config = ImageConfig()
        if isinstance(base, int):
            config = self.stages[base].config
        elif base == "scratch":
            base = None
        else:
            config = dataclasses.replace(self.bases.get(reference, config), digest="")
        self.stages.append(Stage(instruction, base, (match[2] or "").lower(), config))

    def origin(self, instruction: Instruction, reference: str, numbers: bool) -> int | str:
        """A stage before, or the image of that reference."""
        names = [stage.name for stage in self.stages]
        if reference.lower() in names:
            return len(names) - 1 - names[::-1].index(reference.lower())
        if numbers and reference.isdecimal():
            if int(reference) >= len(names) - 1:
                instruction.refuse(f"there is no stage {reference} before this one")
            return int(reference)
        if len(reference) > MOST_REFERENCE or not REFERENCE.fullmatch(reference):
            instruction.refuse(f"{reference[:200]!r} is not the name of an image")
        return reference

    def _arg(self, instruction: Instruction) -> None:
        stage = self.stages[-1] if self.stages else None
        for word in words.split(instruction.rest, instruction.escape):
            name, separator, default = word.partition("=")
            if not re.fullmatch(r"\w+", name):
                instruction.refuse(f"{name!r} is no name of an argument")
            self.unused.discard(name)
            scope = stage.variables if stage else {**self.arguments, **self.globals}
            value = self.expand(instruction, default, scope) if separator else None
            value = self.arguments.get(name, self.globals.get(name) if stage and value is None else value)
            if value is not None:
                (stage.arguments if stage else self.globals)[name] = value

    def _env(self, instruction: Instruction) -> None:
        self.stages[-1].set(env={**self.stages[-1].config.env, **self.pairs(instruction)})

    def _label(self, instruction: Instruction) -> None:
        self.stages[-1].set(labels={**self.stages[-1].config.labels, **self.pairs(instruction)})

    def pairs(self, instruction: Instruction) -> dict[str, str]:
        """Of `NAME=VALUE …` or the older `NAME VALUE`. Raises ValueError."""
        instruction.flag()
        parts = words.split(instruction.rest, instruction.escape)
        if parts and "=" not in parts[0]:
            parts = ["=".join(instruction.rest.split(None, 1))]
        found = {}
        for part in parts:
            name, separator, value = part.partition("=")
            if not separator or not name:
                instruction.refuse(f"{part!r} is not NAME=VALUE")
            found[self.expand(instruction, name)] = self.expand(instruction, value)
        if not found:
            instruction.refuse("it takes NAME=VALUE")
        return found

    def _workdir(self, instruction: Instruction) -> None:
        path = self.inside(self.expand(instruction, instruction.rest))
        self.stages[-1].set(workdir=path)
        self.stages[-1].steps.append(Step(instruction, {"operation": "put", "directory": path}))

    def inside(self, path: str) -> str:
        """Absolute, seen from where the stage is."""
        place = posixpath.join("/", self.stages[-1].config.workdir, path)
        return posixpath.normpath(place).replace("//", "/")

    def _user(self, instruction: Instruction) -> None:
        self.stages[-1].set(user=self.expand(instruction, instruction.rest))
        self.tell(instruction, "sets names alone: what RUN runs, and a sandbox, has one user")

    def _shell(self, instruction: Instruction) -> None:
        shell = instruction.array()
        if not shell:
            instruction.refuse('it takes a JSON array, as ["/bin/bash", "-c"]')
        self.stages[-1].set(shell=tuple(shell))

    def _run(self, instruction: Instruction) -> None:
        flags, stage = instruction.flag("network", "security", "mount"), self.stages[-1]
        if flags.get("network", "default") not in ("default", "none"):
            instruction.refuse(f"--network={flags['network']} is not supported")
        if flags.get("security", "sandbox") != "sandbox":
            instruction.refuse("--security=insecure is not supported")
        argv, files = instruction.array(), {}
        if argv is None:
            text, heredocs = instruction.rest, instruction.heredocs
            if heredocs and text == heredocs[0].word:
                text = _chomped(heredocs[0])
                if text.startswith("#!"):
                    if not SCRIPT.fullmatch(heredocs[0].name):
                        instruction.refuse(f"{heredocs[0].name[:200]!r} cannot be the name of a script")
                    files, argv = {heredocs[0].name: text}, [f"{PIPES}/{heredocs[0].name}"]
            else:
                text = "\n".join([text, *(f"{doc.content}{doc.name}" for doc in heredocs)])
            argv = argv or [*stage.config.shell, text]
        if not argv or not argv[-1].strip():
            instruction.refuse("there is nothing to run")
        request = {
            "operation": "run",
            "argv": argv,
            "files": files,
            "env": {"PATH": PATH} | stage.arguments | dict(stage.config.env),
            "directory": stage.config.workdir,
            "user": stage.config.user,
            "network": flags.get("network", "default") == "default",
            "empty": [self.mount(instruction, value) for name, value in instruction.flags if name == "mount"],
        }
        stage.steps.append(Step(instruction, request, free=self.proxies))

    def mount(self, instruction: Instruction, text: str) -> str:
        """Where an empty directory is to be during a RUN: a cache that has nothing yet. Raises ValueError."""
        options = dict(part.partition("=")[::2] for part in self.expand(instruction, text).split(","))
        target = options.get("target") or options.get("dst") or options.get("destination")
        if options.get("type") not in ("cache", "tmpfs") or not target or "from" in options:
            instruction.refuse(f"--mount={text} is not supported; of caches and tmpfs it is, with a target")
        return self.inside(target)

    def _copy(self, instruction: Instruction) -> None:
        self.copy(instruction, instruction.flag("from", "chown", "chmod", ignored=("link",)), unpack=False)

    def _add(self, instruction: Instruction) -> None:
        flags = instruction.flag("chown", "chmod", "unpack", ignored=("link",))
        self.copy(instruction, flags, unpack=flags.get("unpack", "true") != "false")

    def copy(self, instruction: Instruction, flags: Mapping[str, str], unpack: bool) -> None:
        """COPY, or ADD."""
        origin: int | str | None = None
        if "from" in flags:
            origin = self.origin(instruction, flags["from"], numbers=True)
        if "chown" in flags:
            self.tell(instruction, "--chown has no effect: a sandbox has one user, who owns all files")
        mode = self.expand(instruction, flags.get("chmod", ""))
        if mode and not re.fullmatch(r"[0-7]{3,4}", mode):
            instruction.refuse(f"--chmod={mode} is no number like 0755")
        listed = instruction.array() or instruction.rest.split()
        texts = {doc.word: doc for doc in instruction.heredocs}
        expanded = [word if word in texts else self.expand(instruction, word) for word in listed]
        *given, target = expanded or [""]
        sources = tuple(word for word in given if word not in texts)
        if not given:
            instruction.refuse("it takes sources and a destination")
        if remote := next(filter(REMOTE.match, sources), None):
            instruction.refuse(f"{remote} is not a file; fetch it in a RUN, where builds have a network")
        files = {doc.name: self.content(instruction, doc) for word, doc in texts.items() if word in given}
        is_directory = len(given) > 1 or posixpath.basename(target) in (".", "..", "")
        request = {
            "operation": "put",
            "target": self.inside(target),
            "into": is_directory,
            "mode": int(mode, 8) if mode else None,
            "files": files,
            "exact": origin is not None,
        }
        self.stages[-1].steps.append(Step(instruction, request, sources, origin, unpack))

    def content(self, instruction: Instruction, heredoc: Heredoc) -> str:
        """A heredoc as the file it becomes."""
        text = _chomped(heredoc)
        return self.expand(instruction, text, quotes=False) if heredoc.expand else text


def _chomped(heredoc: Heredoc) -> str:
    """Without the tabs before each line, where `<<-` asks for that."""
    return re.sub(r"(?m)^\t+", "", heredoc.content) if "<<-" in heredoc.word else heredoc.content
