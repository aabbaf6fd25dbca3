"""What the operator of a node decides, from `ROLLOUT_SANDBOX_*`; read once when the host starts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox import paths
from sandbox.errors import SandboxError, SandboxRequestError
from sandbox.room import Floors
from sandbox.runtimes import AUTO, RUNTIMES
from sandbox.spec import NETWORKS, Limits


@dataclasses.dataclass(frozen=True)
class Range:
    """What a request gets that does not say, and the most that it may ask for."""

    default: int
    most: int


@dataclasses.dataclass(frozen=True)
class AllowedBind:
    """A place of the machine below which requests may bind."""

    path: Path
    writable: bool


@dataclasses.dataclass(frozen=True)
class HostConfig:
    """Settings of a sandbox host. Every field is one line of the table in docs/sandbox.md."""

    memory_mb: Range = Range(4096, 65536)
    """`ROLLOUT_SANDBOX_MEMORY_MB`, `DEFAULT` or `DEFAULT:MOST`, like the next three."""
    processes: Range = Range(512, 8192)
    """`ROLLOUT_SANDBOX_PROCESSES`: processes and threads."""
    disk_mb: Range = Range(10240, 102400)
    """`ROLLOUT_SANDBOX_DISK_MB`: all that a sandbox writes."""
    files: Range = Range(500_000, 5_000_000)
    """`ROLLOUT_SANDBOX_FILES`: files and directories that it makes."""
    networks: tuple[str, ...] = NETWORKS
    """`ROLLOUT_SANDBOX_NETWORKS`: what requests may ask for."""
    runtimes: tuple[str, ...] = AUTO
    """`ROLLOUT_SANDBOX_RUNTIMES`: what requests may ask for; `auto` is the first of them that works and
    isolates. By default what `ROLLOUT_SANDBOX_RUNTIME`, the deployment's own, stands for.
    """
    image_roots: tuple[Path, ...] = ()
    """`ROLLOUT_SANDBOX_IMAGE_ROOTS`: directories, separated by colons, below which an image may be a path."""
    closed: tuple[Path, ...] = ()
    """`ROLLOUT_SANDBOX_CLOSED`: places, separated by colons, that are never shown, nor anything in or above
    them, besides the host's own; services name their run directories.
    """
    binds: tuple[AllowedBind, ...] = ()
    """`ROLLOUT_SANDBOX_BINDS`: `PATH:ro` or `PATH:rw`, separated by commas; and `paths.pack_dir()`, always,
    read-only.
    """
    warm: int = 4
    """`ROLLOUT_SANDBOX_WARM`: started sandboxes kept ready for each kind that was asked for; 0 = none."""
    warm_total: int = 16
    """`ROLLOUT_SANDBOX_WARM_TOTAL`: the same over all kinds."""
    warm_idle_s: int = 600
    """`ROLLOUT_SANDBOX_WARM_IDLE_S`: seconds after which a kind nobody asks for is no longer kept ready."""
    snapshots_mb: int = 20480
    """`ROLLOUT_SANDBOX_SNAPSHOTS_MB`: what the node's snapshots may take together, MiB."""
    snapshots_s: int = 6 * 3600
    """`ROLLOUT_SANDBOX_SNAPSHOTS_S`: seconds for which one is kept."""
    floors: Floors = dataclasses.field(default_factory=Floors)
    """What must be left of the node to start another sandbox: settings of the workers, docs/settings.md."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> HostConfig:
        """Raises SandboxError naming the variable that makes no sense."""
        given: dict[str, Any] = {"floors": Floors.from_environment(environment)}
        own = environment.get("ROLLOUT_SANDBOX_RUNTIME", "").strip() or "auto"
        runtimes = environment.get("ROLLOUT_SANDBOX_RUNTIMES", "").strip() or own
        environment = {**environment, "ROLLOUT_SANDBOX_RUNTIMES": runtimes}
        for field in dataclasses.fields(cls):
            name = f"ROLLOUT_SANDBOX_{field.name.upper()}"
            text = environment.get(name, "").strip()
            if not text:
                continue
            try:
                given[field.name] = _PARSERS[field.name if field.name in _PARSERS else field.type](text)
            except ValueError as error:
                raise SandboxError(f"{name}={text!r}: {error}") from error
        pack = AllowedBind(paths.pack_dir().resolve(), writable=False)
        return cls(**given | {"binds": (*given.get("binds", ()), pack)})

    def limits(self, request: Limits) -> Limits:
        """What a request is held to. Raises SandboxRequestError when it asks for more than the node gives."""
        resolved = {}
        for field in dataclasses.fields(Limits):
            allowed: Range = getattr(self, field.name)
            value = getattr(request, field.name)
            if value is None:
                value = allowed.default
            if not 0 < value <= allowed.most:
                raise SandboxRequestError(
                    f"limits.{field.name}={value} is not between 1 and {allowed.most}, the most that this "
                    f"node gives (ROLLOUT_SANDBOX_{field.name.upper()})"
                )
            resolved[field.name] = value
        return Limits(**resolved)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("not a whole number")
    return int(text)


def _range(text: str) -> Range:
    default, _, most = text.partition(":")
    allowed = Range(_number(default), _number(most or default))
    if not 0 < allowed.default <= allowed.most:
        raise ValueError("DEFAULT:MOST must be above 0 and in that order")
    return allowed


def _networks(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := set(names) - set(NETWORKS):
        raise ValueError(f"unknown network {', '.join(sorted(unknown))}; known are {', '.join(NETWORKS)}")
    return names


def _runtimes(text: str) -> tuple[str, ...]:
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        names += AUTO if name == "auto" else (name,)
    if unknown := set(names) - set(RUNTIMES):
        known = ", ".join(("auto", *RUNTIMES))
        raise ValueError(f"unknown runtime {', '.join(sorted(unknown))}; known are {known}")
    return tuple(dict.fromkeys(names))


def _places(text: str) -> tuple[Path, ...]:
    places = tuple(Path(part) for part in text.split(":") if part)
    for place in places:
        if not place.is_absolute() or place.resolve() == Path("/"):
            raise ValueError(f"{str(place)!r} is no absolute path of a directory below /")
    return tuple(place.resolve() for place in places)


def _binds(text: str) -> tuple[AllowedBind, ...]:
    allowed = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        path, _, mode = entry.rpartition(":")
        if mode not in ("ro", "rw") or not path.startswith("/"):
            raise ValueError(f"{entry!r} is not /ABSOLUTE/PATH:ro or /ABSOLUTE/PATH:rw")
        allowed.append(AllowedBind(Path(path).resolve(), mode == "rw"))
    return tuple(allowed)


_PARSERS = {
    "networks": _networks,
    "runtimes": _runtimes,
    "image_roots": _places,
    "closed": _places,
    "binds": _binds,
    "Range": _range,
    "int": _number,
}
"""By a field's name, else by its type."""
