"""What a seam is: how one program is told its task, its model and its limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

PACK = "/rollout/harnesses"
"""Where a sandbox shows the pack: `<PACK>/node/bin/node`, `<PACK>/<name>/…`; read-only. No image has the
first of it: bubblewrap can make no place inside of an image's own directory."""


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
    context_tokens: int
    """What model and answer have room for together."""
    timeout_s: float
    command: Sequence[str] | None = None
    """`Agent.command`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """`Agent.env`."""


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
