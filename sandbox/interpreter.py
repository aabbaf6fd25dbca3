"""A Python for the server that needs nothing of the task's image: `usr` of our own base image, bound in.

Debian's Python finds its library relative to the path it is called by, and the dynamic loader can be called
by name with a library path of its own. So the tree works wherever it is mounted, under any C library or none.
"""

from __future__ import annotations

import functools
from pathlib import Path


def find(base: Path) -> Path | None:
    """`usr` of the unpacked base image `base`, if it holds all that :func:`loader` and the server need."""
    usr = base / "usr"
    if next(usr.glob("lib/python3.*/os.py"), None) and (usr / "bin/python3").exists() and _loaders(usr):
        return usr
    return None


def loader(usr: Path, inside: str) -> list[str]:
    """Command line prefix that starts a program of the tree `usr`, which is mounted at `inside`."""
    program = _loader(usr)
    libraries = f"{inside}/{program.parent.relative_to(usr)}:{inside}/lib"
    # No cache: the image's /etc/ld.so.cache names the image's libraries.
    return [
        f"{inside}/{program.relative_to(usr)}",
        "--inhibit-cache",
        "--library-path",
        libraries,
    ]


@functools.cache
def _loader(usr: Path) -> Path:
    return _loaders(usr)[0]


def _loaders(usr: Path) -> list[Path]:
    return sorted(usr.glob("lib/*-linux-gnu*/ld-linux*.so.*"))
