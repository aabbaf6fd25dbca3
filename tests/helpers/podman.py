"""Podman with images, containers, networks and volumes of its own, all below one directory; no registry."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from tests.helpers.stack import ROOT

PROGRAMS = {
    "podman": "podman",
    "podman-compose": "podman-compose",
    "runc": "runc",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "/usr/libexec/podman/catatonit": "catatonit",
}
"""The Debian package of each."""
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
FIXED = [Path(path) for path in ("/run/netns", "/run/runc", "/run/containers", "/var/lib/containers")]
"""Directories that Podman makes and keeps whatever its configuration says; the first becomes a mount."""
CGROUPS = Path("/sys/fs/cgroup")
STEP_S = 540.0
"""For one command: the build of an image takes 100 s on two processors."""
CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{directory}/tmp"
image_copy_tmp_dir = "{directory}"
[network]
network_config_dir = "{directory}/networks"
"""
STORAGE_CONF = """\
[storage]
driver = "{driver}"
graphroot = "{directory}/graph"
runroot = "{directory}/run"
"""


class PodmanError(Exception):
    """A command failed, or cannot be run here; the message says why."""


class Podman:
    """The directory and the commands; `end` leaves nothing of it.

    Raises:
        PodmanError: A package is missing, or this is not root; the message says what to do.
    """

    def __init__(self) -> None:
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # which users without root lack
        missing = [
            package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None
        ]
        if missing:
            sudo = "" if os.geteuid() == 0 else "sudo "
            raise PodmanError(f"install what is missing: {sudo}apt-get install {' '.join(missing)}")
        if os.geteuid() != 0:
            raise PodmanError(
                "this makes networks of the machine and cleans its firewall as root: sudo make compose-test"
            )
        self.directory = Path(tempfile.mkdtemp(prefix="podman-", dir="/tmp"))
        driver = "overlay" if "\toverlay\n" in Path("/proc/filesystems").read_text() else "vfs"
        files = {"CONTAINERS_CONF": CONTAINERS_CONF, "CONTAINERS_STORAGE_CONF": STORAGE_CONF}
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLOUT_", "FLOWER_"))}
        for variable, text in files.items():
            file = self.directory / f"{variable.lower()}.toml"
            file.write_text(text.format(directory=self.directory, driver=driver))
            self.env[variable] = str(file)
        self._forwarding = FORWARDING.read_text()
        self._rules = _rules()
        self._before = _traces()

    def __call__(self, *args: object, timeout_s: float = STEP_S) -> str:
        """What `podman` prints."""
        return self.run("podman", *args, timeout_s=timeout_s)

    def run(self, *command: object, timeout_s: float = STEP_S) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(
            words, cwd=ROOT, env=self.env, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
        if done.returncode:
            tail = (done.stdout + done.stderr)[-3000:]
            raise PodmanError(f"{' '.join(words[:4])} … ended with {done.returncode}:\n{tail}")
        return done.stdout.strip()

    def make_base(self, name: str, packages: str, *hooks: str) -> None:
        """An image of Debian, under the name that a file asks for."""
        print(f"making {name}", flush=True)
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}"]
        command += ["--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/locale/*"]
        command += [f"--customize-hook={hook}" for hook in hooks]
        archive = self.directory / "base.tar"
        self.run(*command, "bookworm", archive)
        self("import", archive, name)
        archive.unlink()

    def build(self, name: str, dockerfile: Path, context: Path) -> None:
        """An image, with what this machine's apt and pip are told; none of it stays in the image."""
        print(f"building {name}", flush=True)
        mounts = [word for mount in self._machine() for word in ("--volume", mount)]
        ignored = f"{dockerfile}.dockerignore"
        self(
            "build",
            "--network=host",
            *mounts,
            f"--ignorefile={ignored}",
            "-t",
            name,
            "-f",
            dockerfile,
            context,
        )

    def _machine(self) -> list[str]:
        apt, pip = self.directory / "apt.conf", self.directory / "pip.conf"
        apt.write_text(self.run("apt-config", "dump", "Acquire") + "\n")
        options: dict[str, str] = {}
        # Of the environment first: it wins over files.
        listed = self.run(sys.executable, "-m", "pip", "config", "list")
        for option, value in re.findall(r"^(?::env:|global)\.([\w-]+)='(.*)'$", listed, re.MULTILINE):
            options.setdefault(option, value.replace("\\n", " "))
        pip.write_text("".join(["[global]\n", *(f"{key} = {value}\n" for key, value in options.items())]))
        words = [word.removeprefix("file://") for value in options.values() for word in value.split()]
        places = {Path(word) for word in words if word.startswith("/")} | {Path("/etc/ssl/certs")}
        # The files of an index lie beside it.
        places = {place.parent if place.name == "simple" else place for place in places}
        shown = [f"{place}:{place}:ro" for place in sorted(places) if place.is_dir()]
        return [f"{apt}:/etc/apt/apt.conf.d/99machine:ro", f"{pip}:/etc/pip.conf:ro", *shown]

    def processes(self) -> list[str]:
        """Command lines that name the directory: monitors of containers, the name server."""
        lines = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
        return [line for line in lines if str(self.directory) in line]

    def left(self) -> set[Path]:
        """What Podman made outside its directory: mounts, directories, control groups."""
        return _traces() - self._before

    def end(self) -> None:
        """End and remove everything, also what Podman leaves: firewall rules, forwarding, directories."""
        with contextlib.suppress(PodmanError):
            self("system", "reset", "--force")
        shutil.rmtree(self.directory)
        if "NETAVARK" not in self._rules:
            kept = [line for line in _rules().splitlines() if "NETAVARK" not in line]
            subprocess.run(["iptables-restore"], input="\n".join([*kept, ""]), text=True, check=True)
            FORWARDING.write_text(self._forwarding)
        for path in sorted(self.left(), reverse=True):
            if f" {path} " in Path("/proc/self/mounts").read_text():
                subprocess.run(["umount", path], check=True)
            if CGROUPS in path.parents:
                path.rmdir()
            else:
                shutil.rmtree(path)


def _traces() -> set[Path]:
    # Not `rglob`, which a group that ends meanwhile would stop.
    groups = [Path(place) for place, *_ in os.walk(CGROUPS) if "libpod_parent" in Path(place).parts]
    return {path for path in (*FIXED, *groups) if path.is_dir()}


def _rules() -> str:
    return subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
