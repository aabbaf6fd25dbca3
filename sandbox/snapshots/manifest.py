"""What a snapshot says of itself, as JSON."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sandbox import paths, trees
from sandbox.errors import SnapshotError
from sandbox.layer import Layer
from sandbox.snapshots import copying
from sandbox.spec import SandboxSpec

if TYPE_CHECKING:
    from sandbox.container import Container

VERSION = 1
MIB = 1 << 20


class Manifest(msgspec.Struct):
    """Of one snapshot."""

    version: int
    name: str
    owner: str
    taken_at: float
    """Seconds since 1970."""
    bytes: int
    """On disk, where holes take nothing."""
    files: int
    parts: list[str]
    """Directories of `copying.PARTS`."""
    runtime: str
    rootfs: str | None
    """See :func:`image_of`."""
    workspace: str
    """Where that was inside."""
    spec: SandboxSpec
    state: dict[str, Any]
    """Of the server inside, for its operation `restore`."""
    noted: dict[str, bool] | None
    """See `Layer.unchanged`."""


def describe(container: Container, name: str, owner: str, state: dict[str, Any]) -> Manifest:
    """Of a sandbox that stands still. Raises SnapshotError when there is too much of it to be counted."""
    launch, limits = container.launch, container.limits
    most_bytes, most_files = 4 * (limits.disk_mb or 0) * MIB, 4 * (limits.files or 0)
    size, files = trees.usage(launch.scratch, most_bytes, most_files)
    if size > most_bytes or files > most_files:
        raise SnapshotError("there is too much in it, or too deep to be counted")
    spec = dataclasses.replace(container.spec, files={}, limits=limits, snapshot="", owner="")
    noted = Layer(container.address).unchanged()
    about = (VERSION, name, owner, time.time(), size, files, copying.parts_of(launch))
    runtime = container.runtime
    places = (runtime.name, image_of(launch.rootfs), runtime.places(launch).workspace)
    return Manifest(*about, *places, spec, state, noted)


def write(manifest: Manifest) -> bytes:
    """What :func:`read` reads. By `json`, for names inside need not be UTF-8, and msgspec takes no others."""
    return json.dumps(msgspec.to_builtins(manifest)).encode()


def read(text: bytes) -> Manifest:
    """Raises SnapshotError."""
    try:
        manifest = msgspec.convert(json.loads(text), Manifest)
    except (ValueError, msgspec.ValidationError) as error:
        raise SnapshotError(f"the snapshot is damaged: {error}") from error
    if manifest.version != VERSION or not set(manifest.parts) <= set(copying.PARTS):
        raise SnapshotError(f"the snapshot is of version {manifest.version}, which is not known here")
    return manifest


def image_of(rootfs: Path | None) -> str | None:
    """What makes two images the same: in the cache the hash of the file that was unpacked, else the place."""
    if rootfs is None or rootfs.parent != paths.image_cache():
        return str(rootfs) if rootfs else None
    return rootfs.name.partition("-")[0]
