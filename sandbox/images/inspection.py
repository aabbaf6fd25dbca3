"""What images there are and what is in them."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandbox import paths, trees
from sandbox.errors import ImageError, RuntimeUnavailable
from sandbox.images import squashfs, tool
from sandbox.images.cache import Cached
from sandbox.images.store import ImageStore

INSPECT_TIMEOUT_S = 120.0
PROGRAMS = ("bash", "git", "python3")
PROGRAM = re.compile(rf"(?:.*/)?bin/({'|'.join(PROGRAMS)})(?: -> .*)?")
IPYKERNEL = re.compile(r".*/(?:site|dist)-packages/ipykernel/__init__\.py")
"""In whatever Python of the image; the sandbox looks for one that has it."""


def listing(store: ImageStore) -> dict[str, Any]:
    """All named images and the state of this node's cache, as JSON would have them. Raises SandboxError.

    An image's `kind` is `SIF`, `squashfs`, `directory` or `damaged`; `hash`, of its content, None for a
    directory; `unpacked` tells its trees in the cache, one for each user that they belong to.
    """
    cached = store.cache.entries()
    directory = paths.image_dir()
    images = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if path.name.startswith(".") or not (path.is_dir() or path.suffix == ".sif"):
            continue
        try:
            kind = kind_of(path)
        except ImageError:
            kind = "damaged"
        digest = None if kind == "directory" else store.content_hash(path.resolve())
        trees_of_it = [tree_json(entry) for entry in cached if digest and entry.key.startswith(digest)]
        images.append(
            {
                "name": path.name.removesuffix(".sif"),
                "path": str(path),
                "kind": kind,
                "bytes": size_of(path),
                "hash": digest,
                "unpacked": trees_of_it,
            }
        )
    known = {image["hash"] for image in images}
    return {
        "images": images,
        "cache": {
            "directory": str(store.cache.directory),
            "bytes": sum(entry.bytes for entry in cached),
            "quota_bytes": store.cache.quota,
            "of_no_named_image": [tree_json(e) for e in cached if e.key.partition("-")[0] not in known],
        },
    }


def tree_json(cached: Cached) -> dict[str, Any]:
    """An unpacked image, as JSON would have it."""
    return {
        "directory": str(cached.tree),
        "source": cached.source,
        "bytes": cached.bytes,
        "last_used": cached.last_used,
        "in_use": cached.in_use,
    }


def details(store: ImageStore, image: str) -> dict[str, Any]:
    """What an image (a name or a path) is and holds, as JSON would have it. Raises ImageError."""
    path = store.find(image)
    kind = kind_of(path)
    programs: set[str] = set()
    ipykernel = False
    for name in _names(path):
        if match := PROGRAM.fullmatch(name):
            programs.add(match[1])
        ipykernel = ipykernel or IPYKERNEL.fullmatch(name) is not None
    attributes, note = _attributes(path)
    return {
        "path": str(path),
        "kind": kind,
        "bytes": size_of(path),
        "unpacked_bytes": size_of(path)
        if kind == "directory"
        else squashfs.unpacked_bytes(path, paths.sandbox_user()),
        "hash": None if kind == "directory" else store.content_hash(path),
        "has": {name: name in programs for name in PROGRAMS} | {"ipykernel": ipykernel},
        "labels": attributes.get("labels") or {},
        "environment": attributes.get("environment") or {},
        "note": note,
    }


def kind_of(path: Path) -> str:
    """`SIF`, `squashfs` or `directory`. Raises ImageError when it is none of them."""
    if path.is_dir():
        return "directory"
    return "SIF" if squashfs.squashfs_offset(path) else "squashfs"


def size_of(path: Path) -> int:
    """Bytes on disk."""
    return trees.usage(path, sys.maxsize, sys.maxsize)[0] if path.is_dir() else path.stat().st_size


def _names(path: Path) -> Iterator[str]:
    if not path.is_dir():
        yield from (entry.name for entry in squashfs.entries(path, paths.sandbox_user()))
        return
    for parent, directories, files in os.walk(path):
        for name in directories + files:
            yield str(Path(parent, name).relative_to(path))


def _attributes(path: Path) -> tuple[dict[str, Any], str | None]:
    """Labels and environment, which Apptainer keeps in /.singularity.d; and why they are missing."""
    with tempfile.TemporaryDirectory(prefix="rollout-inspect-") as work:
        try:
            return tool.inspect(path, Path(work), INSPECT_TIMEOUT_S), None
        except (ImageError, RuntimeUnavailable) as error:
            return {}, f"labels and environment are not known: {error}"
