"""bubblewrap: nearly Apptainer's isolation, without its writable system directories."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

from sandbox import paths
from sandbox.errors import RuntimeUnavailable
from sandbox.runtimes.base import Bind, Launch, Places, Runtime

# Made by bwrap itself or by us; the rest of the image's top level is bound read-only.
OWN_TOP_LEVEL = {
    "proc",
    "dev",
    "sys",
    "tmp",
    "run",
    "home",
    "workspace",
    "boot",
    "mnt",
    "media",
    "lost+found",
    Places.payload[1:],
    Places.interpreter[1:],
}

# What of the machine is shown when there is no image. No home, no /var, no other directory of /etc.
MACHINE_TOP_LEVEL = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
MACHINE_ETC = (
    "alternatives",
    "ca-certificates.conf",
    "group",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "os-release",
    "passwd",
    "protocols",
    "services",
    "ssl",
)


class Bubblewrap(Runtime):
    """Files, processes, IPC, network and environment are isolated; the system directories are read-only
    inside.
    """

    name = "bubblewrap"

    def program(self) -> str | None:
        """bwrap on PATH or unpacked by our set-up."""
        return shutil.which("bwrap", path=paths.tool_path())

    def check_installed(self) -> None:
        """Raise RuntimeUnavailable when there is no program."""
        if self.program() is None:
            raise RuntimeUnavailable("bubblewrap (bwrap) is not installed; run deploy/setup/apptainer.sh")

    def argv(self, launch: Launch, command: list[str]) -> list[str]:
        """`bwrap` with all namespaces; no --die-with-parent, because sandboxes outlive a killed host."""
        places = self.places(launch)
        # No init of bwrap's: it would be a process under no filter of calls; the server is the init.
        flags = ["--unshare-user", "--unshare-all", "--new-session", "--as-pid-1"]
        flags += ["--cap-drop", "ALL", "--clearenv"]
        if _can_forbid_user_namespaces(str(self.program())):
            flags.append("--disable-userns")
        if launch.network == "host":
            flags.append("--share-net")
        flags += ["--tmpfs", "/", *self._root(launch.rootfs)]
        flags += ["--proc", "/proc", "--dev", "/dev", "--bind", str(launch.scratch / "run"), "/run"]
        for bind in self.all_binds(launch):
            flags += ["--ro-bind" if bind.read_only else "--bind", str(bind.source), bind.target]
        if launch.network == "host" and launch.rootfs is None:
            flags += ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        # Nothing can be kept in the memory of a file system: only mounts that lie on disk are written to.
        flags += ["--remount-ro", "/dev", "--remount-ro", "/"]
        flags += ["--setenv", "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        flags += ["--chdir", places.workspace]
        return [str(self.program()), *flags, "--", *command]

    def own_names(self, launch: Launch) -> list[Bind]:
        """Where there is something to put them on: an image's `/etc` is read-only."""
        own = []
        for bind in super().own_names(launch):
            place = launch.rootfs and launch.rootfs / bind.target[1:]
            if place is None or (place.is_file() and not place.is_symlink()):
                own.append(bind)
        return own

    @staticmethod
    def _root(rootfs: Path | None) -> list[str]:
        root = rootfs or Path("/")
        if rootfs is None:
            entries = [root / name for name in MACHINE_TOP_LEVEL]
            entries += [root / "etc" / name for name in MACHINE_ETC]
        else:
            entries = [entry for entry in root.iterdir() if entry.name not in OWN_TOP_LEVEL | {"var"}]
            var = root / "var"
            if var.is_symlink():  # of the image: it leads to a place inside, not to the machine's
                entries.append(var)
            elif var.is_dir():
                entries += [entry for entry in var.iterdir() if entry.name != "tmp"]
        flags = []
        for entry in sorted(entries):
            inside = "/" + str(entry.relative_to(root))
            if entry.is_symlink():
                flags += ["--symlink", str(entry.readlink()), inside]
            elif entry.is_dir() or entry.is_file():  # no socket, pipe or device
                flags += ["--ro-bind", str(entry), inside]
        return flags


@functools.cache
def _can_forbid_user_namespaces(program: str) -> bool:
    """Since 0.8; in older ones the filter of calls alone refuses them."""
    process = subprocess.run([program, "--help"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "--disable-userns" in process.stdout + process.stderr
