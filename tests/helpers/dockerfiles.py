"""What is asked of a Dockerfile, read or built."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.errors import ImageError
from sandbox.images import squashfs
from sandbox.images.dockerfile import build, load


def steps(directory: Path, **arguments: str) -> list[dict]:
    return [dict(step.request) for step in load(directory, arguments).plan().stages[-1].steps]


def refused(directory: Path, **options: object) -> str:
    with pytest.raises(ImageError) as caught:
        build(directory, **options)
    return str(caught.value)


def said(directory: Path, **options: object) -> list[str]:
    """What RUN lines print of a Dockerfile whose last one fails: so nothing is packed."""
    printed: list[str] = []
    with (directory / "Dockerfile").open("a") as file:
        file.write("\nRUN exit 77\n")
    message = refused(directory, output=printed.append, **options)
    assert "status 77" in message, message
    return printed


def unpacked(image: Path, directory: Path) -> Path:
    squashfs.unpack(image, directory / image.stem)
    return directory / image.stem
