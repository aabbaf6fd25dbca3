"""What a runtime is: a way to start a command isolated from the machine, and to end all of it."""

from __future__ import annotations

import abc
import dataclasses
import functools
import os
import socket
import subprocess
import tempfile
from pathlib import Path

from sandbox import paths, payload, processes, trees
from sandbox.errors import RuntimeUnavailable
from sandbox.runtimes.template import Clone
from sandbox.spec import Limits

PROBE_TIMEOUT_S = 30.0
PROBE_LIMITS = Limits(memory_mb=512, processes=64)
PROCESSORS = Path("/sys/devices/system/cpu")
"""All of /sys that is shown inside, read-only: `lscpu` and PyTorch look at it. No cgroups, no devices."""
KEYS = ("/proc/keys", "/proc/key-users")
"""They list the keys of the user outside, by name."""
PRELOAD = "/etc/ld.so.preload"
"""What it names is loaded into every program, the server included, before that has put up any wall."""
NAMES = {
    "hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
    "resolv.conf": "",
}
"""Files of /etc, and what a sandbox without a network finds in them."""
ID_VARIABLE = "ROLLOUT_SANDBOX_ID"
"""Set in the environment of every process a runtime starts, so that a later host recognises what was left."""

NO_LIMITS = "memory, CPU, process and disk limits"

SCRATCH_MODES = {
    "": 0o700,
    "workspace": 0o755,
    "home": 0o755,
    "private": 0o700,
    "tmp": 0o1777,
    "shm": 0o1777,
    "overlay": 0o755,
    "run": 0o755,
    "etc": 0o755,
}
"""Directories of a sandbox on the machine's disk, and their permissions."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Directories as the sandboxed processes see them.

    Our code is mounted right below the root: no agent can move a mount, or the root, but a directory that
    holds one, and put another in its place.
    """

    private: str = "/run/sbx"
    """The server's configuration and the shell's command file."""
    payload: str = "/sbx"
    """The server's code, read-only."""
    interpreter: str = "/sbx-python"
    """The server's Python, read-only: `usr` of our base image."""
    workspace: str = "/workspace"
    tmp: str = "/tmp"
    home: str = "/home/sandbox"


@dataclasses.dataclass(frozen=True)
class Bind:
    """A directory or file of the machine shown inside. Checked before it gets here (`sandbox/binds.py`)."""

    source: Path
    target: str
    read_only: bool = True
    identity: tuple[int, int] | None = None
    """Device and inode of the source when it was checked: a warm sandbox shows what had that name then, and
    serves nobody once the name is another's. None for places of our own.
    """


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything a runtime needs to start one sandbox; paths are those of the machine."""

    id: str
    state: Path
    """The host's directory, where those that are private to this sandbox lie."""
    payload: Path = Path()
    """The server's code."""
    rootfs: Path | None = None
    """Unpacked image, never written to; None where the runtime does without an image."""
    network: str = "none"
    interpreter: Path | None = None
    """`usr` of the unpacked base image, whose Python runs the server, and whatever has to run outside; None
    where the machine's own `usr` is shown for want of an image.
    """
    binds: tuple[Bind, ...] = ()
    limits: Limits | None = None
    """For a runtime that can have the kernel hold them; the host's watchdog looks after them anyway."""

    @property
    def socket(self) -> Path:
        """Where the server is reached. It lies in no directory that is visible inside."""
        return self.state / self.id / "s"

    @functools.cached_property
    def scratch(self) -> Path:
        """Holds what is private to this sandbox: the directories of `SCRATCH_MODES`."""
        return self.state / "scratch" / self.id

    def make_home_of_template(self, owner: int | None) -> Path:
        """Make a directory for what the runtime itself writes when it starts a template, and return it."""
        home = self.state / "template"
        home.mkdir(exist_ok=True, mode=0o700)
        if owner is not None:
            os.chown(home, owner, owner)
        return home

    def make_directories(self, owner: int | None) -> None:
        """Make the private directories of the sandbox, owned by `owner`."""
        self.scratch.parent.mkdir(exist_ok=True)
        # Its owner passes through; what lies below is closed to all others.
        self.scratch.parent.chmod(0o711)
        self.socket.parent.mkdir()
        self.socket.parent.chmod(0o700)
        for name, mode in SCRATCH_MODES.items():
            path = f"{self.scratch}/{name}"
            os.mkdir(path)  # noqa: PTH102 (with `pathlib` it took twice as long)
            os.chmod(path, mode)  # noqa: PTH101 (whatever the umask)
            if owner is not None and name != "etc":
                os.chown(path, owner, owner)
        for name, text in {**NAMES, "nothing": ""}.items():
            file = os.open(f"{self.scratch}/etc/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
            os.write(file, text.encode())
            os.fchmod(file, 0o644)
            os.close(file)


class Runtime(abc.ABC):
    """One way to isolate processes on this node."""

    name: str
    needs_image = True
    in_memory = False
    """Whether changed system files are kept there, and cannot be copied."""

    def __init__(self) -> None:
        self.run_as: int | None = None
        """uid and gid to start as (we are root then); None = our own."""
        self.missing_isolation: list[str] = []
        """What this runtime does not enforce here, in words."""
        self.has_cgroups = False
        """Whether each sandbox gets a cgroup of its own, so that its limits are hard."""

    @abc.abstractmethod
    def argv(self, launch: Launch, command: list[str]) -> list[str]:
        """The command line that runs `command` in the sandbox, as a direct child of the caller."""

    def program(self) -> str | None:
        """Path of the runtime's program; None where it has none, or it is not installed."""
        return None

    @abc.abstractmethod
    def check_installed(self) -> None:
        """Raise RuntimeUnavailable, naming the remedy, when the program is not on this machine."""

    def places(self, launch: Launch) -> Places:
        """Where things are, seen from inside."""
        return Places()

    def all_binds(self, launch: Launch) -> list[Bind]:
        """What of the machine is mounted inside besides the image, in that order.

        What a request has bound covers the sandbox's own places; our code comes after it. No target comes
        twice: Apptainer mounts the first of two, bubblewrap both.
        """
        places, scratch = self.places(launch), launch.scratch
        own = [
            Bind(scratch / "tmp", places.tmp, read_only=False),
            Bind(scratch / "tmp", "/var/tmp", read_only=False),
            Bind(scratch / "shm", "/dev/shm", read_only=False),
            Bind(scratch / "workspace", places.workspace, read_only=False),
            Bind(scratch / "home", places.home, read_only=False),
            *self.own_names(launch),
        ]
        code = [
            Bind(scratch / "private", places.private, read_only=False),
            Bind(launch.payload, places.payload),
        ]
        if launch.interpreter is not None:
            code.append(Bind(launch.interpreter, places.interpreter))
        if PROCESSORS.is_dir():
            own.append(Bind(PROCESSORS, str(PROCESSORS)))
        hidden = [name for name in KEYS if os.path.exists(name)]  # noqa: PTH110
        # Of the image, or of an agent whose sandbox this one begins with.
        layers = (launch.rootfs, scratch / "overlay" / "upper") if launch.rootfs is not None else ()
        if any(os.path.lexists(f"{layer}{PRELOAD}") for layer in layers):
            hidden.append(PRELOAD)
        code += [Bind(scratch / "etc" / "nothing", name) for name in hidden]
        targets = {bind.target for bind in launch.binds}
        return [*(bind for bind in own if bind.target not in targets), *launch.binds, *code]

    def own_names(self, launch: Launch) -> list[Bind]:
        """Without a network nothing is told of the machine's: files of our own in the place of these."""
        names = NAMES if launch.network == "none" else ()
        return [Bind(launch.scratch / "etc" / name, f"/etc/{name}") for name in names]

    def environment(self, launch: Launch) -> dict[str, str]:
        """Environment of the runtime's own process: nothing of ours gets in but PATH."""
        return {
            "PATH": paths.tool_path(),
            "LANG": "C.UTF-8",
            "HOME": str(launch.scratch),
            ID_VARIABLE: launch.id,
        }

    def python(self, launch: Launch) -> list[str]:
        """Command line of the interpreter that runs the server inside.

        With an interpreter of our own nothing of the image is used, not even its C library: the loader is
        called by name. So the image may bring any Python or none.
        """
        if launch.interpreter is None:
            return ["python3"]
        inside = self.places(launch).interpreter
        return [*payload.loader(launch.interpreter, inside), f"{inside}/bin/python3"]

    def start(
        self, launch: Launch, command: list[str], config: bytes
    ) -> tuple[subprocess.Popen | Clone, socket.socket]:
        """Start a sandbox as a child, in a session of its own; returns it and a socket to its input.

        `config`: for the server, which finds it where `command` says. Blocks; called in a thread.

        Raises OSError, SandboxStartError.
        """
        path = launch.scratch / "private" / "config"
        path.write_bytes(config)
        if self.run_as is not None:
            os.chown(path, self.run_as, self.run_as, follow_symlinks=False)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                self.argv(launch, command),
                env=self.environment(launch),
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                start_new_session=True,
                **self.as_user(),
            )
        return process, ours

    def tidy(self) -> None:  # noqa: B027 (most start nothing but sandboxes)
        """Wait for what has ended of all that the runtime keeps ready."""

    def close(self) -> None:  # noqa: B027 (most keep nothing)
        """Let go of what the runtime keeps ready to start sandboxes; those that run are not touched."""

    def victims(self, pid: int) -> list[int]:
        """Processes to SIGKILL so that all of the sandbox ends and `pid` exits by itself.

        That is the init of the sandbox's PID namespace: the kernel ends the rest with it, and the runtime
        outside cleans up its mounts (killed first, it would leave them behind). Empty = nothing but `pid` is
        there.
        """
        if processes.is_init(pid):
            return [pid]
        own = processes.pid_namespace(os.getpid())
        below = processes.children(pid)
        return [child for child in below if processes.pid_namespace(child) != own] or below

    def strays(self, sandbox_id: str) -> list[int]:
        """Processes of that sandbox that still run although its first process is gone."""
        return processes.with_variable(ID_VARIABLE, sandbox_id)

    def probe(self, rootfs: Path | None, within: Path | None = None) -> None:
        """Really run `true` in a sandbox whose scratch lies below `within`, for file systems differ.

        `rootfs`: the base image, whose Python serves outside as well, so never a task's. Raises
        RuntimeUnavailable with what the runtime said.
        """
        self.check_installed()
        base = Path(tempfile.mkdtemp(prefix="probe-", dir=within))
        try:
            base.chmod(0o711)
            (base / "payload").mkdir()
            interpreter = payload.find_interpreter(rootfs) if rootfs else None
            launch = Launch(
                "probe", base, base / "payload", rootfs, interpreter=interpreter, limits=PROBE_LIMITS
            )
            launch.make_directories(self.run_as)
            process = subprocess.run(
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
        finally:
            trees.remove(base)
        if process.returncode != 0:
            words = process.stderr.decode(errors="replace").strip()[-1000:]
            raise RuntimeUnavailable(
                f"{self.name} does not work on this node (exit code {process.returncode}): {words}"
            )

    def as_user(self) -> dict:
        """Arguments of `subprocess` that start the runtime as `run_as`."""
        if self.run_as is None:
            return {}
        return {"user": self.run_as, "group": self.run_as, "extra_groups": []}
