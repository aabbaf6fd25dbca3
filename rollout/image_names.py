"""Names of sandbox images, as tasks give them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from posixpath import normpath
from typing import Any

MAX_NAME = 120
FIELDS = ("image", "image_name", "docker_image")
"""Fields of a task that name the image of its sandbox, in rows of any published layout."""


def images_in(task: Mapping[str, Any]) -> dict[str, str]:
    """Field → image, of all fields of a task that name one."""
    return {name: task[name] for name in FIELDS if isinstance(task.get(name), str)}


def is_path(image: str) -> bool:
    """Whether it is a place in a file system, and neither a name nor a docker reference."""
    return image.startswith(("/", "~")) or any(part in (".", "..") for part in image.split("/"))


def is_below(path: str, roots: str) -> bool:
    """Whether a path lies, by its name alone, below one of the directories, which colons separate."""
    normal = normpath(path)
    return any(normal.startswith(normpath(root).rstrip("/") + "/") for root in roots.split(":") if root)


def local_name(image: str) -> str:
    """The name or path under which an image lies here: of a docker reference a name, anything else itself."""
    if is_path(image) or ("/" not in image and ":" not in image):
        return image
    reference = image.removeprefix("docker://").removeprefix("docker.io/").removesuffix(":latest")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", reference)
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 13]}-{hashlib.sha256(reference.encode()).hexdigest()[:12]}"
