"""A plain process: no sandbox at all. For trusted tests on machines without any runtime; only when asked for
by name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sandbox import processes
from sandbox.runtimes.base import NO_LIMITS, Launch, Places, Runtime


class LocalUnsafe(Runtime):
    """Runs the server as the user itself, with a clean environment and nothing else."""

    name = "local-unsafe"
    needs_image = False

    def __init__(self) -> None:
        super().__init__()
        self.missing_isolation = ["files", "network", "processes", NO_LIMITS]

    def check_installed(self) -> None:
        """Always there."""

    def argv(self, launch: Launch, command: list[str]) -> list[str]:
        """The command itself."""
        return command

    def places(self, launch: Launch) -> Places:
        """The machine's own paths."""
        scratch: Path = launch.scratch
        return Places(
            private=str(scratch / "private"),
            payload=str(launch.payload),
            workspace=str(scratch / "workspace"),
            tmp=str(scratch / "tmp"),
            home=str(scratch / "home"),
        )

    def python(self, launch: Launch) -> list[str]:
        """The interpreter that runs us; readable by ourselves for certain."""
        return [sys.executable]

    def environment(self, launch: Launch) -> dict[str, str]:
        """A Python of a site's module system needs its libraries."""
        libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        return super().environment(launch) | libraries

    def victims(self, pid: int) -> list[int]:
        """All descendants, then the server. It is their subreaper, so a daemonised one is still found below
        it.
        """
        return processes.descendants(pid) or [pid]
