"""What a runtime is: a way to start a command isolated from the machine, and to end all of it."""

from __future__ import annotations

import abc
import dataclasses
import os
import subprocess
import tempfile
from pathlib import Path

from sandbox import paths, processes
from sandbox.errors import RuntimeUnavailable

PROBE_TIMEOUT_S = 30.0
ID_VARIABLE = "ROLLOUT_SANDBOX_ID"
"""Set in the environment of every process a runtime starts, so that a later host recognises what was left."""

NO_LIMITS = "memory, CPU, process and disk limits"


@dataclasses.dataclass(frozen=True)
class Places:
    """Directories as the sandboxed processes see them."""

    sockets: str = "/run/sbx"
    """Private: the server's socket, its configuration, the shell's command file."""
    payload: str = "/opt/sbx"
    """The server's code, read-only."""
    workspace: str = "/workspace"
    tmp: str = "/tmp"
    home: str = "/home/sandbox"


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything a runtime needs to start one sandbox; paths are those of the machine."""

    id: str
    rootfs: Path | None
    """Unpacked image, never written to; None where the runtime does without an image."""
    network: str
    sockets: Path
    payload: Path
    scratch: Path
    """Holds `workspace`, `tmp` and `home`, private to this sandbox."""


class Runtime(abc.ABC):
    """One way to isolate processes on this node."""

    name: str
    needs_image = True

    def __init__(self) -> None:
        self.run_as: int | None = None
        """uid and gid to start as (we are root then); None = our own."""
        self.missing_isolation: list[str] = []
        """What this runtime does not enforce here, in words."""

    @abc.abstractmethod
    def argv(self, launch: Launch, command: list[str]) -> list[str]:
        """The command line that runs `command` in the sandbox, as a direct child of the caller."""

    @abc.abstractmethod
    def check_installed(self) -> None:
        """Raise RuntimeUnavailable, naming the remedy, when the program is not on this machine."""

    def places(self, launch: Launch) -> Places:
        """Where things are, seen from inside."""
        return Places()

    def environment(self, launch: Launch) -> dict[str, str]:
        """Environment of the runtime's own process: nothing of ours gets in but PATH."""
        return {
            "PATH": paths.tool_path(),
            "LANG": "C.UTF-8",
            "HOME": str(launch.scratch),
            ID_VARIABLE: launch.id,
        }

    def python(self) -> str:
        """The interpreter that runs the server inside."""
        return "python3"

    def victims(self, pid: int) -> list[int]:
        """Processes to SIGKILL so that all of the sandbox ends and `pid` exits by itself.

        That is the init of the sandbox's PID namespace: the kernel ends the rest with it, and the runtime
        outside cleans up its mounts (killed first, it would leave them behind). Empty = nothing but `pid` is
        there.
        """
        own = processes.pid_namespace(os.getpid())
        below = processes.children(pid)
        return [child for child in below if processes.pid_namespace(child) != own] or below

    def strays(self, sandbox_id: str) -> list[int]:
        """Processes of that sandbox that still run although its first process is gone."""
        return processes.with_variable(ID_VARIABLE, sandbox_id)

    def probe(self, rootfs: Path | None) -> None:
        """Really run `true` in a sandbox. Raises RuntimeUnavailable with what the runtime said."""
        self.check_installed()
        with tempfile.TemporaryDirectory(prefix="sbx-probe-", ignore_cleanup_errors=True) as directory:
            launch = make_directories(Path(directory), "probe", rootfs, "none", self.run_as)
            try:
                done = subprocess.run(
                    self.argv(launch, ["true"]),
                    env=self.environment(launch),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=PROBE_TIMEOUT_S,
                    cwd="/",
                    **self.as_user(),
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise RuntimeUnavailable(f"{self.name} does not work on this node: {error}") from error
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-1000:]
            raise RuntimeUnavailable(
                f"{self.name} does not work on this node (exit code {done.returncode}): {said}"
            )

    def as_user(self) -> dict:
        """Arguments of `subprocess` that start the runtime as `run_as`."""
        if self.run_as is None:
            return {}
        return {"user": self.run_as, "group": self.run_as, "extra_groups": []}


def make_directories(
    base: Path, sandbox_id: str, rootfs: Path | None, network: str, owner: int | None
) -> Launch:
    """Make the private directories of one sandbox below `base`, owned by `owner`, and describe them."""
    base.chmod(0o700 if owner is None else 0o711)
    sockets, scratch, payload = base / sandbox_id, base / "scratch" / sandbox_id, base / "payload"
    payload.mkdir(exist_ok=True)
    scratch.parent.mkdir(exist_ok=True)
    modes = {sockets: 0o700, scratch: 0o700}
    modes |= {scratch / "workspace": 0o755, scratch / "home": 0o755, scratch / "tmp": 0o1777}
    for path, mode in modes.items():
        path.mkdir()
        path.chmod(mode)  # whatever the umask
        if owner is not None:
            os.chown(path, owner, owner)
    return Launch(sandbox_id, rootfs, network, sockets, payload, scratch)
