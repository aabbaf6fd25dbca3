"""spython, which pulls, builds and inspects images, with what it lacks: our program's place, a time limit, an
end of its processes, errors' text.

Each operation is run by `python -m sandbox.images.tool OPERATION JSON`, a process of its own, because spython
ends the interpreter on errors and calls a program named `singularity`, which must be found on a PATH that is
ours to change only there.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import os
import pwd
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

from sandbox import paths, processes
from sandbox.errors import ImageError
from sandbox.runtimes.apptainer import Apptainer
from sandbox.server import seccomp

REPOSITORY = Path(__file__).resolve().parents[2]
DRAIN_S = 10.0  # for the last lines
LINES_KEPT = 500
LINES_SHOWN = 6
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
IDLE_TALK = re.compile(r"INFO:|WARNING: No default remote|time=")


def run(
    operation: str,
    arguments: dict,
    work: Path,
    timeout: float,
    user: int | None = None,
    output: Callable[[str], None] | None = None,
) -> str:
    """Run an operation (`pull`, `build`, `inspect`) and return what it printed.

    `work`: directory for temporary files; `timeout`: seconds; `user`: uid (and gid) to which root steps down;
    `output`: called with each line. Raises ImageError with the last lines, or when the time is over;
    RuntimeUnavailable when there is no Apptainer.
    """
    if importlib.util.find_spec("spython") is None:
        raise ImageError("this needs the Python package spython: pip install 'rollout-service[images]'")
    errors = work / "stderr"
    _write_wrapper(work / "bin", operation, errors, user)
    process = subprocess.Popen(
        [sys.executable, "-m", "sandbox.images.tool", operation, json.dumps(arguments)],
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
    apptainer = Apptainer()
    apptainer.check_installed()
    # Its configuration lies relative to its real path.
    command = [os.path.realpath(str(apptainer.program()))]
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
        while processes.group_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)  # until then they may write where the caller wants to remove


def _end(lines: collections.deque[str]) -> str:
    """The last lines that say something."""
    told = [line.strip() for line in lines if line.strip() and not IDLE_TALK.match(line.strip())]
    return "\n".join(told[-LINES_SHOWN:])


def inspect(image: Path, work: Path, timeout: float) -> dict[str, Any]:
    """The attributes that Apptainer keeps with an image: `labels`, `environment`, … Raises as `run`."""
    output = run("inspect", {"image": str(image)}, work, timeout)
    try:
        return json.loads(output.splitlines()[-1])["attributes"]
    except (ValueError, LookupError, TypeError) as error:
        raise ImageError(f"{image}: the output of inspect makes no sense: {output[-500:]!r}") from error


# ---------------------------------------------------------------------------------- in the process of its own


def main(operation: str, arguments: dict) -> int:
    """0 = done, 1 = the program failed and has said why."""
    from spython.main import Client

    Client.quiet = True
    image = arguments["image"]
    if operation == "inspect":
        result = Client.inspect(image)
        print(json.dumps(result))
        return 0 if result else 1
    if operation == "pull":
        Client.pull(arguments["source"], name=image, quiet=True)
    else:
        Client.build(arguments["source"], image, options=arguments["options"], sudo=False, quiet=True)
    # spython does not tell success from failure here.
    return 0 if Path(image).exists() else 1


def confine() -> None:
    """What a definition runs may mount and make namespaces, as Apptainer does for it, but reaches neither the
    user's keys nor the kernel (`seccomp.KERNEL`).

    A plain user who has subordinate ids goes without the filter: only a setuid program, newuidmap, can map
    them, and whoever may load a filter without being root may start none.
    """
    seccomp.join_own_keyring()
    if os.geteuid() == 0:
        seccomp.load(building=True, no_new_privs=False)
    elif not has_subordinate_ids():
        seccomp.load(building=True)


def has_subordinate_ids() -> bool:
    """Whether whoever builds here has some (subuid(5)), with which a plain user's namespace has more than one
    user, and the setuid program that maps them.
    """
    uid = paths.sandbox_user() or os.geteuid()
    names = {str(uid)}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    with contextlib.suppress(OSError):
        lines = Path("/etc/subuid").read_text().splitlines()
        return any(line.split(":")[0] in names for line in lines) and shutil.which("newuidmap") is not None
    return False


def end_with_parent() -> None:
    """Should the parent be killed, a build that nobody waits for ends with all its processes: its group."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    seccomp.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    confine()
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
