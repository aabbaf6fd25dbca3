"""What a seam is: how one program is told its task, its model and its limits; and what seams share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

PACK = "/rollout/harnesses"
"""Where a sandbox shows the pack: `<PACK>/node/bin/node`, `<PACK>/<name>/…`; read-only. No image has the
first of it: bubblewrap can make no place inside of an image's own directory."""
KEY_VARIABLE = "ROLLOUT_MODEL_KEY"
"""Of the key, where a program's settings name one."""
ANSWER_SHARE = 4
"""An answer may take one part in so many of the context."""
NODE = f"{PACK}/node/bin/node"
PYTHON = f"{PACK}/python/bin/start"
"""`PYTHON SITE NAME ARGUMENTS…` runs a module, or the file of a path, with the packages in SITE; nothing of
the environment or of the working directory is imported."""


@dataclass(frozen=True)
class Job:
    """What a program is to do, and with what."""

    instruction: str
    """The task's first messages as one text."""
    base_url: str
    """Of the model as the program reaches it, without a path: `http://127.0.0.1:8790`."""
    key: str
    model: str
    """Name of the model: no slash, no colon, below 64 characters."""
    home: str
    """A directory of its own, for settings and transcripts."""
    workspace: str
    """Where the handler's own shell stands; the program is started there."""
    context_tokens: int
    """What model and answer have room for together."""
    timeout_s: float
    command: Sequence[str] | None = None
    """`Agent.command`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """`Agent.env`."""

    @property
    def instruction_file(self) -> str:
        """Where the instruction lies of a program that reads it from a file or from standard input."""
        return f"{self.home}/instruction.txt"


@dataclass(frozen=True)
class Launch:
    """How the program is started."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """All that it needs beside the sandbox's own; `HOME` is the job's home unless it says otherwise."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Written before the start: absolute path → text."""
    transcripts: Sequence[str] = ()
    """Directories below the home whose files (`*.jsonl`, `*.json`) are kept as artifacts."""


class Harness(ABC):
    """One program. Stateless."""

    name: ClassVar[str]
    """What `Agent.harness` says."""
    packages: ClassVar[Sequence[str]] = ()
    """What its pack is built of: `npm:<package>` or `pypi:<package>`; versions are in `versions.json`."""

    @abstractmethod
    def launch(self, job: Job) -> Launch:
        """How it is started for a job.

        Raises:
            ValueError: It cannot do this job; the message says why.
        """


def npm_program(harness: str, name: str) -> str:
    """The command `name` that a package of npm has brought."""
    return f"{PACK}/{harness}/node_modules/.bin/{name}"


def fed(
    job: Job, argv: Sequence[str], env: Mapping[str, str], files: Mapping[str, str], transcripts: str
) -> Launch:
    """A program that reads its instruction from standard input: an argument has room for 128 KiB alone.

    `files`: by their paths below the home. `transcripts`: the directory of them below it.
    """
    path = job.instruction_file
    # What begins with a slash would be a command of the program's own.
    text = f"\n{job.instruction}" if job.instruction.startswith("/") else job.instruction
    below = {f"{job.home}/{name}": text for name, text in files.items()}
    line = ("sh", "-c", 'exec "$@" <"$0"', path, *argv)
    return Launch(line, {**env, **job.env}, {path: text, **below}, (transcripts,))
