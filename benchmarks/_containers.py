"""The usual ways to a container, and what sandboxes hold and leave; for `sandbox_start`."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from pathlib import Path

from sandbox import paths, processes, trees
from sandbox.images import ImageStore
from sandbox.runtimes.apptainer import Apptainer

LIMIT_S = 120.0
SETTLE_S = 10.0
WORK = ("python3", "-c", "print('hi')")
ISOLATION = ("--userns", "--containall", "--no-home", "--cleanenv", "--writable-tmpfs")
UNPACKED = ("--net", "--network", "none")
"""And what else our sandboxes have, where both run the same unpacked image."""
HOST_FILES = {"host.lock", "host.log", "start.lock"}
"""What a sandbox host that was stopped leaves in its directory on purpose."""


class ContainerError(RuntimeError):
    """Apptainer failed, or printed something else than was asked for."""


class PlainApptainer:
    """Apptainer's command line, used the way its manual shows: on the SIF, with `--writable-tmpfs`.

    As ourselves, also where we are root and our sandboxes run as somebody else: `/dev/fuse` may be root's.
    """

    def __init__(self, home: Path):
        """`home`: becomes Apptainer's home, where it registers instances."""
        runtime = Apptainer()
        runtime.check_installed()
        self._program = str(runtime.program())
        self._image = str(ImageStore().find("base"))
        self._unpacked = str(ImageStore().rootfs("base", paths.sandbox_user()))
        self._environment = {"PATH": paths.tool_path(), "HOME": str(home), "LANG": "C.UTF-8"}
        self._numbers = itertools.count()

    def exec(self) -> None:
        """A container for one command, from start to end. Raises ContainerError."""
        self._check(self._run("exec", *ISOLATION, self._image, *WORK))

    def exec_unpacked(self) -> float:
        """The same from the unpacked image that our sandboxes run from, with their first command; returns the
        seconds until its output was there, for the container has its end still before it.
        """
        began = time.perf_counter()
        process = subprocess.Popen(
            self._argv("exec", *ISOLATION, *UNPACKED, self._unpacked, "bash", "-c", "echo hi"),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd="/",
        )
        with process:
            said = process.stdout.readline()
            seconds = time.perf_counter() - began
        self._check(said.decode(errors="replace"))
        return seconds

    def start_instance(self) -> str:
        """A container in the background and the first command in it; returns its name."""
        name = f"b{next(self._numbers)}"
        self._run("instance", "start", *ISOLATION, self._image, name)
        self._check(self._run("exec", "--cleanenv", f"instance://{name}", *WORK))
        return name

    def stop_instance(self, name: str) -> None:
        """End it."""
        self._run("instance", "stop", name)

    def close(self) -> None:
        """End instances that an interrupted run has left."""
        self._call("instance", "stop", "--all")

    def _run(self, *arguments: str) -> str:
        done = self._call(*arguments)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-1000:]
            raise ContainerError(f"apptainer {' '.join(arguments[:2])} failed: {said}")
        return done.stdout.decode(errors="replace")

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self._argv(*arguments),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            timeout=LIMIT_S,
        )

    def _argv(self, *arguments: str) -> list[str]:
        return [self._program, "-q", *arguments]

    @staticmethod
    def _check(said: str) -> None:
        if said.strip() != "hi":
            raise ContainerError(f"apptainer exec printed {said!r} instead of 'hi'")


def memory_bytes(pids: list[int]) -> tuple[int, int]:
    """(bytes that these sandboxes' processes hold, number of processes that RSS had to be taken of).

    PSS, which divides a shared page among its users. Where a process's is closed to us (the server's to plain
    users) its RSS counts, which is more.
    """
    total = by_rss = 0
    for pid in pids:
        for usage in processes.usages(pid):
            share = processes.proportional_bytes(usage.pid)
            by_rss += share == 0 and usage.rss_bytes > 0
            total += share or usage.rss_bytes
    return total, by_rss


def scratch_bytes(state: Path) -> tuple[int, str]:
    """(bytes of memory that a host's files take, type of their file system): none on a disk."""
    kind = _file_system(state)
    if kind not in ("tmpfs", "ramfs"):
        return 0, kind
    return trees.usage(state, 1 << 62, 1 << 62)[0], kind


def _file_system(path: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(len(place), kind) for place, kind in mounts if path.resolve().is_relative_to(place)]
    return max(around, key=lambda item: item[0])[1]


class Census:
    """What belongs to the sandboxes of one directory: processes, mounts, sockets, files."""

    def __init__(self, directory: Path, states: list[Path]):
        """`directory`: everything lies below it; `states`: of the hosts, in it."""
        self._directory = directory
        self._states = states
        self._known: dict[int, int | None] = {}

    def note(self, pid: int) -> None:
        """Remember the processes of a sandbox, to look for them when it is gone."""
        for one in [pid, *processes.descendants(pid)]:
            self._known[one] = processes.start_time(one)

    def count(self) -> dict[str, int]:
        """How many of each kind there are now."""
        name = str(self._directory)
        known = {pid for pid, started in self._known.items() if processes.is_alive(pid, started)}
        return {
            "processes": len(known | set(_processes_naming(name))),
            "mounts": Path("/proc/mounts").read_text().count(name),
            "sockets": Path("/proc/net/unix").read_text().count(name),
            "files": sum(
                path.name not in HOST_FILES
                for state in self._states
                if state.exists()
                for path in state.iterdir()
            ),
        }

    def count_at_rest(self) -> dict[str, int]:
        """The same when nothing is left or nothing changes any more."""
        deadline = time.monotonic() + SETTLE_S
        while any((counts := self.count()).values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return counts


def _processes_naming(text: str) -> list[int]:
    """Live processes other than ours in whose command line or environment the text occurs."""
    wanted, found = text.encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            named = any(wanted in (entry / part).read_bytes() for part in ("cmdline", "environ"))
        except OSError:
            continue
        if named and processes.start_time(int(entry.name)) is not None:
            found.append(int(entry.name))
    return found
