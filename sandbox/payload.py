"""The files a sandbox needs inside: our server and ptyprocess, side by side in one read-only directory."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from sandbox.errors import SandboxError

_SERVER = Path(__file__).parent / "server"


def stage(target: Path) -> Path:
    """Copy the payload to `target` (replacing it) and return it.

    A copy rather than a bind of the sources: it is readable by the sandbox's user wherever the package is
    installed, and running sandboxes keep the code they started with. Raises SandboxError when ptyprocess is
    not installed.
    """
    spec = importlib.util.find_spec("ptyprocess")
    if spec is None or spec.origin is None:
        raise SandboxError("the package ptyprocess is not installed here: pip install ptyprocess")
    shutil.rmtree(target, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_SERVER, target, ignore=ignore)
    shutil.copytree(Path(spec.origin).parent, target / "ptyprocess", ignore=ignore)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target
