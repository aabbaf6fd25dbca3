"""Images of a data set's instances: their names here, and what `rollout images build --dataset` makes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from rollout.datasets import DatasetError, Row, read
from sandbox.errors import ImageError
from workers.handlers.swe.rows import SweTask

MAX_NAME = 120


def local_name(image: str) -> str:
    """The name or path under which an image lies here: of a docker reference a name, anything else itself."""
    if image.startswith(("/", "./", "../")) or ("/" not in image and ":" not in image):
        return image
    reference = image.removeprefix("docker://").removeprefix("docker.io/").removesuffix(":latest")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", reference)
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 13]}-{hashlib.sha256(reference.encode()).hexdigest()[:12]}"


def images_of(dataset: Path) -> Iterator[tuple[str, str]]:
    """Name and docker reference of each image that the rows of a dataset need, each once.

    Raises:
        ImageError: A row is of no known layout; it says which row and field.
    """
    seen: set[str] = set()
    try:
        for row in read(dataset):
            image = _image(row)
            name = local_name(image)
            if name == image or name in seen:
                continue
            seen.add(name)
            yield name, image if "://" in image else f"docker://{image}"
    except DatasetError as error:
        raise ImageError(str(error)) from error


def _image(row: Row) -> str:
    try:
        return SweTask.model_validate(row.data).instance().image
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise ImageError(": ".join(filter(None, (row.where, where, said)))) from error
