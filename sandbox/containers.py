"""The containers of one host: start, end, reap, and sweep what an earlier life left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from sandbox import paths, payload, processes
from sandbox.errors import ImageError, SandboxRequestError, SandboxStartError
from sandbox.images import ImageStore
from sandbox.runtimes import RUNTIMES, Launch, Runtime, select_runtime
from sandbox.runtimes.base import make_directories
from sandbox.spec import SandboxInfo, SandboxSpec

log = logging.getLogger(__name__)

ID_BYTES = 4  # short, because socket paths are limited
SANDBOX_ID = re.compile(f"[0-9a-f]{{{2 * ID_BYTES}}}")
START_TIMEOUT_S = 60.0
JANITOR_PERIOD_S = 1.0
PARALLEL_STARTS = 2 * (os.cpu_count() or 1)  # measured: more only makes each start slower
KILL_ROUND_S = 0.05
KILL_ROUNDS = 100
STDERR_TAIL_CHARS = 2000
HOST_ROOT_NOTE = "files (no image here: the machine's own /usr is visible read-only)"

# Of the shell inside. Nothing may wait at a pager, an editor or a password prompt.
SHELL_ENV = {
    "TERM": "dumb",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}


@dataclasses.dataclass
class Container:
    """One running sandbox as the host knows it."""

    id: str
    runtime: Runtime
    spec: SandboxSpec
    launch: Launch
    deadline: float
    """`time.monotonic()` at which the host ends it."""
    process: subprocess.Popen | None = None
    exited: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    info: SandboxInfo | None = None
    ending: asyncio.Task | None = None


class Containers:
    """All containers of a host. Used from one event loop; blocking work goes to threads."""

    def __init__(self, state: Path, images: ImageStore | None = None):
        self.state = state
        self.images = images or ImageStore()
        self._running: dict[str, Container] = {}
        self._runtimes: dict[str, Runtime] = {}
        self._runtime_lock = asyncio.Lock()
        self._start_slots = asyncio.Semaphore(PARALLEL_STARTS)
        self.counts = {"started": 0, "failed": 0, "released": 0, "expired": 0, "died": 0, "swept": 0}
        for name in ("records", "logs"):
            paths.own_directory(state / name, 0o700)
        payload.stage(state / "payload")

    # -- start ----------------------------------------------

    async def start(self, spec: SandboxSpec) -> SandboxInfo:
        """Start a sandbox and wait until its shell is ready.

        Raises ImageError, RuntimeUnavailable, SandboxRequestError, or SandboxStartError with the runtime's
        stderr.
        """
        if spec.network not in ("none", "host"):
            raise SandboxRequestError(f"network {spec.network!r} is unknown; choose none or host")
        began = time.monotonic()
        async with self._start_slots:
            runtime = await self._runtime(spec)
            rootfs = await asyncio.to_thread(self._rootfs, spec.image, runtime)
            container = self._prepare(spec, runtime, rootfs)
            try:
                await self._launch(container)
            except BaseException:
                self.counts["failed"] += 1
                await self.release(container.id)
                raise
        self.counts["started"] += 1
        missing = list(runtime.missing_isolation)
        if spec.network == "host" and "network" not in missing:
            missing.append("network")
        if rootfs is None and runtime.needs_image:
            missing.append(HOST_ROOT_NOTE)
        container.info = SandboxInfo(
            id=container.id,
            socket=str(container.launch.socket),
            runtime=runtime.name,
            node=socket.gethostname(),
            isolation_missing=missing,
            pid=container.process.pid,
            start_ms=round((time.monotonic() - began) * 1000, 1),
            workspace=runtime.places(container.launch).workspace,
            owner=spec.owner,
        )
        return container.info

    async def _runtime(self, spec: SandboxSpec) -> Runtime:
        """Probed once in the life of the host; the base image serves for that when it is there."""
        async with self._runtime_lock:
            if spec.runtime not in self._runtimes:

                def probe_rootfs(runtime: Runtime) -> Path | None:
                    try:
                        return self._rootfs("base", runtime)
                    except ImageError:
                        return self._rootfs(spec.image, runtime)

                self._runtimes[spec.runtime] = await asyncio.to_thread(
                    select_runtime, spec.runtime, probe_rootfs
                )
            return self._runtimes[spec.runtime]

    def _rootfs(self, image: str, runtime: Runtime) -> Path | None:
        if not runtime.needs_image:
            return None
        try:
            return self.images.rootfs(image, runtime.run_as)
        except ImageError:
            if runtime.name == "bubblewrap" and image == "base":
                return None
            raise

    def _prepare(self, spec: SandboxSpec, runtime: Runtime, rootfs: Path | None) -> Container:
        sandbox_id = secrets.token_hex(ID_BYTES)
        paths.check_socket_path(str(self.state / sandbox_id / "s"))
        # Written first: a host killed between here and the end of the start leaves nothing unknown.
        self._write_record(sandbox_id, runtime, None)
        launch = make_directories(self.state, sandbox_id, rootfs, spec.network, runtime.run_as)
        container = Container(sandbox_id, runtime, spec, launch, time.monotonic() + spec.max_lifetime_s)
        self._running[sandbox_id] = container
        return container

    async def _launch(self, container: Container) -> None:
        runtime, launch = container.runtime, container.launch
        places = runtime.places(launch)
        workspace = launch.scratch / "workspace"
        for name, text in container.spec.files.items():
            target = (workspace / name).resolve()
            if not target.is_relative_to(workspace.resolve()):
                raise SandboxRequestError(f"file {name!r} lies outside the workspace")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        config = {
            "directory": places.private,
            "workspace": places.workspace,
            "env": SHELL_ENV | {"HOME": places.home, "TMPDIR": places.tmp} | container.spec.env,
            "subreaper": runtime.name == "local-unsafe",
        }
        private = launch.scratch / "private"
        (private / "config.json").write_text(json.dumps(config))
        if runtime.run_as is not None:
            for path in [private / "config.json", *workspace.rglob("*")]:
                os.chown(path, runtime.run_as, runtime.run_as, follow_symlinks=False)
        command = [
            *runtime.python(launch),
            *("-BES", f"{places.payload}/server.py", f"{places.private}/config.json"),
        ]
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(launch.socket))
        listener.listen(64)
        with self._log(container.id).open("wb") as stderr, listener:
            try:
                container.process = subprocess.Popen(
                    runtime.argv(launch, command),
                    env=runtime.environment(launch),
                    stdin=listener,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    cwd="/",
                    start_new_session=True,
                    **runtime.as_user(),
                )
            except OSError as error:
                raise SandboxStartError(f"cannot start {runtime.name}: {error}") from error
        self._write_record(container.id, runtime, container.process.pid)
        with container.process.stdout as stdout:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    ready = await _first_bytes(stdout.fileno())
                problem = None if ready else "ended before it was ready"
            except TimeoutError:
                problem = f"was not ready after {START_TIMEOUT_S:g} s"
        if problem:
            tail = self._log(container.id).read_text(errors="replace")[-STDERR_TAIL_CHARS:].strip()
            image = f" with image {container.spec.image!r}" if runtime.needs_image else ""
            raise SandboxStartError(
                f"sandbox on {runtime.name}{image} {problem}; it said: {tail or '(nothing)'}"
            )

    # -- end ----------------------------------------------

    async def release(self, sandbox_id: str) -> bool:
        """End a sandbox and remove all of it. Returns False when there is none of that id (any more)."""
        container = self._running.get(sandbox_id)
        if container is None:
            return False
        if container.ending is None:
            container.ending = asyncio.create_task(self._end(container))
        await asyncio.shield(container.ending)
        return True

    async def release_owner(self, owner: str) -> int:
        """End all sandboxes of that owner; returns how many."""
        return await self._release_all([c.id for c in self._running.values() if c.spec.owner == owner])

    async def close(self) -> None:
        """End everything and leave only the host's log and lock in the state directory."""
        while self._running:
            await self._release_all(list(self._running))
        for name in ("records", "logs", "scratch", "payload"):
            await asyncio.to_thread(_remove, self.state / name)

    async def _release_all(self, ids: list[str]) -> int:
        return sum(await asyncio.gather(*(self.release(sandbox_id) for sandbox_id in ids)))

    async def _end(self, container: Container) -> None:
        try:
            if container.process is not None:
                self.reap()
                await _kill(container.runtime, container.process.pid, container.exited)
                if container.runtime.name == "local-unsafe":
                    processes.send(container.runtime.strays(container.id))
            await asyncio.to_thread(self._remove_traces, container.id)
        finally:
            self.counts["released"] += 1
            self._running.pop(container.id, None)

    def _remove_traces(self, sandbox_id: str) -> None:
        _remove(self.state / sandbox_id)
        _remove(self.state / "scratch" / sandbox_id)
        self._log(sandbox_id).unlink(missing_ok=True)
        self._record(sandbox_id).unlink(missing_ok=True)

    # -- keeping order ----------------------------------------------

    def reap(self) -> None:
        """Notice ended processes; to be called at SIGCHLD. A sandbox that ended by itself is cleaned up."""
        for container in list(self._running.values()):
            if container.process is None or container.exited.is_set() or container.process.poll() is None:
                continue
            container.exited.set()
            if container.info is not None and container.ending is None:
                log.warning(
                    "sandbox %s ended by itself (exit code %s)", container.id, container.process.returncode
                )
                self.counts["died"] += 1
                container.ending = asyncio.create_task(self._end(container))

    async def janitor(self) -> None:
        """For ever: end what outlived its time."""
        while True:
            await asyncio.sleep(JANITOR_PERIOD_S)
            now = time.monotonic()
            for container in list(self._running.values()):
                if now >= container.deadline and container.ending is None and container.info is not None:
                    log.warning("sandbox %s outlived its %g s", container.id, container.spec.max_lifetime_s)
                    self.counts["expired"] += 1
                    container.ending = asyncio.create_task(self._end(container))

    async def sweep(self) -> None:
        """End and remove what an earlier host left: by its records, then whatever lies about without one."""
        left = []
        for path in (self.state / "records").glob("*.json"):
            try:
                left.append((path.stem, json.loads(path.read_text())))
            except ValueError:
                left.append((path.stem, {}))
        await asyncio.gather(*(self._sweep_one(sandbox_id, record) for sandbox_id, record in left))
        for path in [*self.state.iterdir(), *(self.state / "scratch").glob("*")]:
            if path.is_dir() and SANDBOX_ID.fullmatch(path.name):  # never what somebody else keeps here
                await asyncio.to_thread(_remove, path)

    async def _sweep_one(self, sandbox_id: str, record: dict[str, Any]) -> None:
        runtime = RUNTIMES.get(record.get("runtime", ""), RUNTIMES["apptainer"])()
        pids = runtime.strays(sandbox_id)
        if processes.is_alive(record.get("pid") or 0, record.get("start_time")):
            pids.insert(0, record["pid"])
        for pid in dict.fromkeys(pids):
            await _kill(runtime, pid, None)
        log.warning("swept sandbox %s of an earlier host (%d processes)", sandbox_id, len(pids))
        self.counts["swept"] += 1
        await asyncio.to_thread(self._remove_traces, sandbox_id)

    # -- looking ----------------------------------------------

    def list(self) -> list[dict[str, Any]]:
        """All ready sandboxes: their info and the seconds left to them."""
        now = time.monotonic()
        ready = [c for c in self._running.values() if c.info is not None and c.ending is None]
        return [c.info.to_json() | {"seconds_left": round(c.deadline - now, 1)} for c in ready]

    def stats(self) -> dict[str, Any]:
        """Counts since the start of the host, and what is going on."""
        ready = sum(c.info is not None for c in self._running.values())
        return self.counts | {"ready": ready, "known": len(self._running), "parallel_starts": PARALLEL_STARTS}

    def _record(self, sandbox_id: str) -> Path:
        return self.state / "records" / f"{sandbox_id}.json"

    def _log(self, sandbox_id: str) -> Path:
        return self.state / "logs" / f"{sandbox_id}.stderr"

    def _write_record(self, sandbox_id: str, runtime: Runtime, pid: int | None) -> None:
        started = processes.start_time(pid) if pid else None
        path = self._record(sandbox_id)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps({"runtime": runtime.name, "pid": pid, "start_time": started}))
        temporary.rename(path)


async def _kill(runtime: Runtime, pid: int, exited: asyncio.Event | None) -> None:
    """SIGKILL what `runtime.victims` names until `pid` is gone; the runtime itself only when that does not
    help.

    `exited`: set by whoever reaps `pid`; None when it is not our child and has to be looked at.
    """
    started = processes.start_time(pid)
    for number in range(2 * KILL_ROUNDS):
        if exited.is_set() if exited else not processes.is_alive(pid, started):
            return
        victims = runtime.victims(pid)
        if (not victims and number >= 10) or number >= KILL_ROUNDS:
            victims = [*victims, pid]
        processes.send(victims, signal.SIGKILL)
        if exited:
            try:
                await asyncio.wait_for(exited.wait(), KILL_ROUND_S)
            except TimeoutError:
                continue
        else:
            await asyncio.sleep(KILL_ROUND_S)
    log.error("process %d of a sandbox on %s does not die", pid, runtime.name)


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


def _remove(path: Path) -> None:
    """Remove a tree whatever permissions the sandbox gave its directories."""

    def open_up(function: Any, name: str, error: object) -> None:
        entry = Path(name)
        for directory in (entry.parent, entry):
            if directory.is_dir() and not directory.is_symlink():
                directory.chmod(0o700)
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, onerror=None if entry == path else open_up)
        else:
            entry.unlink()

    if path.exists():
        try:
            shutil.rmtree(path, onerror=open_up)
        except OSError as error:
            log.error("cannot remove %s: %s", path, error)
