"""`apptainer exec` of an unpacked image in the fastest form that we know, to compare with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from sandbox import paths
from sandbox.images import ImageStore
from sandbox.runtimes.apptainer import Apptainer

FLAGS = (
    *("-q", "exec", "--userns", "--containall", "--no-init", "--no-home", "--cleanenv", "--no-privs"),
    *("--no-mount", "sys,bind-paths,tmp", "--writable-tmpfs", "--net", "--network", "none", "--pwd", "/"),
)
"""Those of our sandboxes (`sandbox.runtimes.apptainer`); the writable layer is Apptainer's own."""


class PlainApptainer:
    """Containers with our sandboxes' user, image, flags and `GOGC=off`, but no server, filter or limits."""

    def __init__(self, home: Path, rootfs: Path | None = None):
        """`home`: becomes Apptainer's home, made here; `rootfs`: instead of the base image.

        Raises RuntimeUnavailable where Apptainer is missing.
        """
        runtime, user = Apptainer(), paths.sandbox_user()
        runtime.check_installed()
        home.mkdir()
        self._as_user = {}
        if user is not None:
            os.chown(home, user, user)
            self._as_user = {"user": user, "group": user, "extra_groups": []}
        self._argv = [str(runtime.program()), *FLAGS, str(rootfs or ImageStore().rootfs("base", user))]
        self._env = {"PATH": paths.tool_path(), "HOME": str(home), "LANG": "C.UTF-8", "GOGC": "off"}

    def start(self, script: str) -> subprocess.Popen[str]:
        """A container in which bash runs the script, with pipes."""
        return subprocess.Popen(
            [*self._argv, "bash", "-c", script],
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd="/",
            **self._as_user,
        )

    def run(self, script: str, stdin: str = "") -> str:
        """Output of the script. Raises RuntimeError with it when the exit code is not 0."""
        with self.start(script) as process:
            output = process.communicate(stdin)[0]
        if process.returncode != 0:
            raise RuntimeError(f"apptainer exec ended with {process.returncode}: {output[-1000:]}")
        return output
