"""What a sandbox's server is made of: its code beside ptyprocess, in one read-only directory, and a Python
that needs nothing of the task's image.

That is `usr` of our own base image, bound in. Debian's Python finds its library relative to the path it is
called by, and the dynamic loader can be called by name with a library path of its own. So the tree works
wherever it is mounted, under any C library or none.
"""

from __future__ import annotations

import compileall
import functools
import hashlib
import importlib.util
import os
import py_compile
import shutil
from pathlib import Path

from sandbox.errors import SandboxError

_SERVER = Path(__file__).parent / "server"


def stage(parent: Path) -> Path:
    """Copy the payload to a directory of `parent` named by its content, unless it is there, and return it.

    A copy rather than a bind of the sources: it is readable by the sandbox's user wherever the package is
    installed, and running sandboxes keep the code they started with, whatever version the next host has.
    Raises SandboxError when ptyprocess is not installed.
    """
    spec = importlib.util.find_spec("ptyprocess")
    if spec is None or spec.origin is None:
        raise SandboxError("the package ptyprocess is not installed here: pip install ptyprocess")
    sources = {path.name: path for path in _SERVER.glob("*.py")}
    sources |= {f"ptyprocess/{path.name}": path for path in Path(spec.origin).parent.glob("*.py")}
    digest = hashlib.sha256()
    for name, path in sorted(sources.items()):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    target = parent / digest.hexdigest()[:16]
    if target.is_dir():
        return target
    temporary = parent / f".{target.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    for name, path in sources.items():
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, temporary / name)
    # Of use if the Python inside is of our version, harmless else. By hash: a copy's times mean nothing.
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(temporary, quiet=1, invalidation_mode=unchecked)
    for path in [temporary, *temporary.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    temporary.rename(target)
    return target


def find_interpreter(base: Path) -> Path | None:
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
    return [f"{inside}/{program.relative_to(usr)}", "--inhibit-cache", "--library-path", libraries]


@functools.cache
def _loader(usr: Path) -> Path:
    return _loaders(usr)[0]


def _loaders(usr: Path) -> list[Path]:
    return sorted(usr.glob("lib/*-linux-gnu*/ld-linux*.so.*"))
