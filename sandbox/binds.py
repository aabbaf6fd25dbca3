"""Places of the machine that a request wants shown inside, checked against what the operator allows."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Sequence
from pathlib import Path

from sandbox import paths
from sandbox.config import AllowedBind
from sandbox.errors import NotAllowed, SandboxRequestError
from sandbox.runtimes.base import PRELOAD, Bind, Places
from sandbox.spec import BindSpec

# Mounting over these, or what holds them, would blind the server, give it what others wrote, or give the
# sandbox a kernel interface of the machine.
RESERVED = ("/proc", "/sys", "/dev", PRELOAD, Places.private, Places.payload, Places.interpreter)
# Separators of the runtimes' own command lines.
UNSAFE_CHARACTERS = set(":,\\\n\0")


def check(
    requests: Sequence[BindSpec], allowed: Sequence[AllowedBind], closed: Sequence[Path] = ()
) -> tuple[Bind, ...]:
    """The binds as they will be mounted, symbolic links of the source resolved.

    `closed`: places that are never shown, nor anything in or above them, whatever is allowed.

    Raises SandboxRequestError when one is not allowed, not there, or would cover what the sandbox needs.
    """
    checked = tuple(_check_one(bind, allowed, closed) for bind in requests)
    for number, later in enumerate(checked):
        for earlier in checked[:number]:
            if _holds(later.target, earlier.target):
                raise SandboxRequestError(
                    f"bind target {later.target!r} would cover {earlier.target!r}, which comes before it; "
                    "name each once, and what lies in another after it"
                )
            if _holds(earlier.target, later.target) and not earlier.read_only:
                # An agent that wrote there before may have left a link, which leads inside another sandbox.
                raise SandboxRequestError(
                    f"bind target {later.target!r} lies in {earlier.target!r}, which is bound read-write; "
                    "choose a target outside of it"
                )
    return checked


def _holds(directory: str, place: str) -> bool:
    return place == directory or place.startswith(directory.rstrip("/") + "/")


def _check_one(bind: BindSpec, allowed: Sequence[AllowedBind], closed: Sequence[Path]) -> Bind:
    for name in (bind.source, bind.target):
        if not name.startswith("/") or UNSAFE_CHARACTERS & set(name):
            raise SandboxRequestError(f"bind {name!r}: an absolute path without ':', ',' or '\\' is needed")
    target = posixpath.normpath(bind.target)
    if any(_holds(target, place) or _holds(place, target) for place in RESERVED):
        raise SandboxRequestError(f"bind target {bind.target!r} would cover what the sandbox itself needs")
    try:
        # What is mounted is where the links lead, so a link made by an agent leads nowhere new. Opened once:
        # the path that is judged, and what the server inside must find mounted, are of the same place.
        place = _open(bind.source)
        try:
            source, info = Path(f"/proc/self/fd/{place}").readlink(), os.fstat(place)
        finally:
            os.close(place)
    except OSError as error:
        raise SandboxRequestError(f"bind source {bind.source!r} cannot be used: {error}") from error
    if UNSAFE_CHARACTERS & set(str(source)):
        raise SandboxRequestError(f"bind source {str(source)!r} has a ':', ',' or '\\' in it")
    grants = [place for place in allowed if source.is_relative_to(place.path)]
    if not grants:
        raise SandboxRequestError(
            f"bind source {bind.source!r} is not below a path of ROLLOUT_SANDBOX_BINDS of this node"
        )
    if not bind.read_only and not any(place.writable for place in grants):
        raise SandboxRequestError(f"bind source {bind.source!r} may be bound read-only, not read-write")
    if place := paths.overlap(source, closed):
        raise NotAllowed(f"bind source {bind.source!r} is at, in or above {place}, which no sandbox may show")
    if not (stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)):
        raise NotAllowed(f"bind source {bind.source!r} is neither a directory nor a file")
    return Bind(source, target, bind.read_only, (info.st_dev, info.st_ino))


def _open(source: str) -> int:
    """As a directory first: the kernel mounts what is mounted on demand (autofs) for that, not for O_PATH."""
    try:
        return os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError:
        return os.open(source, os.O_PATH | os.O_CLOEXEC)
