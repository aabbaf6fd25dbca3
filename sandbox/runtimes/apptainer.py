"""Apptainer (or Singularity), rootless: a user namespace, the image under an overlay with a private upper
layer.
"""

from __future__ import annotations

import os
import shutil

from sandbox import paths
from sandbox.errors import RuntimeUnavailable
from sandbox.runtimes.base import Launch, Runtime


class Apptainer(Runtime):
    """Full isolation: files, processes, IPC, network, environment, no capabilities."""

    name = "apptainer"

    def __init__(self) -> None:
        super().__init__()
        self.missing_isolation = []

    def program(self) -> str | None:
        """`ROLLOUT_APPTAINER`, else the one on PATH, else the one our set-up installed."""
        wanted = os.environ.get("ROLLOUT_APPTAINER")
        if wanted:
            return shutil.which(wanted)
        return shutil.which("apptainer", path=paths.tool_path()) or shutil.which(
            "singularity", path=paths.tool_path()
        )

    def check_installed(self) -> None:
        """Raise RuntimeUnavailable when there is no program."""
        if self.program() is None:
            wanted = os.environ.get("ROLLOUT_APPTAINER")
            what = f"ROLLOUT_APPTAINER={wanted} is not a program" if wanted else "apptainer is not installed"
            raise RuntimeUnavailable(
                f"{what}; run deploy/setup/apptainer.sh or load your site's apptainer module"
            )

    def argv(self, launch: Launch, command: list[str]) -> list[str]:
        """`apptainer exec` with everything shut that can be shut."""
        places = self.places(launch)
        # --userns also for root: the privileged path fails where the capability bounding set is cut (VMs,
        # containers).
        flags = ["--userns", "--containall", "--no-home", "--cleanenv", "--no-privs"]
        # On disk: Apptainer's own tmpfs is either too small for an installation or as large as the memory.
        flags += ["--overlay", str(launch.scratch / "overlay")]
        if launch.network == "none":
            flags += ["--net", "--network", "none"]
        if self.run_as is None and os.geteuid() == 0:
            # Uid 0 owns these although it has no capabilities; see paths.sandbox_user.
            flags += ["--no-mount", "sys", "--bind", "/proc/sys:/proc/sys:ro"]
        for bind in self.all_binds(launch):
            flags += ["--bind", f"{bind.source}:{bind.target}:{'ro' if bind.read_only else 'rw'}"]
        return [
            str(self.program()),
            "-q",
            "exec",
            *flags,
            "--pwd",
            places.workspace,
            str(launch.rootfs),
            *command,
        ]

    def environment(self, launch: Launch) -> dict[str, str]:
        """Keeps Apptainer's own files out of the user's home, which is shared between nodes on a cluster."""
        names = ("APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR", "SINGULARITY_CONFIGDIR", "SINGULARITY_CACHEDIR")
        return super().environment(launch) | dict.fromkeys(names, str(launch.scratch))
