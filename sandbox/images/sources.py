"""What an image can be built from, told by how it looks."""

from __future__ import annotations

import enum
import lzma
import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import ImageError
from sandbox.images.squashfs import squashfs_offset

REGISTRIES = ("docker", "oras", "library")
SECTION = re.compile(r"\s*%(\w+)")
ARGUMENT = re.compile(r"{{\s*(\w+)\s*}}")
HEADER = re.compile(r"\s*(bootstrap|from)\s*:\s*(.*?)\s*$", re.IGNORECASE)


class Kind(enum.Enum):
    """How a source is made into an image."""

    DEFINITION = "definition file"
    DIRECTORY = "directory"
    ARCHIVE = "container archive"
    FILE = "image file"
    REGISTRY = "registry"


@dataclass(frozen=True)
class Source:
    """A source that has been looked at."""

    kind: Kind
    text: str
    """As given."""
    reference: str
    """As Apptainer is told: an absolute path or a URI."""
    path: Path | None = None
    """None for a registry."""


def recognise(text: str) -> Source:
    """Raises ImageError when it is nothing that an image can be made from."""
    scheme, separator, _ = text.partition("://")
    if separator:
        if scheme not in REGISTRIES:
            known = ", ".join(f"{name}://" for name in REGISTRIES)
            raise ImageError(f"source {text!r}: {scheme}:// is not known; give {known} or a path")
        return Source(Kind.REGISTRY, text, text)
    path = Path(text).absolute()
    if not path.exists():
        raise ImageError(
            f"source {text!r}: there is no such file; give a path, or a reference like docker://NAME"
        )
    if path.is_dir():
        if not any((path / name).is_dir() for name in ("usr", "bin")):
            raise ImageError(f"source {text!r} is a directory without usr and bin: no root file system")
        return Source(Kind.DIRECTORY, text, str(path), path)
    if path.suffix == ".def":
        return Source(Kind.DEFINITION, text, str(path), path)
    if tarfile.is_tarfile(path):
        return Source(Kind.ARCHIVE, text, f"{_archive_kind(path)}:{path}", path)
    try:
        squashfs_offset(path)
    except ImageError as error:
        raise ImageError(
            f"source {text!r} is no definition file (*.def), directory, docker archive, SIF or squashfs "
            f"file: {error}"
        ) from error
    return Source(Kind.FILE, text, str(path), path)


def _archive_kind(path: Path) -> str:
    """Apptainer's name for what `docker save` or an OCI tool has written."""
    try:
        with tarfile.open(path) as archive:
            names = {name.removeprefix("./") for name in archive.getnames()}
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise ImageError(f"{path} is cut off or damaged ({error}); save or copy it again") from error
    if "manifest.json" in names:
        return "docker-archive"
    if "oci-layout" in names:
        return "oci-archive"
    raise ImageError(
        f"{path} holds neither manifest.json (docker save) nor oci-layout; if it is a plain root file "
        "system, unpack it and give the directory"
    )


def has_post(definition: Path) -> bool:
    """Whether a definition file runs something while the image is built."""
    return any(
        (match := SECTION.match(line)) and match[1].lower() == "post"
        for line in definition.read_text(errors="replace").splitlines()
    )


def arguments_in(lines: list[str]) -> set[str]:
    """The build arguments that a definition file uses."""
    return {name for line in lines for name in ARGUMENT.findall(line)}


def local_images(definition: Path, arguments: dict[str, str]) -> dict[int, Path]:
    """The directories and image files that a definition file starts from, by the number (from 0) of the
    line that names them.

    `arguments`: of the build, for `{{ NAME }}`.
    """
    found: dict[int, Path] = {}
    bootstrap = ""
    for number, line in enumerate(definition.read_text(errors="replace").splitlines()):
        match = HEADER.match(line)
        if match and match[1].lower() == "bootstrap":
            bootstrap = match[2].lower()
        elif match and bootstrap == "localimage":
            value = ARGUMENT.sub(lambda name: arguments.get(name[1], name[0]), match[2])
            if Path(value).exists():
                found[number] = Path(value).absolute()
    return found
