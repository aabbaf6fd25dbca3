"""Subordinate ids (subuid(5)): with them a plain user's namespace has more than one user."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
from pathlib import Path

from sandbox import paths


def are_given() -> bool:
    """Whether whoever builds here has some, and the setuid program that maps them."""
    uid = paths.sandbox_user() or os.geteuid()
    names = {str(uid)}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    with contextlib.suppress(OSError):
        lines = Path("/etc/subuid").read_text().splitlines()
        return any(line.split(":")[0] in names for line in lines) and shutil.which("newuidmap") is not None
    return False
