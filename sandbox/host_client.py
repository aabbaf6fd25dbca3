"""Asking the node's sandbox host for sandboxes; the host is started when there is none."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sandbox import errors, paths
from sandbox.connection import BlockingConnection, NotListening, exchange
from sandbox.host import LOCK_NAME, LOG_NAME, SOCKET_NAME
from sandbox.room import DISK_FLOOR, MEMORY_FLOOR
from sandbox.snapshots.client import SnapshotRequests
from sandbox.spec import Fate, SandboxInfo, SandboxSpec

HOST_START_TIMEOUT_S = 60.0
"""A new host first sweeps what an earlier one left, and waits for one that is stopping."""
START_TIMEOUT_S = 1800.0
"""For one sandbox: waiting for a start slot and the first unpacking of a large image included."""
REQUEST_TIMEOUT_S = 60.0

# All that the daemon gets of the environment of whoever starts it, besides what begins with ROLLOUT_SANDBOX_.
# Above all no API keys.
PASSED_ON = (
    *("PATH", "HOME", "USER", "LANG", "TMPDIR", "LD_LIBRARY_PATH"),
    "ROLLOUT_HOME",
    "ROLLOUT_IMAGES",
    "ROLLOUT_APPTAINER",
    "ROLLOUT_IMAGE_CACHE",
    "ROLLOUT_IMAGE_CACHE_GB",
    *(DISK_FLOOR, MEMORY_FLOOR, "ROLLOUT_SNAPSHOT_DIR"),
)


class HostClient(SnapshotRequests):
    """The host of this node, from asyncio. Holds no connection: one request, one connection.

    Methods raise what the host reports (ImageError, RuntimeUnavailable, SandboxStartError, …), SandboxGone
    when the host went away in between and SandboxTimeout when it does not answer.
    """

    def __init__(self, state_dir: Path | str | None = None):
        self.state = Path(state_dir) if state_dir else paths.state_dir()

    async def start(self, spec: SandboxSpec) -> SandboxInfo:
        """Start a sandbox. If this call is cancelled the host releases what it had started."""
        request = {"op": "start", "spec": _portable(spec).to_json()}
        try:
            info = await self._request(request, START_TIMEOUT_S)
        except errors.SandboxGone:
            # The host was killed, or stops. The next one sweeps what was not finished, and begins it anew.
            await asyncio.to_thread(ensure_host, self.state)
            info = await self._request(request, START_TIMEOUT_S)
        return SandboxInfo.from_json(info)

    async def keep_warm(self, spec: SandboxSpec, count: int = 1) -> None:
        """Have the host start `count` sandboxes like `spec` ahead; returns before they are ready."""
        request = {"op": "keep_warm", "spec": _portable(spec).to_json(), "count": count}
        await self._request(request, START_TIMEOUT_S)

    async def fate(self, sandbox_id: str) -> Fate | None:
        """How a sandbox ended that nobody had released; None when the host knows of no such thing."""
        fate = await self._request_if_running({"op": "fate", "id": sandbox_id})
        return Fate.from_json(fate) if fate else None

    async def release(self, sandbox_id: str, wait: bool = True) -> bool:
        """End a sandbox: processes, socket, files are gone, soon if not to `wait`. False = there was none."""
        request = {"op": "release", "id": sandbox_id, "wait": wait}
        return bool((await self._request_if_running(request)).get("released"))

    async def release_owner(self, owner: str) -> int:
        """End all sandboxes of that owner; returns how many."""
        return (await self._request_if_running({"op": "release_owner", "owner": owner})).get("released", 0)

    async def list(self) -> list[dict[str, Any]]:
        """`SandboxInfo` as JSON plus `seconds_left` and bytes `on_disk`, for each sandbox that is ready."""
        return (await self._request_if_running({"op": "list"})).get("sandboxes", [])

    async def stats(self) -> dict[str, Any]:
        """Counts of the host; {} when none runs."""
        return await self._request_if_running({"op": "stats"})

    async def stop(self) -> None:
        """End the host and all its sandboxes; returns when everything is gone."""
        if await self._request_if_running({"op": "stop"}):
            await asyncio.to_thread(_wait_for_lock, self.state, REQUEST_TIMEOUT_S)

    async def _request(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        path = str(self.state / SOCKET_NAME)
        try:
            return await exchange(path, request, timeout)
        except NotListening:
            await asyncio.to_thread(ensure_host, self.state)
            return await exchange(path, request, timeout)

    async def _request_if_running(self, request: dict[str, Any]) -> dict[str, Any]:
        """For requests that a missing host has fulfilled already: {} then.

        Unless it was killed: then its sandboxes still run, and a new host is started that adopts them.
        """
        for _ in range(2):
            try:
                return await exchange(str(self.state / SOCKET_NAME), request, REQUEST_TIMEOUT_S)
            except errors.SandboxGone:
                if not _was_killed(self.state):
                    return {}
                await asyncio.to_thread(ensure_host, self.state)
        return {}


def ensure_host(state_dir: Path | str | None = None) -> None:
    """Have a host serve `state_dir` on this node; start one, detached, if there is none. Blocking.

    Raises SandboxError with the reason when it cannot start.
    """
    state = Path(state_dir) if state_dir else paths.state_dir()
    if _answers(state):
        return
    paths.own_directory(state, 0o711 if paths.sandbox_user() is not None else 0o700)
    with (state / "start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _answers(state):
            return
        _wait_for_lock(state, HOST_START_TIMEOUT_S)  # of a host that is stopping
        _spawn(state)


def _was_killed(state: Path) -> bool:
    """Whether a host ended without clearing up: one that stops in order leaves no records."""
    return any((state / "records").glob("*.json"))


def _answers(state: Path) -> bool:
    try:
        with BlockingConnection(str(state / SOCKET_NAME), REQUEST_TIMEOUT_S) as line:
            line.ask("stats")
        return True
    except errors.SandboxGone:
        return False


def _spawn(state: Path) -> None:
    package_root = str(Path(__file__).resolve().parent.parent)
    environment = {k: v for k, v in os.environ.items() if k in PASSED_ON or k.startswith("ROLLOUT_SANDBOX_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "sandbox.host", f"--state-dir={state}", "--detach", "--ready-fd=1"]
    try:
        with (state / LOG_NAME).open("ab") as log:
            process = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # until it has said that it serves, or what is wrong
                stderr=log,
                cwd="/",
                timeout=HOST_START_TIMEOUT_S,
            )
        answer = process.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        answer = f"no sign of life in {HOST_START_TIMEOUT_S:g} s"
    if answer != "ok":
        tail = (state / LOG_NAME).read_text(errors="replace")[-1500:].strip()
        raise errors.SandboxError(
            f"the sandbox host did not start in {state}: {answer or tail or 'it said nothing'}"
        )


def _wait_for_lock(state: Path, timeout: float) -> None:
    """Wait until no host holds the state directory. Raises SandboxTimeout, naming the host's pid."""
    deadline = time.monotonic() + timeout
    with (state / LOCK_NAME).open("a+") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() > deadline:
                    lock.seek(0)
                    pid = lock.read().strip() or "unknown"
                    raise errors.SandboxTimeout(
                        f"the sandbox host (pid {pid}) of {state} neither serves nor ends; end it: kill {pid}"
                    ) from None
            time.sleep(0.02)


def _portable(spec: SandboxSpec) -> SandboxSpec:
    """The host has another working directory: a relative image path is made absolute here."""
    if "/" not in spec.image:
        return spec
    return dataclasses.replace(spec, image=str(Path(spec.image).absolute()))
