"""The variables that a Docker image declares (`ENV`), as Apptainer keeps them in what it makes from one.

They are read as text and never run, for an image is not to be trusted, and no link of it is followed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PLACE = (".singularity.d", "env", "10-docker2singularity.sh")
MAX_BYTES = 256 << 10
LINE = re.compile(r'export ([A-Za-z_][A-Za-z0-9_]*)="(?:\$\{\1:-("?)(.*)\2\}|((?!\$\{).*))"')
"""As the OCI packer of Apptainer writes them: `export NAME="${NAME:-"VALUE"}"`, and `export PATH="VALUE"`."""
ESCAPED = re.compile(r'\\([\\"`$])')


def docker_environment(rootfs: Path) -> dict[str, str]:
    """Name → value; {} where the image is no Docker image's, or says it in no known form."""
    try:
        text = _read(rootfs).decode(errors="replace")
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


def _read(rootfs: Path) -> bytes:
    """Raises OSError, also where a part of the place is a link."""
    fd = os.open(rootfs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in PLACE:
        # Without waiting for a writer, should it be a pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            below = os.open(name, flags, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    with os.fdopen(fd, "rb") as file:
        return file.read(MAX_BYTES) or b""
