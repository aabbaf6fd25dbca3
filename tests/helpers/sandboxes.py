"""What sandboxes leave behind, looked for in the machine itself and not in our own records."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import sandbox.server
from sandbox import processes
from sandbox.container import Container
from sandbox.runtimes import RUNTIMES, Launch
from sandbox.spec import Limits, SandboxSpec

FURNITURE = {"host.sock", "host.lock", "host.log", "start.lock", "payload", "snapshots", "template"}
"""What belongs to the host itself and not to any sandbox."""
PER_SANDBOX = ("records", "scratch")
"""Directories of the host with one entry a sandbox."""


def new_state() -> Path:
    """Short, because socket paths are limited; pytest's own directories are too long."""
    return Path(tempfile.mkdtemp(prefix="sbxt-", dir="/tmp"))


def add_programs(root: Path, names: Iterable[str]) -> None:
    """Copy programs of this machine into a root file system, with the libraries they need; `sh` is dash."""
    needed: set[str] = set()
    for name in names:
        program = Path(shutil.which(name) or "").resolve()
        shutil.copy(program, root / "usr/bin" / name)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        needed.update(word for word in listed.split() if word.startswith("/"))
    (root / "usr/bin/sh").symlink_to("dash")
    for library in needed:
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library[1:])


def small_image(place: Path, owner: int) -> Path:
    """A directory image with a shell and little else."""
    (place / "usr/bin").mkdir(parents=True)
    (place / "bin").symlink_to("usr/bin")
    add_programs(place, ("dash", "id", "ls", "touch", "chown"))
    subprocess.run(["chown", "-hR", f"{owner}:{owner}", place], check=True)
    return place


@contextlib.contextmanager
def server_modules(*names: str) -> Iterator[list[ModuleType]]:
    """Modules of the sandbox's server, which import each other by their bare names, as they lie inside."""
    directory = str(Path(sandbox.server.__file__).parent)
    sys.path.insert(0, directory)
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(directory)
        for name, module in list(sys.modules.items()):
            if "." not in name and (getattr(module, "__file__", None) or "").startswith(directory):
                del sys.modules[name]


def require_apptainer() -> None:
    """Skip, with the reason, where no Apptainer is installed."""
    from sandbox.errors import RuntimeUnavailable
    from sandbox.runtimes.apptainer import Apptainer

    try:
        Apptainer().check_installed()
    except RuntimeUnavailable as error:
        pytest.skip(str(error))


def processes_of(directory: Path) -> list[str]:
    """Processes whose command line names something inside the directory, but the host and its template."""
    traces = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "/template.py " in command and not processes.is_init(int(entry.name)):
            continue
        if f"{directory}/" in command and "sandbox.host" not in command:
            traces.append(f"process {entry.name}: {command[:200]}")
    return traces


def kill_from_outside(pid: int) -> None:
    """End a sandbox as a fault of the node would; `pid`: its runtime's, as `SandboxInfo` has it."""
    processes.send([pid] if processes.is_init(pid) else processes.descendants(pid) or [pid])


def leftovers(directory: Path) -> list[str]:
    """Processes, sockets and scratch directories of sandboxes under a host's directory."""
    traces = processes_of(directory)
    if directory.exists():
        paths = [path for path in directory.iterdir() if path.name not in {*FURNITURE, *PER_SANDBOX}]
        for name in PER_SANDBOX:
            paths += (directory / name).glob("*")
        traces += [f"path {path}" for path in sorted(paths)]
    return traces


def stop_host(directory: Path) -> None:
    """End the sandbox host of a directory, if one runs."""
    from sandbox.host_client import HostClient

    asyncio.run(HostClient(directory).stop())


@contextlib.contextmanager
def own_sandboxes(**variables: str) -> Iterator[Path]:
    """A directory where rollouts in this process start their sandboxes; nothing may be left in it.

    Args:
        variables: Further settings of its host.
    """
    state = new_state()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"ROLLOUT_SANDBOX_DIR": str(state), **variables}.items():
                patch.setenv(name, value)
            yield state
        rest = leftovers(state)
    finally:
        stop_host(state)
        shutil.rmtree(state, ignore_errors=True)
    assert rest == []


def never_begun(name: str, state: Path, pid: int | None = None, **limits: int) -> Container:
    """A container as the parts of a host know it, of which nothing was started; a look at it sees `pid`."""
    launch = Launch(name, state)
    launch.scratch.mkdir(parents=True, exist_ok=True)
    most = Limits(**{"memory_mb": 10**6, "processes": 10**6, "disk_mb": 1000, "files": 1000, **limits})
    return Container(name, RUNTIMES["apptainer"](), SandboxSpec(), launch, most, pid=pid)
