"""What an image declares: the variables, directory, user and shell of its Docker image.

Apptainer keeps the variables in a file of what it makes from one, and the rest in the SIF beside the file
system; what `sandbox.images.dockerfile` has built says all of it in a file of ours. It is read as text and
never run, for an image is not to be trusted, and no link of it is followed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox import paths, trees
from sandbox.images import squashfs

OWN = (".singularity.d", "rollout.json")
"""Where images built here say what they are."""
PLACE = (".singularity.d", "env", "10-docker2singularity.sh")
MAX_BYTES = 256 << 10
LINE = re.compile(r'export ([A-Za-z_][A-Za-z0-9_]*)="(?:\$\{\1:-("?)(.*)\2\}|((?!\$\{).*))"')
"""As the OCI packer of Apptainer writes them: `export NAME="${NAME:-"VALUE"}"`, and `export PATH="VALUE"`."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPED = re.compile(r'\\([\\"`$])')


def docker_environment(rootfs: Path) -> dict[str, str]:
    """Name → value; {} where the image is no Docker image's, or says it in no known form."""
    try:
        own = _object(_read(rootfs, OWN))
        return {name: text for name, text in _strings(own.get("env")).items() if NAME.fullmatch(name)}
    except OSError:
        pass
    try:
        text = _read(rootfs, PLACE).decode(errors="replace")
    except OSError:
        return {}
    variables = {}
    for line in text.splitlines():
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
        return _config_in(image, {})
    documents = map(_object, squashfs.json_parts(image))
    outside = next((found for found in documents if "data" not in found), {})  # the other is of `inspect`
    user = paths.sandbox_user()
    with tempfile.TemporaryDirectory(prefix="rollout-config-") as directory:
        target = Path(directory, "root")
        target.mkdir()
        if user is not None:
            Path(directory).chmod(0o711)
            os.chown(target, user, user)
        squashfs.extract(image, target, OWN[0], user)
        config = _config_in(target, outside)
        trees.remove(target)
    return config


def _config_in(rootfs: Path, oci: dict[str, Any]) -> ImageConfig:
    """`oci`: the configuration of an OCI image, where it lies outside of the file system."""
    try:
        own = _object(_read(rootfs, OWN))
    except OSError:
        own = {}
    if not own:
        names = {"workdir": "WorkingDir", "user": "User", "shell": "Shell", "labels": "Labels"}
        own = {ours: oci.get(theirs) for ours, theirs in names.items()}
        own["env"] = docker_environment(rootfs)
    default = ImageConfig()
    shell = own.get("shell")
    if not (isinstance(shell, list) and shell and all(map(_is_text, shell))):
        shell = default.shell
    workdir, user, digest = (own.get(name) for name in ("workdir", "user", "digest"))
    return ImageConfig(
        env={name: value for name, value in _strings(own.get("env")).items() if NAME.fullmatch(name)},
        workdir=workdir if _is_text(workdir) and workdir.startswith("/") else default.workdir,
        user=user if _is_text(user) and "\n" not in user else default.user,
        shell=tuple(shell),
        labels=_strings(own.get("labels")),
        digest=digest if _is_text(digest) else "",
    )


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


def _read(rootfs: Path, place: tuple[str, ...]) -> bytes:
    """Raises OSError, also where a part of the place is a link."""
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
