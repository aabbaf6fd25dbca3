"""One container: how it is booted, and how all of it is ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import marshal
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from sandbox import connection, memory, payload, processes
from sandbox.connection import Address, new_key
from sandbox.errors import SandboxRequestError, SandboxStartError
from sandbox.images.environment import docker_environment
from sandbox.records import Record
from sandbox.runtimes import RUNTIMES, Launch, Runtime
from sandbox.runtimes.template import Clone
from sandbox.spec import Limits, SandboxInfo, SandboxSpec

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
KILL_ROUND_S = 0.05
KILL_ROUNDS = 100
STDERR_TAIL_CHARS = 2000
REST_TIMEOUT_S = 0.5
OPEN_FILES = 4096  # of one process: the watchdog looks at each descriptor, and must not have millions to see
NICENESS = 10  # the agent's processes yield to the server, the workers and the host

# Of the shell inside. Nothing may wait at a pager, an editor or a password prompt.
SHELL_ENV = {
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
UTF8_LOCALES = ("C.utf8", "C.UTF-8")


@dataclasses.dataclass
class Container:
    """One sandbox as the host knows it."""

    id: str
    runtime: Runtime
    spec: SandboxSpec
    launch: Launch
    limits: Limits
    key: str = dataclasses.field(default_factory=new_key)
    """Without it the server answers nobody."""
    pid: int | None = None
    """The runtime's first process; a child of ours unless adopted."""
    process: subprocess.Popen | Clone | None = None
    """None before the boot and for one that was adopted."""
    start_time: int | None = None
    protected: list[int] = dataclasses.field(default_factory=list)
    """Processes of the runtime and the server, which the watchdog must not end."""
    file_system: int | None = None
    """A directory in what the runtime keeps in memory for it, open so that its use can be seen."""
    exited: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    deadline: float | None = None
    """Seconds of CLOCK_BOOTTIME at which the host ends it; None = not claimed yet."""
    info: SandboxInfo | None = None
    """Set when it was handed to somebody."""
    ready: bool = False
    ending: asyncio.Task | None = None
    tail: _Tail | None = None
    """The end of what the runtime and the server say on standard error; None for one that was adopted."""
    _starting: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Held while its first process is being started, which cannot be ended before it is known."""
    leases: list[Any] = dataclasses.field(default_factory=list)
    """Keep its images from being evicted."""

    @property
    def address(self) -> Address:
        """Of its server."""
        return Address(str(self.launch.socket), self.key)

    # -- boot ----------------------------------------------

    async def boot(self, on_start: Any, on_pid: Any) -> None:
        """Start it and wait until its shell is ready. `on_start(self)` is called before, in a thread,
        `on_pid(self)` as soon as there is a pid.

        Raises SandboxStartError with what the runtime said, and what `on_start` raises.
        """
        places = self.runtime.places(self.launch)
        command = [
            *self.runtime.python(self.launch),
            *("-BES", f"{places.payload}/start.py", f"{places.private}/config"),
        ]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.launch.socket))
            listener.listen(64)
            try:
                async with self._starting:
                    if self.ending is not None:
                        raise SandboxStartError("it was released before")
                    stdin = await connection.in_thread(self._start, on_start, command)
            except (OSError, SandboxStartError) as error:
                raise SandboxStartError(f"cannot start {self.runtime.name}: {error}") from error
            with stdin:
                self.start_time = processes.start_time(self.pid)
                on_pid(self)  # before it goes on, so that a host that ends here leaves nothing unknown
                # Sent and not inherited: the runtime's own processes inside keep what they inherit, and an
                # agent could take it from them.
                # The key with it: what a file says, or a descriptor that stays, an agent could read later.
                with contextlib.suppress(ConnectionError):  # it has ended, and its words say why
                    socket.send_fds(stdin, [self.key.encode()], [listener.fileno()])
        _, self.tail = await asyncio.get_running_loop().connect_read_pipe(_Tail, self.process.stderr)
        with self.process.stdout as stdout:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    signal_of_life = await _first_bytes(stdout.fileno())
                problem = None if signal_of_life else "ended before it was ready"
            except TimeoutError:
                problem = f"was not ready after {START_TIMEOUT_S:g} s"
        if problem:
            words = await self.tail.rest()
            image = f" with image {self.spec.image!r}" if self.runtime.needs_image else ""
            raise SandboxStartError(
                f"sandbox on {self.runtime.name}{image} {problem}; it said: {words or '(nothing)'}"
            )
        # Nothing of the agent's runs yet: all but the last, the shell, is the runtime and the server. But the
        # bash of a snapshot may be the agent's, and have begun others: what is above it is not theirs.
        *own, shell = processes.descendants(self.pid) or [self.pid]  # it may have ended again
        if self.spec.snapshot:
            told = await connection.exchange(self.address, {"op": "ping"}, START_TIMEOUT_S)
            own, shell = processes.above(self.pid, told["shell_pid"])
        self.protected = [self.pid, *own]
        self.see_memory(shell)
        self.ready = True

    def _start(self, on_start: Any, command: list[str]) -> socket.socket:
        """Known as soon as it runs, for whoever waits for that may have given up. A socket to its input."""
        on_start(self)
        self.process, stdin = self.runtime.start(self.launch, command, self._config())
        self.pid = self.process.pid
        return stdin

    def see_memory(self, pid: int) -> None:
        """Have the watchdog see what is kept in memory as files, if `pid` is inside and open to us."""
        if processes.pid_namespace(pid) not in (None, processes.pid_namespace(os.getpid())):
            self.file_system = memory.open_file_system(pid)

    def close(self) -> None:
        """Let go of what is open of it outside, once it has ended."""
        if self.tail is not None:
            self.tail.close()
        if self.file_system is not None:
            os.close(self.file_system)
            self.file_system = None

    def _config(self) -> bytes:
        """What `server/start.py` is told."""
        places, launch = self.runtime.places(self.launch), self.launch
        config = {
            "directory": places.private,
            "workspace": places.workspace,
            "env": self._shell_env() | {"HOME": places.home, "TMPDIR": places.tmp},
            "limits": self._process_limits(),
            "python": self.runtime.python(launch),
            "bash": None,
            "walls": self.runtime.name != "local-unsafe",
            "binds": [(bind.target, *bind.identity) for bind in launch.binds if bind.identity],
        }
        if launch.interpreter is not None:
            config["bash"] = [
                *payload.loader(launch.interpreter, places.interpreter),
                f"{places.interpreter}/bin/bash",
            ]
        return marshal.dumps(config, 2)  # every Python reads that version

    def _shell_env(self) -> dict[str, str]:
        """What the image declares, below what a shell needs that nobody watches. A UTF-8 locale only where
        the image has one: each program would complain of it else.
        """
        root = self.launch.rootfs
        declared = docker_environment(root) if root is not None else {}
        environment = declared | SHELL_ENV | {"PATH": declared.get("PATH") or SHELL_ENV["PATH"]}
        for name in UTF8_LOCALES:
            if ((root or Path("/")) / "usr/lib/locale" / name).exists():
                return environment | {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
        return environment

    def _process_limits(self) -> dict[str, int]:
        if self.runtime.name == "local-unsafe":  # it would count all processes of the user
            return {}
        return {
            "memory_bytes": self.limits.memory_mb << 20,
            "file_bytes": self.limits.disk_mb << 20,
            "processes": self.limits.processes,
            "open_files": OPEN_FILES,
            "nice": NICENESS,
        }

    def put_files(self, files: dict[str, str]) -> None:
        """Write files into the workspace; only before anything of the agent's has run. Raises
        SandboxRequestError for a path outside.
        """
        workspace = (self.launch.scratch / "workspace").resolve()
        for name, text in files.items():
            target = (workspace / name).resolve()
            if not target.is_relative_to(workspace) or target == workspace:
                raise SandboxRequestError(f"file {name!r} lies outside the workspace")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            while target != workspace:
                self._give(target)
                target = target.parent

    def _give(self, path: Path) -> None:
        if self.runtime.run_as is not None:
            os.chown(path, self.runtime.run_as, self.runtime.run_as, follow_symlinks=False)

    # -- end ----------------------------------------------

    def is_over(self) -> bool:
        """Whether its first process is gone; also reaps it, if it is ours."""
        if not self.exited.is_set() and self.pid is not None:
            if self.process:
                over = self.process.poll() is not None
            else:  # an adopted one is no child of ours
                over = not processes.is_alive(self.pid, self.start_time)
            if over:
                self.exited.set()
        return self.exited.is_set()

    async def kill(self) -> None:
        """End every process of it; returns when they are gone."""
        async with self._starting:
            if self.pid is None:
                return
        ended_by_us = False
        for number in range(2 * KILL_ROUNDS):
            if self.is_over():
                break
            victims = self.runtime.victims(self.pid)
            ended_by_us = ended_by_us or bool(victims)
            if (not victims and number >= 10) or number >= KILL_ROUNDS:
                victims = [*victims, self.pid]
            processes.send(victims, signal.SIGKILL)
            try:
                await asyncio.wait_for(self.exited.wait(), KILL_ROUND_S)
            except TimeoutError:
                continue
        else:
            log.error("process %d of sandbox %s on %s does not die", self.pid, self.id, self.runtime.name)
        if not ended_by_us or self.runtime.name == "local-unsafe":  # no namespace, so no init to end it all
            await self._end_strays()

    async def _end_strays(self) -> None:
        """End what runs on although the first process ended by itself.

        bwrap's is gone as soon as the server is; its init inside then waits for what the agent left behind.
        """
        for _ in range(KILL_ROUNDS):
            strays = await asyncio.to_thread(self.runtime.strays, self.id)
            if not strays:
                return
            processes.send(strays, signal.SIGKILL)
            await asyncio.sleep(KILL_ROUND_S)
        log.error("processes %s of sandbox %s on %s do not die", strays, self.id, self.runtime.name)

    # -- across hosts ----------------------------------------------

    @classmethod
    def revive(cls, record: Record, state: Path, code: Path, interpreter: Path | None) -> Container:
        """The container of a record that may be adopted. Its first process is no child of ours."""
        rootfs = Path(record.rootfs) if record.rootfs else None
        launch = Launch(record.id, state, code, rootfs, record.spec.network, interpreter)
        return cls(
            record.id,
            runtime_of(record),
            record.spec,
            launch,
            record.limits,
            key=Address.parse(record.info.socket).key or "",
            pid=record.pid,
            start_time=record.start_time,
            protected=record.protected,
            deadline=record.deadline,
            info=record.info,
            ready=True,
        )

    def record(self, boot: str) -> Record:
        """What the next host needs to know."""
        return Record(
            id=self.id,
            runtime=self.runtime.name,
            run_as=self.runtime.run_as,
            boot_id=boot,
            pid=self.pid,
            start_time=self.start_time,
            protected=self.protected,
            spec=self.spec,
            limits=self.limits,
            rootfs=str(self.launch.rootfs) if self.launch.rootfs else None,
            deadline=self.deadline,
            info=self.info,
        )


def runtime_of(record: Record) -> Runtime:
    """The runtime that started it, or the likeliest where the record does not say."""
    runtime = RUNTIMES.get(record.runtime, RUNTIMES["apptainer"])()
    runtime.run_as = record.run_as
    return runtime


async def end_strays(record: Record) -> int:
    """End what a record names and all that carries its id, for it may name nothing. Returns how many."""
    runtime = runtime_of(record)
    pids = [record.pid] if record.is_running() and record.pid is not None else []
    pids = list(dict.fromkeys(pids + runtime.strays(record.id)))
    for pid in pids:
        launch = Launch(record.id, Path())
        stray = Container(record.id, runtime, SandboxSpec(), launch, Limits(), pid=pid)
        stray.start_time = processes.start_time(pid)
        await stray.kill()
    return len(pids)


class _Tail(asyncio.Protocol):
    """Keeps the last of what comes through a pipe.

    A pipe and not a file, which an agent could fill: the runtime's init inside has it open.
    """

    def __init__(self) -> None:
        self._kept = b""
        self._ended = asyncio.Event()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._kept = (self._kept + data)[-4 * STDERR_TAIL_CHARS :]

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set()

    def close(self) -> None:
        """Stop reading."""
        if self._transport is not None:
            self._transport.close()

    def text(self) -> str:
        """What was said last."""
        return self._kept.decode(errors="replace")[-STDERR_TAIL_CHARS:].strip()

    async def rest(self) -> str:
        """The same, once everything has been said or nothing comes any more."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), REST_TIMEOUT_S)
        return self.text()


async def _first_bytes(fd: int) -> bytes:
    """Wait for something to read on a pipe; b"" at its end."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(fd, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
        return os.read(fd, 100)
    finally:
        loop.remove_reader(fd)
