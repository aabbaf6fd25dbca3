"""Images of a data set's instances: their names here, and what `rollout images build --dataset` makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from rollout.datasets import DatasetError, Row, read
from rollout.image_names import local_name
from sandbox.errors import ImageError
from workers.handlers.swe.rows import SweTask


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
        reason = first["msg"].removeprefix("Value error, ")
        raise ImageError(": ".join(filter(None, (row.where, where, reason)))) from error
