"""Apptainer (or Singularity), rootless: a user namespace, the image under an overlay with a private upper
layer.
"""

from __future__ import annotations

import functools
import logging
import marshal
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from sandbox import paths, payload, trees
from sandbox.errors import RuntimeUnavailable, SandboxStartError
from sandbox.runtimes.base import PROCESSORS, Bind, Launch, Places, Runtime
from sandbox.runtimes.template import Clone, NotMounted, Template, reap_again
from sandbox.server import writable_root

log = logging.getLogger(__name__)

SWITCHES = "/proc/sys"
OURS, THEIRS, MEMORY = "an overlay with userxattr", "Apptainer's own overlay", "a tmpfs"
"""What keeps the changes to an image; directories of it can only be removed under ours."""
MOST_FAILURES, PAUSE_S = 3, 60.0
"""Of clones in a row: after so many none is tried for a while, and sandboxes start without."""


class Apptainer(Runtime):
    """Full isolation: files, processes, IPC, network, environment, no capabilities."""

    name = "apptainer"

    def __init__(self) -> None:
        super().__init__()
        self._upper = OURS
        self._template: Template | None = None
        self._zombies: set[int] = set()
        self._failures, self._not_before = 0, 0.0
        self._starting = threading.Lock()

    def program(self) -> str | None:
        """`ROLLOUT_APPTAINER`, else the one on PATH, else the one our set-up installed."""
        named = os.environ.get("ROLLOUT_APPTAINER")
        if named:
            return shutil.which(named)
        path = paths.tool_path()
        return shutil.which("apptainer", path=path) or shutil.which("singularity", path=path)

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
        binds = self.all_binds(launch)
        behind = [] if self._upper != OURS else [*_writable_root(launch), *self._mount(launch, binds), "--"]
        return [*behind, *self._exec(launch, binds, command)]

    def start(
        self, launch: Launch, command: list[str], config: bytes
    ) -> tuple[subprocess.Popen | Clone, socket.socket]:
        """A clone of the template where that can be: what is shown in it lies in what the template shows."""
        if self._upper != OURS:
            self._refuse_links(launch)
        elif template := self._template_of(launch):
            layers = [launch.scratch / "overlay" / name for name in ("upper", "work")]
            to_make = [layer for layer in layers if not layer.exists()]  # else it is a snapshot's
            try:
                started = template.clone(self._request(launch, config))
                self._failures = 0
                return started
            except SandboxStartError as error:
                log.warning("sandbox %s is started without a template: %s", launch.id, error)
                for layer in to_make:
                    trees.remove(layer)
                self._failures += not isinstance(error, NotMounted)  # which is one tenant's affair
                if self._failures >= MOST_FAILURES:
                    self._not_before, self._failures = time.monotonic() + PAUSE_S, 0
        return super().start(launch, command, config)

    def _template_of(self, launch: Launch) -> Template | None:
        """The node's one template, if it can serve this sandbox: of an image in the cache, without binds."""
        cache, interpreter = paths.image_cache(), launch.interpreter
        if self.has_cgroups or launch.network != "none" or launch.binds or interpreter is None:
            return None
        if any(place.parent != cache for place in (launch.rootfs, interpreter.parent)):
            return None
        with self._starting:
            if time.monotonic() < self._not_before:
                return None
            if self._template is None or not self._template.is_current():
                self.close()
                shown, user = (launch.state, cache), self.as_user()
                if not all(map(self._can_show, shown)):
                    return None
                home = launch.make_home_of_template(self.run_as)
                environment, command = _environment(home), self._exec_template(home, interpreter, shown)
                self._template = Template(command, environment, shown, launch.payload, interpreter, **user)
            return self._template

    def _can_show(self, path: Path) -> bool:
        closed = not os.access(path, os.X_OK) if self.run_as is None else paths.closed_to_others(path)
        return not closed and not set(":,") & set(str(path))

    def _request(self, launch: Launch, config: bytes) -> bytes:
        binds = self.all_binds(launch)
        lower, overlay, *points = self._mount(launch, binds)
        shown = [(str(bind.source), bind.target, bind.read_only) for bind in binds]
        if self._owns_switches:
            shown.append((SWITCHES, SWITCHES, True))
        request = {"lower": lower, "overlay": overlay, "points": [*points, "/dev"], "binds": shown}
        return marshal.dumps({**request, "config": config}, 2)  # every Python reads that version

    @property
    def _owns_switches(self) -> bool:
        """Uid 0 owns the kernel's switches although it has no capabilities; see paths.sandbox_user."""
        return self.run_as is None and os.geteuid() == 0

    def _exec_template(self, home: Path, interpreter: Path, shown: Sequence[Path]) -> list[str]:
        """`apptainer exec` of a shell, in no namespace in which clones would end with it. The root is empty
        but for what is shown: an image's scripts for the environment, and an overlay, would make it longer.
        """
        binds = [Bind(path, str(path), read_only=False) for path in shown]
        if PROCESSORS.is_dir():
            binds.append(Bind(PROCESSORS, str(PROCESSORS)))
        root = _directory(home / "root")
        for place in ("/dev", "/proc", *(bind.target for bind in binds)):
            functools.reduce(lambda above, name: _directory(above / name), Path(place).parts[1:], root)
        flags = ["--userns", "--contain", "--no-init", "--no-home", "--cleanenv", "--no-privs"]
        flags += ["--no-mount", "sys,bind-paths,tmp", "--pwd", "/", "--writable", *_binds(binds)]
        shell = [*payload.loader(interpreter, str(interpreter)), f"{interpreter}/bin/sh"]
        return [str(self.program()), "-s", "exec", *flags, str(root), *shell, "-c"]

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

    def tidy(self) -> None:
        """Wait for a template that has ended, and for clones that nobody else waits for."""
        if self._template is not None:
            self._template.tidy()
        self._zombies = reap_again(self._zombies)

    def close(self) -> None:
        """End the template."""
        if self._template is not None:
            self._template.close()
            self._template = None

    @staticmethod
    def _mount(launch: Launch, binds: list[Bind]) -> list[str]:
        """What `writable_root.py` mounts: the image, the overlay, and places to mount on."""
        points = [
            f"{'' if bind.source.is_dir() else '='}{bind.target}"
            for bind in binds
            if not bind.target.startswith("/proc/")
        ]
        return [str(launch.rootfs), str(launch.scratch / "overlay"), *points, "/proc"]

    def _exec(self, launch: Launch, binds: list[Bind], command: list[str]) -> list[str]:
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
        if self._owns_switches:
            flags += ["--bind", f"{SWITCHES}:{SWITCHES}:ro"]
        if self.has_cgroups and launch.limits is not None:
            flags += ["--memory", f"{launch.limits.memory_mb}M"]
            flags += ["--pids-limit", str(launch.limits.processes)]
        flags += _binds(binds)
        return [str(self.program()), "-q", "exec", *flags, "--pwd", places.workspace, str(rootfs), *command]

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
        """With a home of Apptainer's own."""
        return super().environment(launch) | _environment(launch.scratch)


def _binds(binds: Iterable[Bind]) -> list[str]:
    """The same as flags."""
    ways = ((bind, "ro" if bind.read_only else "rw") for bind in binds)
    return [flag for bind, way in ways for flag in ("--bind", f"{bind.source}:{bind.target}:{way}")]


def _directory(path: Path) -> Path:
    """Make it if absent, open to others whatever the umask."""
    path.mkdir(exist_ok=True)
    path.chmod(0o755)
    return path


def _environment(home: Path) -> dict[str, str]:
    """Keeps Apptainer's own files out of the user's home, which nodes of a cluster share. Apptainer lives for
    a moment, so it need not collect garbage: that takes a tenth of a start.
    """
    names = (
        "HOME",
        "APPTAINER_CONFIGDIR",
        "APPTAINER_CACHEDIR",
        "SINGULARITY_CONFIGDIR",
        "SINGULARITY_CACHEDIR",
    )
    return {"PATH": paths.tool_path(), "LANG": "C.UTF-8", "GOGC": "off"} | dict.fromkeys(names, str(home))


@functools.cache
def _text_of_writable_root() -> str:
    return Path(writable_root.__file__).read_text()


def _writable_root(launch: Launch) -> list[str]:
    """The command of `writable_root.py`. By its text, and with the base image's Python, for the sandboxes'
    user may be unable to read ours. It runs outside, so it is never a task image's.
    """
    own = launch.interpreter
    python = [str(Path(sys.executable).resolve())]
    if own is not None:
        python = [*payload.loader(own, str(own)), f"{own}/bin/python3"]
    return [*python, "-IS", "-c", _text_of_writable_root()]
