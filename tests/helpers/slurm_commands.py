"""Slurm's commands as scripts that say what a test wants, for tests without a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Commands:
    """Scripts in `directory/bin`, first on PATH; squeue prints the file `jobs` of the directory."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, **bodies: str) -> None:
        """
        Args:
            bodies: Command → shell, for those that do more than succeed.
        """
        self.directory = directory
        (directory / "bin").mkdir()
        (directory / "called").touch()
        (directory / "jobs").touch()
        silent = dict.fromkeys(("sbatch", "scancel", "scontrol"), ":")
        for name, body in {"squeue": f"cat {directory}/jobs", **silent, **bodies}.items():
            self.write(name, body)
        patch.setenv("PATH", f"{directory}/bin:{os.environ['PATH']}")

    def write(self, name: str, body: str) -> None:
        """What a command does from now on, after it has noted that it was called."""
        script = self.directory / "bin" / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.directory}/called\n{body}\n')
        script.chmod(0o755)

    def jobs(self, *lines: str) -> None:
        """What squeue shows."""
        (self.directory / "jobs").write_text("".join(f"{line}\n" for line in lines))

    def called(self, name: str) -> list[str]:
        """Arguments of each call of a command so far."""
        lines = (self.directory / "called").read_text().splitlines()
        return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]
