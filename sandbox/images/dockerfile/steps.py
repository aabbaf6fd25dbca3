"""Having the steps of a build done, each in a process of its own, and what bounds them."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from sandbox import memory, paths, processes, room, trees
from sandbox.config import HostConfig
from sandbox.errors import ImageError
from sandbox.images import build as building
from sandbox.images import locks
from sandbox.images.tool import REPOSITORY
from sandbox.spec import Limits

POLL_S = 0.1
SLOWEST_S = 2.0  # between two looks at what a step takes, where looking is slow itself
DRAIN_S = 10.0
LINES_SHOWN, LINE_CHARS, SHOWN_CHARS = 20, 2000, 3000
PARTS = ("upper", "work", "merged", "empty", "shm", "pipes")
"""Directories of a layer that is being made; the first of them is what stays."""
APT = 'APT::Sandbox::User "root";\n'
"""There is no other user that could fetch what is installed."""
Feed = Callable[[IO[bytes]], None]
"""Writes what a step is to read."""


class Watch:
    """What bounds a build: time, the limits of a sandbox, somebody who has changed their mind."""

    def __init__(
        self, timeout: float, cancelled: Callable[[], bool], output: Callable[[str], None] = lambda _: None
    ):
        self.timeout, self.cancelled, self.output = timeout, cancelled, output
        self.deadline = time.monotonic() + timeout
        config = HostConfig.from_environment()
        self.limits, self.floors = config.limits(Limits()), config.floors

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.1, self.deadline - time.monotonic())

    def check(self) -> None:
        """Raises ImageError when the build has to end."""
        if self.cancelled():
            raise ImageError("the build was cancelled")
        if time.monotonic() > self.deadline:
            raise ImageError(f"the build took longer than {self.timeout:g} s; allow more with --timeout")

    @contextlib.contextmanager
    def turn(self, lock: Path) -> Iterator[None]:
        """Hold the lock, as soon as nobody else does; where file systems have none, users see to it."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(locks.LocksUnsupported):
                while stack.enter_context(locks.locked(lock, locks.EXCLUSIVE)) is None:
                    self.check()
                    time.sleep(POLL_S)
                stack.callback(lock.unlink, missing_ok=True)
            yield

    def wait_for(self, process: subprocess.Popen[bytes], layer: Path) -> int:
        """The status of a step's process. Raises ImageError where it goes over a limit."""
        pause, survey = POLL_S, memory.Survey()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(pause)
            self.check()
            begun = time.monotonic()
            self.check_usage(processes.usages(process.pid), survey, layer)
            pause = min(SLOWEST_S, max(POLL_S, 4 * (time.monotonic() - begun)))

    def check_usage(self, usages: list[processes.Usage], survey: memory.Survey, layer: Path) -> None:
        """Raises ImageError naming what is short, or the limit that is passed."""
        for reason in room.shortages(layer, self.floors).values():
            raise ImageError(f"{reason}; free some, or build elsewhere")
        limits = self.limits
        assert limits.disk_mb and limits.files and limits.memory_mb and limits.processes
        used, files = trees.usage(layer, limits.disk_mb << 20, limits.files)
        holding = survey.held(usages, None, limits.memory_mb << 20)
        held, unlinked = (holding.total, holding.unlinked) if holding else (0, 0)
        for what, amount, most in (
            ("disk_mb", used + unlinked >> 20, limits.disk_mb),
            ("files", files, limits.files),
            ("memory_mb", held >> 20, limits.memory_mb),
            ("processes", sum(usage.threads for usage in usages), limits.processes),
        ):
            if amount > most:
                variable = f"ROLLOUT_SANDBOX_{what.upper()}"
                raise ImageError(
                    f"it went over the limit of {most} {what}; raise {variable} if it needs more"
                )


class Steps:
    """Has steps done as `user` (None = our own), over layers in the directory `cache`."""

    def __init__(self, watch: Watch, cache: Path, user: int | None):
        self.watch, self.cache, self.user = watch, cache, user

    def prepare(self, layer: Path, request: Mapping[str, Any]) -> None:
        """Make the directories of a layer, or of what only looks at some."""
        self.close(layer)
        for part in PARTS:
            (layer / part).mkdir()
            (layer / part).chmod(0o1777 if part == "shm" else 0o755)
            if self.user is not None and part != "pipes":
                os.chown(layer / part, self.user, self.user)
        for name, text in {"apt.conf": APT, **request.get("files", {})}.items():
            if "/" not in name:
                (layer / "pipes" / name).write_text(text)
                (layer / "pipes" / name).chmod(0o755)

    def close(self, layer: Path) -> None:
        """To all but the steps' user: a directory below may be open to everybody, as a /tmp is."""
        if self.user is not None:
            os.chown(layer, -1, self.user)
        layer.chmod(0o710)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A place for what makes no layer."""
        with building._work_directory() as work:
            work.chmod(0o711)
            (work / "layer").mkdir()
            self.prepare(work / "layer", {})
            yield work / "layer"

    def inside(
        self,
        request: Mapping[str, Any],
        layer: Path,
        lowers: list[str],
        feed: Feed | None,
        take: IO[bytes] | None = None,
    ) -> tuple[int, str]:
        """Have a step done; its status, and the last lines that it said. `feed`: writes its input; `take`:
        where its output goes. Raises ImageError where it goes over a limit.
        """
        limits = {name: getattr(self.watch.limits, name) for name in ("processes", "disk_mb", "memory_mb")}
        whole = {
            **request,
            "user": self.user,
            "limits": limits,
            "cache": str(self.cache),
            "layer": str(layer),
            "lowers": lowers,
            "writable": request["operation"] in ("run", "put"),
            "bwrap": program("bwrap"),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "sandbox.images.dockerfile.inside"],
            env={"PATH": paths.tool_path(), "PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=take or subprocess.PIPE,
            stderr=subprocess.PIPE if take else subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
        )
        said: collections.deque[str] = collections.deque(maxlen=LINES_SHOWN)
        wrong: list[Exception] = []
        source = process.stderr if take else process.stdout
        assert source is not None and process.stdin is not None
        threads = [
            threading.Thread(target=self._feed, args=(process.stdin, whole, feed, wrong), daemon=True),
            threading.Thread(target=self._listen, args=(source, said), daemon=True),
        ]
        try:
            for thread in threads:
                thread.start()
            status = self.watch.wait_for(process, layer)
        finally:
            _end(process)
            for thread in threads:
                thread.join(DRAIN_S)
        if wrong and not isinstance(wrong[0], BrokenPipeError):
            return 1, str(wrong[0])
        return status, "\n".join(said)[-SHOWN_CHARS:]

    @staticmethod
    def _feed(
        stream: IO[bytes], request: Mapping[str, Any], feed: Feed | None, wrong: list[Exception]
    ) -> None:
        try:
            with stream:
                stream.write(json.dumps(request).encode() + b"\n")
                stream.flush()  # another process may write what follows
                if feed is not None:
                    feed(stream)
        except Exception as error:
            wrong.append(error)

    def _listen(self, stream: IO[bytes], said: collections.deque[str]) -> None:
        with stream:
            while line := stream.readline(LINE_CHARS):
                text = line.decode(errors="replace").rstrip()
                if text:
                    said.append(text)
                    self.watch.output(text)


def program(name: str) -> str:
    program = shutil.which(name, path=paths.tool_path())
    if program is None:
        raise ImageError(f"{name} is missing, which builds need; run deploy/setup/apptainer.sh")
    return program


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all below it have ended after this."""
    below = [(pid, processes.start_time(pid)) for pid in processes.descendants(process.pid)]
    processes.send([process.pid, *(pid for pid, _ in below)] if process.poll() is None else [])
    process.wait()
    deadline = time.monotonic() + DRAIN_S
    while any(processes.is_alive(*child) for child in below) and time.monotonic() < deadline:
        time.sleep(0.01)
