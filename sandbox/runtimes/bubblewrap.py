"""bubblewrap: nearly Apptainer's isolation, without its writable system directories."""

from __future__ import annotations

import shutil
from pathlib import Path

from sandbox import paths
from sandbox.errors import RuntimeUnavailable
from sandbox.runtimes.base import Launch, Places, Runtime

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
        flags = ["--unshare-user", "--unshare-all", "--new-session", "--as-pid-1"]
        flags += ["--cap-drop", "ALL", "--clearenv"]
        if launch.network == "host":
            flags.append("--share-net")
        flags += ["--tmpfs", "/", *self._root(launch.rootfs)]
        flags += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run"]
        for bind in self.all_binds(launch):
            flags += ["--ro-bind" if bind.read_only else "--bind", str(bind.source), bind.target]
        if launch.network == "host":
            flags += (
                ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"] if launch.rootfs is None else []
            )
        flags += ["--setenv", "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        flags += ["--chdir", places.workspace]
        return [str(self.program()), *flags, "--", *command]

    def places(self, launch: Launch) -> Places:
        """The image's /opt is bound read-only, so nothing can be mounted below it: our code goes
        elsewhere.
        """
        return Places(payload="/run/sbx-server", interpreter="/run/sbx-python")

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
