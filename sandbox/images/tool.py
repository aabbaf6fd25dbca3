"""spython with what it lacks: our program's place, a time limit, an end of its processes, errors' text."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sandbox import paths
from sandbox.errors import ImageError
from sandbox.runtimes.apptainer import Apptainer

REPOSITORY = Path(__file__).resolve().parents[2]
DRAIN_S = 10.0  # for the last lines
LINES_KEPT = 500
LINES_SHOWN = 6
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
IDLE_TALK = re.compile(r"INFO:|WARNING: No default remote|time=")


def program() -> str:
    """Path of Apptainer or Singularity. Raises RuntimeUnavailable."""
    apptainer = Apptainer()
    apptainer.check_installed()
    return os.path.realpath(str(apptainer.program()))  # its configuration lies relative to its real path


def run(
    operation: str,
    arguments: dict,
    work: Path,
    timeout: float,
    user: int | None = None,
    output: Callable[[str], None] | None = None,
) -> str:
    """Run an operation of `spython_child` and return what it printed.

    `work`: directory for temporary files; `timeout`: seconds; `user`: uid (and gid) to which root steps down;
    `output`: called with each line. Raises ImageError with the last lines, or when the time is over;
    RuntimeUnavailable when there is no Apptainer.
    """
    if importlib.util.find_spec("spython") is None:
        raise ImageError("this needs the Python package spython: pip install 'rollout-service[images]'")
    errors = work / "stderr"
    _write_wrapper(work / "bin", operation, errors, user)
    process = subprocess.Popen(
        [sys.executable, "-m", "sandbox.images.spython_child", operation, json.dumps(arguments)],
        env=_environment(work, user),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(COLOUR.sub("", line.rstrip("\n")))
            if output is not None:
                output(lines[-1])

    reader = threading.Thread(target=read, daemon=True)
    with _ended(process):
        reader.start()
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ImageError(
                f"it took longer than {timeout:g} s; allow more with --timeout. The last lines: {_end(lines)}"
            ) from None
    reader.join(DRAIN_S)
    if status != 0:
        if errors.exists():
            lines.extend(COLOUR.sub("", errors.read_text(errors="replace")).splitlines())
        raise ImageError(_end(lines) or f"spython ended with status {status} and said nothing")
    return "\n".join(lines)


def _write_wrapper(directory: Path, operation: str, errors: Path, user: int | None) -> None:
    """A program `singularity`, the only name that spython knows."""
    directory.mkdir(exist_ok=True)
    command = [program()]
    if user is not None:
        setpriv = shutil.which("setpriv", path=paths.tool_path())
        if setpriv is None:
            raise ImageError("setpriv is missing, with which root steps down for %post; install util-linux")
        command = [setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups", "--", *command]
    # What inspect prints is parsed; of the others spython would show the errors only at the end.
    redirection = f"2>{shlex.quote(str(errors))}" if operation == "inspect" else "2>&1"
    wrapper = directory / "singularity"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@" {redirection}\n')
    wrapper.chmod(0o755)


def _environment(work: Path, user: int | None) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PATH"] = f"{work / 'bin'}:{paths.tool_path()}"
    environment["PYTHONPATH"] = ":".join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    # Removed with `work`, however the build ends.
    environment["APPTAINER_TMPDIR"] = environment["SINGULARITY_TMPDIR"] = str(work / "tmp")
    (work / "tmp").mkdir(exist_ok=True)
    if user is not None:  # has no home, and may not use root's
        for name in ("HOME", "APPTAINER_CACHEDIR", "APPTAINER_CONFIGDIR"):
            environment[name] = str(work / "home")
    return environment


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """The process and its group have ended after the block, whether it was left by Ctrl-C or otherwise."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a leader that has ended may have left others
        process.wait()
        deadline = time.monotonic() + DRAIN_S
        while _group_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)  # until then they may write where the caller wants to remove


def _group_lives(group: int) -> bool:
    """Whether a process of the group has not ended; whether it has been reaped does not matter."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # state, parent, group: after the name, which may hold anything (proc(5))
                state, _, pgrp = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
                if int(pgrp) == group and state not in "ZX":
                    return True
    return False


def _end(lines: collections.deque[str]) -> str:
    """The last lines that say something."""
    told = [line.strip() for line in lines if line.strip() and not IDLE_TALK.match(line.strip())]
    return "\n".join(told[-LINES_SHOWN:])


def inspect(image: Path, work: Path, timeout: float) -> dict[str, Any]:
    """The attributes that Apptainer keeps with an image: `labels`, `environment`, … Raises as `run`."""
    said = run("inspect", {"image": str(image)}, work, timeout)
    try:
        return json.loads(said.splitlines()[-1])["attributes"]
    except (ValueError, LookupError, TypeError) as error:
        raise ImageError(f"{image}: the output of inspect makes no sense: {said[-500:]!r}") from error
