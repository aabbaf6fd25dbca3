"""What is asked for (`SandboxSpec`) and what is given (`SandboxInfo`); both travel as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import msgspec

DEFAULT_LIFETIME_S = 4 * 3600.0
NETWORKS = ("none", "host")


class _Json:
    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, one key a field."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`; keys of a newer version are ignored."""
        return msgspec.convert(data, cls)


@dataclasses.dataclass(frozen=True)
class Limits(_Json):
    """What all processes of a sandbox together may use; None = what the node gives by default."""

    memory_mb: int | None = None
    """Memory of the processes, in MiB. A single process is refused more at once; the sum is watched."""
    processes: int | None = None
    """Processes and threads."""
    disk_mb: int | None = None
    """What is written, in MiB: workspace, /tmp, home, /dev/shm and changed system files together."""
    files: int | None = None
    """Files and directories that are made."""


@dataclasses.dataclass(frozen=True)
class BindSpec(_Json):
    """A place of the machine to show inside; only below what the node's operator allows."""

    source: str
    target: str
    read_only: bool = True


@dataclasses.dataclass(frozen=True)
class SandboxSpec(_Json):
    """A request for one sandbox."""

    image: str = "base"
    """A SIF file, a directory, or a name looked up in `<ROLLOUT_HOME>/images/`."""
    runtime: str = "auto"
    """`auto`, `apptainer`, `bubblewrap` or `local-unsafe` (no isolation; only by name)."""
    network: str = "none"
    """`none` (loopback only) or `host`."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    """Variables of the shell inside; nothing else of the caller's environment gets in."""
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    """Files put into the workspace before the start: relative path → text."""
    ipython: bool = False
    """Start the IPython kernel at once, in the background, and not with the first cell."""
    binds: tuple[BindSpec, ...] = ()
    limits: Limits = Limits()
    owner: str = ""
    """Free text naming who wants it, for `release_owner` and `list`."""
    max_lifetime_s: float = DEFAULT_LIFETIME_S
    """Seconds after which the host ends the sandbox whatever happens (a backstop)."""
    snapshot: str = ""
    """Begin with the files, directory and variables of this one: a name of the node's own, or the path of a
    packed one. Image, runtime, network, limits and binds are then those that it was taken with.
    """


@dataclasses.dataclass(frozen=True)
class SnapshotInfo(_Json):
    """A sandbox's files, working directory and variables of bash, kept."""

    name: str
    """Of the node's own, or the path of the file that they were packed into."""
    bytes: int
    """Content of files."""
    files: int
    """Files, directories and links."""
    way: str
    """`reflink`, `copy` or `packed`."""
    seconds: float
    """That the sandbox stood still."""


@dataclasses.dataclass(frozen=True)
class Fate(_Json):
    """How a sandbox ended that nobody had released."""

    kind: str
    """`limited` (the agent used more than its limits, again or without letting itself be stopped), `node`
    (the machine ran short of memory or disk), `expired` (its lifetime) or `died` (by itself).
    """
    reason: str
    """In words."""


@dataclasses.dataclass(frozen=True)
class SandboxInfo(_Json):
    """A started sandbox."""

    id: str
    """Eight hexadecimal digits, unique on the node."""
    socket: str
    """Address of its server, for `SandboxClient`: path of a Unix socket, `#` and the key that it asks for."""
    runtime: str
    node: str
    """Host name of the node; the socket works only there."""
    isolation_missing: list[str]
    """What this node does not enforce, in words; to be recorded in each trajectory."""
    pid: int
    """Process id of the runtime on the node."""
    start_ms: float
    """From the request to a ready shell, in milliseconds, waiting for a start slot included."""
    workspace: str = "/workspace"
    """The working directory as seen from inside."""
    owner: str = ""
    warm: bool = False
    """Whether it had been started ahead of the request."""
    limits: dict[str, int] = dataclasses.field(default_factory=dict)
    """Fields of :class:`Limits` as they hold for this sandbox; empty where nothing is limited."""
