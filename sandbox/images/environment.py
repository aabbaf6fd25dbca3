"""What an image declares: the variables, directory, user and shell of its Docker image.

Apptainer keeps the variables in a file of what it makes from one, and the rest in the SIF beside the file
system; what `sandbox.images.dockerfile` has built says all of it in a file of ours. It is read as text and
never run, for an image is not to be trusted, and no link of it is followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox import paths
from sandbox.images import squashfs

OWN, TRAILER = (".singularity.d", "rollout.json"), b"ROLLOUT\0"
"""Where images built here say what they are: inside, and how what is behind the file's end ends."""
OCI = {"workdir": "WorkingDir", "user": "User", "shell": "Shell", "labels": "Labels"}
"""Our names, and those in the configuration of an OCI image."""
PLACE = (".singularity.d", "env", "10-docker2singularity.sh")
MAX_BYTES = 256 << 10
LINE = re.compile(r'export ([A-Za-z_][A-Za-z0-9_]*)="(?:\$\{\1:-("?)(.*)\2\}|((?!\$\{).*))"')
"""As the OCI packer of Apptainer writes them: `export NAME="${NAME:-"VALUE"}"`, and `export PATH="VALUE"`."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPED = re.compile(r'\\([\\"`$])')


def docker_environment(rootfs: Path) -> dict[str, str]:
    """Name → value; {} where the image is no Docker image's, or says it in no known form."""
    with contextlib.suppress(OSError):
        return _named(_object(read_inside(rootfs, OWN)).get("env"))
    with contextlib.suppress(OSError):
        return _variables_in(read_inside(rootfs, PLACE))
    return {}


def _variables_in(script: bytes) -> dict[str, str]:
    variables = {}
    for line in script.decode(errors="replace").splitlines():
        if match := LINE.fullmatch(line):
            # Quoted twice, once as a Go string and once for the shell.
            value = match[4] if match[3] is None else match[3]
            for _ in range(2):
                value = ESCAPED.sub(r"\1", value)
            variables[match[1]] = value
    return variables


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """What programs in an image may expect, as its Dockerfile or Docker image says."""

    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    """Name or number, perhaps with a group after a colon; "" = root."""
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    digest: str = ""
    """What it was built from, of images built here from a Dockerfile; of no meaning outside."""

    def as_json(self) -> bytes:
        """As it is kept in an image."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()


def image_config(image: Path) -> ImageConfig:
    """Of an image file, or a directory with its root file system; what it does not say, or says in no known
    form, has the default. Of what Apptainer made of a Docker image only the file tells more than variables.
    Raises ImageError for a file that is no image.
    """
    if image.is_dir():
        with contextlib.suppress(OSError):
            return _config(_object(read_inside(image, OWN)))
        return ImageConfig(env=docker_environment(image))
    if own := _object(_trailer(image)):
        return _config(own)
    for found in map(_object, squashfs.json_parts(image)):
        if "data" not in found:  # the other is of `inspect`
            env = found.get("Env")
            pairs = [str(line).partition("=")[::2] for line in env] if isinstance(env, list) else []
            own = {ours: found.get(theirs) for ours, theirs in OCI.items()}
            return _config({**own, "env": dict(pairs)})
    text = squashfs.read_file(image, "/".join(PLACE), MAX_BYTES, paths.sandbox_user())
    return ImageConfig(env=_variables_in(text))


def add_trailer(image: Path, config: ImageConfig) -> None:
    """Have an image file say what it is behind its end as well, where it is read at once."""
    text = config.as_json()
    with image.open("ab") as file:
        file.write(text + struct.pack("<Q", len(text)) + TRAILER)


def _trailer(image: Path) -> bytes:
    """What `add_trailer` has written; empty if it has not."""
    tail = struct.calcsize("<Q") + len(TRAILER)
    with image.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - tail))
        length, magic = file.read(8), file.read()
        size = struct.unpack("<Q", length)[0] if magic == TRAILER else 0
        if not 0 < size <= min(MAX_BYTES, end - tail):
            return b""
        file.seek(end - tail - size)
        return file.read(size)


def _config(own: dict[str, Any]) -> ImageConfig:
    """What makes no sense has the default."""
    default = ImageConfig()
    shell = own.get("shell")
    if not (isinstance(shell, list) and shell and all(map(_is_text, shell))):
        shell = default.shell
    workdir, user, digest = (own.get(name) for name in ("workdir", "user", "digest"))
    return ImageConfig(
        env=_named(own.get("env")),
        workdir=workdir if _is_text(workdir) and workdir.startswith("/") else default.workdir,
        user=user if _is_text(user) and "\n" not in user else default.user,
        shell=tuple(shell),
        labels=_strings(own.get("labels")),
        digest=digest if _is_text(digest) else "",
    )


def _named(value: object) -> dict[str, str]:
    return {name: text for name, text in _strings(value).items() if NAME.fullmatch(name)}


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _strings(value: object) -> dict[str, str]:
    pairs = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in pairs if _is_text(name) and _is_text(text)}


def _is_text(value: object) -> bool:
    """Whether it can be a variable's, an argument's or a name's."""
    return isinstance(value, str) and "\0" not in value and not SURROGATE.search(value)


def read_inside(rootfs: Path, place: tuple[str, ...]) -> bytes:
    """A file of an image, its beginning. Raises OSError, also where a part of the place is a link."""
    fd = os.open(rootfs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in place:
        # Without waiting for a writer, should it be a pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            below = os.open(name, flags, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    with os.fdopen(fd, "rb") as file:
        return file.read(MAX_BYTES) or b""
