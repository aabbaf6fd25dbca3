"""Apptainer (or Singularity), rootless: a user namespace, the image under an overlay with a private upper
layer.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

from sandbox import paths, payload
from sandbox.errors import RuntimeUnavailable, SandboxStartError
from sandbox.runtimes.base import Bind, Launch, Places, Runtime
from sandbox.runtimes.launcher import Launcher, Started

log = logging.getLogger(__name__)

OURS, THEIRS, MEMORY = "an overlay with userxattr", "Apptainer's own overlay", "a tmpfs"
"""What keeps the changes to an image; directories of it can only be removed under ours."""


class Apptainer(Runtime):
    """Full isolation: files, processes, IPC, network, environment, no capabilities."""

    name = "apptainer"

    def __init__(self) -> None:
        super().__init__()
        self._upper = OURS
        self._launcher: Launcher | None = None
        self._starting = threading.Lock()

    def program(self) -> str | None:
        """`ROLLOUT_APPTAINER`, else the one on PATH, else the one our set-up installed."""
        named = os.environ.get("ROLLOUT_APPTAINER")
        if named:
            return shutil.which(named)
        return shutil.which("apptainer", path=paths.tool_path()) or shutil.which(
            "singularity", path=paths.tool_path()
        )

    def check_installed(self) -> None:
        """Raise RuntimeUnavailable when there is no program."""
        if self.program() is None:
            named = os.environ.get("ROLLOUT_APPTAINER")
            what = f"ROLLOUT_APPTAINER={named} is not a program" if named else "apptainer is not installed"
            raise RuntimeUnavailable(
                f"{what}; run deploy/setup/apptainer.sh or load your site's apptainer module"
            )

    def argv(self, launch: Launch, command: list[str]) -> list[str]:
        """`apptainer exec` behind the overlay."""
        behind = [] if self._upper != OURS else [*_writable_root(launch), *self._mount(launch), "--"]
        return [*behind, *self._exec(launch, command)]

    def start(self, launch: Launch, command: list[str], stdin: socket.socket) -> subprocess.Popen | Started:
        """With the overlay of ours, by a process that has Python running already."""
        if self._upper != OURS:
            self._refuse_links(launch)
            return super().start(launch, command, stdin)
        script = tuple(_writable_root(launch))
        mount, argv = self._mount(launch), self._exec(launch, command)
        with self._starting:
            if self._launcher is None or self._launcher.command != script:
                self.close()
                self._launcher = Launcher(script, **self.as_user())
            return self._launcher.start(mount, argv, self.environment(launch), stdin)

    def _refuse_links(self, launch: Launch) -> None:
        """Apptainer mounts where they lead: our code in the agent's reach, or what is bound over our code."""
        places = [Places.payload, Places.interpreter]
        for bind in launch.binds:
            places += [bind.target, *map(str, list(Path(bind.target).parents)[:-1])]
        for place in places:
            if Path(f"{launch.rootfs}{place}").is_symlink():
                raise SandboxStartError(
                    f"image {launch.rootfs} has a link at {place}, which only {OURS} can replace; remove it"
                )

    def close(self) -> None:
        """End that process."""
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None

    def _mount(self, launch: Launch) -> list[str]:
        """What `writable_root.py` mounts: the image, the overlay, and places to mount on."""
        points = [
            f"{'' if bind.source.is_dir() else '='}{bind.target}"
            for bind in self.all_binds(launch)
            if not bind.target.startswith("/proc/")
        ]
        return [str(launch.rootfs), str(launch.scratch / "overlay"), *points, "/proc"]

    def _exec(self, launch: Launch, command: list[str]) -> list[str]:
        """`apptainer exec` with everything shut that can be shut."""
        places = self.places(launch)
        # --userns also for root: the privileged path fails where the capability bounding set is cut (VMs,
        # containers).
        # No init of Apptainer's: it would be a process under no filter of calls; the server is the init.
        # /sys is the machine's, with the cgroups of other processes; the bind paths are of the site's making;
        # /tmp is a bind of ours.
        flags = ["--userns", "--containall", "--no-init", "--no-home", "--cleanenv", "--no-privs"]
        flags += ["--no-mount", "sys,bind-paths,tmp"]
        overlay, rootfs = launch.scratch / "overlay", launch.rootfs
        if self._upper == OURS:
            flags.append("--writable")
            rootfs = overlay / "merged"
        elif self._upper == THEIRS:
            flags += ["--overlay", str(overlay)]
        else:
            flags.append("--writable-tmpfs")
        if launch.network == "none":
            flags += ["--net", "--network", "none"]
        if self.run_as is None and os.geteuid() == 0:
            # Uid 0 owns these although it has no capabilities; see paths.sandbox_user.
            flags += ["--bind", "/proc/sys:/proc/sys:ro"]
        if self.has_cgroups and launch.limits is not None:
            flags += ["--memory", f"{launch.limits.memory_mb}M"]
            flags += ["--pids-limit", str(launch.limits.processes)]
        for bind in self.all_binds(launch):
            flags += ["--bind", f"{bind.source}:{bind.target}:{'ro' if bind.read_only else 'rw'}"]
        return [
            str(self.program()),
            "-q",
            "exec",
            *flags,
            "--pwd",
            places.workspace,
            str(rootfs),
            *command,
        ]

    def probe(self, rootfs: Path | None, within: Path | None = None) -> None:
        """See :meth:`Runtime.probe`. Changed system files go to disk if the file system there can do that,
        and directories of the image can be removed if the kernel can (5.11 or newer).

        Apptainer's own tmpfs for them is either too small for an installation (64 MB) or half of the memory.
        Cgroups are used if they work: rootless that takes version 2, systemd and delegation, and where one of
        them is missing Apptainer refuses to start.
        """
        self.has_cgroups = False
        for self._upper in (OURS, THEIRS, MEMORY):
            try:
                super().probe(rootfs, within)
                break
            except RuntimeUnavailable as error:
                if self._upper == MEMORY:
                    raise
                log.warning("changed system files cannot be kept as they should: %s: %s", self._upper, error)
        if self._upper == MEMORY:
            self.in_memory = True
            self.missing_isolation.append("disk limit of changed system files (kept in memory)")
        self.has_cgroups = True
        try:
            super().probe(rootfs, within)
        except RuntimeUnavailable as error:
            self.has_cgroups = False
            log.info("no cgroup for each sandbox, rlimits and the watchdog serve: %s", error)

    def all_binds(self, launch: Launch) -> list[Bind]:
        """But none below a `/proc` that there is not."""
        binds = super().all_binds(launch)
        if self._upper != OURS and launch.rootfs is not None and not (launch.rootfs / "proc").is_dir():
            binds = [bind for bind in binds if not bind.target.startswith("/proc/")]
        return binds

    def own_names(self, launch: Launch) -> list[Bind]:
        """In the place of those that Apptainer takes from the machine."""
        return [bind for bind in super().own_names(launch) if self._has_place(launch, bind.target)]

    def _has_place(self, launch: Launch, target: str) -> bool:
        """Whether the file is there or can be made: a directory image may belong to somebody else."""
        place = Path(f"{launch.rootfs}{target}")
        owner = os.geteuid() if self.run_as is None else self.run_as
        return place.exists() or not place.parent.is_dir() or place.parent.stat().st_uid == owner

    def environment(self, launch: Launch) -> dict[str, str]:
        """Keeps Apptainer's own files out of the user's home, which is shared between nodes on a cluster. It
        lives for a moment, so it need not collect garbage: that takes a tenth of a start.
        """
        names = ("APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR", "SINGULARITY_CONFIGDIR", "SINGULARITY_CACHEDIR")
        return super().environment(launch) | dict.fromkeys(names, str(launch.scratch)) | {"GOGC": "off"}


@functools.cache
def _text_of_writable_root() -> str:
    return Path(__file__).with_name("writable_root.py").read_text()


def _writable_root(launch: Launch) -> list[str]:
    """The command of `writable_root.py`. By its text, and with the base image's Python, for the sandboxes'
    user may be unable to read ours. It runs outside, so it is never a task image's.
    """
    own = launch.interpreter
    python = [str(Path(sys.executable).resolve())]
    if own is not None:
        python = [*payload.loader(own, str(own)), f"{own}/bin/python3"]
    return [*python, "-IS", "-c", _text_of_writable_root()]
