"""What sandboxes leave behind, looked for in the machine itself and not in our own records."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

FURNITURE = {"host.sock", "host.lock", "host.log", "start.lock", "payload"}
"""What belongs to the host itself and not to any sandbox."""
PER_SANDBOX = ("records", "scratch")
"""Directories of the host with one entry a sandbox."""


def new_state() -> Path:
    """Short, because socket paths are limited; pytest's own directories are too long."""
    return Path(tempfile.mkdtemp(prefix="sbxt-", dir="/tmp"))


def require_apptainer() -> None:
    """Skip, with the reason, where no Apptainer is installed."""
    from sandbox.errors import RuntimeUnavailable
    from sandbox.runtimes.apptainer import Apptainer

    try:
        Apptainer().check_installed()
    except RuntimeUnavailable as error:
        pytest.skip(str(error))


def processes_of(directory: Path) -> list[str]:
    """Processes whose command line names something inside the directory, the host itself left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{directory}/" in command and "sandbox.host" not in command:
            found.append(f"process {entry.name}: {command[:200]}")
    return found


def kill_from_outside(pid: int) -> None:
    """End a sandbox as a fault of the node would; `pid`: its runtime's, as `SandboxInfo` has it."""
    from sandbox import processes

    processes.send(processes.descendants(pid) or [pid])


def leftovers(directory: Path) -> list[str]:
    """Processes, sockets and scratch directories of sandboxes under a host's directory."""
    left = processes_of(directory)
    if directory.exists():
        paths = [path for path in directory.iterdir() if path.name not in {*FURNITURE, *PER_SANDBOX}]
        for name in PER_SANDBOX:
            paths += (directory / name).glob("*")
        left += [f"path {path}" for path in sorted(paths)]
    return left


def stop_host(directory: Path) -> None:
    """End the sandbox host of a directory, if one runs."""
    from sandbox.host_client import HostClient

    asyncio.run(HostClient(directory).stop())
