"""The pack: agent programs as sandboxes are shown them, read-only, made once of the package registries.

It is `<ROLLOUT_HOME>/harnesses`: a directory `<name>@<version>` a part, and a link `<name>` to it, which
follows when the part is whole. Node and a Python are parts too, which programs share; they ask little of a
sandbox's image (Node: glibc and libstdc++; Python: a shell).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sandbox import paths
from workers.harnesses.base import Harness

Say = Callable[[str], None]
OLDEST_PYTHON = (3, 12)
"""That all programs of PyPI here run with."""
INSTALL_TIMEOUT_S = 1200
RECORD = "built.json"
"""In each part: what it was made of."""
LAST_LINES = 8
"""Of a failed installation, which the error shows."""
LEFT_OUT = ("site-packages", "dist-packages", "test", "idlelib", "tkinter", "ensurepip", "config-*")
"""Of Python's library."""
START = """\
#!/bin/sh
here=${{0%/bin/*}}
set -- "$here/bin/python3" -IB "$here/start.py" "$@"
exec "$here/libs/{loader}" --inhibit-cache --library-path "$here/libs" "$@"
"""
START_PY = """\
import runpy, sys

_, site, name, *arguments = sys.argv
sys.argv = [name, *arguments]
sys.path.insert(0, site)
(runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
"""
LOOK = (
    "import json, sys, sysconfig as s;"
    "print(json.dumps([sys.version_info[:3], sys.executable, s.get_path('stdlib')]))"
)


class PackError(Exception):
    """A part cannot be made, or is not there; the message names it and what to do."""


@dataclass(frozen=True)
class Part:
    """One directory of the pack."""

    name: str
    version: str
    packages: tuple[str, ...] = ()
    """With their versions: `npm:opencode-ai@1.18.33`."""

    @property
    def place(self) -> Path:
        return directory() / f"{self.name}@{self.version}"

    @property
    def built(self) -> bool:
        """Whether it is there, made of just these packages, and is what its name leads to."""
        link = directory() / self.name
        try:
            record = json.loads((self.place / RECORD).read_text())
            return record["packages"] == list(self.packages) and link.readlink().name == self.place.name
        except (OSError, ValueError, KeyError):
            return False


@dataclass(frozen=True)
class Interpreter:
    """A Python of this machine."""

    version: str
    program: Path
    library: Path


@cache
def versions() -> dict[str, str]:
    """The version of each package that programs are made of."""
    return json.loads(Path(__file__).with_name("versions.json").read_text())


def directory() -> Path:
    """The pack on this machine."""
    return paths.rollout_home() / "harnesses"


def part(harness: Harness) -> Part | None:
    """What a harness is made of; None = nothing of its own.

    Raises:
        PackError: `versions.json` has no version of a package of it.
    """
    if not harness.packages:
        return None
    pinned = dict(versions(), **getattr(harness, "versions", {}))
    if missing := [package for package in harness.packages if package not in pinned]:
        raise PackError(f"{harness.name}: versions.json pins no version of {', '.join(missing)}")
    packages = tuple(f"{package}@{pinned[package]}" for package in harness.packages)
    return Part(harness.name, pinned[harness.packages[0]], packages)


def require(harness: Harness) -> None:
    """Raise PackError unless all that the harness needs is in the pack."""
    own = part(harness)
    if own is None:
        return
    shared = {"node" if package.startswith("npm:") else "python" for package in own.packages}
    lacks = [name for name in sorted(shared) if not (directory() / name / RECORD).exists()]
    if lacks or not own.built:
        what = ", ".join([*lacks, *([] if own.built else [f"{own.name} {own.version}"])])
        raise PackError(f"{what}: not in {directory()}; make it by `rollout harness build {harness.name}`")


def build(harness: Harness, say: Say, *, python: str | None = None, force: bool = False) -> bool:
    """Make the part of a harness, and those that it shares, unless they are there. Returns whether it did.

    Args:
        python: Program of the interpreter to copy; None = one of this machine that is new enough.
        force: Make its own part anew.

    Raises:
        PackError: What failed, with the end of its output. What was there before is there still.
    """
    own = part(harness)
    if own is None:
        return False
    directory().mkdir(parents=True, exist_ok=True)
    with _locked(say):
        made = False
        if any(package.startswith("npm:") for package in own.packages):
            node = Part("node", versions()["npm:node"], (f"npm:node@{versions()['npm:node']}",))
            made |= _make(node, _install_node, say)
        interpreter = None
        if any(package.startswith("pypi:") for package in own.packages):
            interpreter = _interpreter(python)
            shared = Part("python", interpreter.version)
            made |= _make(shared, lambda _, place: _copy_python(interpreter, place), say)
        return made | _make(own, lambda it, place: _install(it, place, interpreter), say, force)


@contextmanager
def _locked(say: Say) -> Iterator[None]:
    with (directory() / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is under way; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(it: Part, fill: Callable[[Part, Path], None], say: Say, force: bool = False) -> bool:
    """Have `fill` make the part beside its place; then put it there, and lead its name to it."""
    if it.built and not force:
        return False
    say(f"{it.name} {it.version}: installing")
    with tempfile.TemporaryDirectory(prefix=".new-", dir=directory()) as work:
        new, old, link = Path(work, "new"), Path(work, "old"), Path(work, "link")
        new.mkdir()
        fill(it, new)
        (new / RECORD).write_text(json.dumps({"packages": it.packages}))
        for path in [new, *new.rglob("*")]:
            if not path.is_symlink():  # a sandbox's user is another one
                path.chmod(
                    path.stat().st_mode | (0o555 if path.is_dir() or os.access(path, os.X_OK) else 0o444)
                )
        if it.place.exists():
            it.place.rename(old)
        new.rename(it.place)
        link.symlink_to(it.place.name)
        link.replace(directory() / it.name)
    return True


def _run(it: Part, argv: list[str], cwd: Path) -> None:
    """Run an installer.

    Raises:
        PackError: It is not there, failed, or took too long.
    """
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise PackError(
            f"{it.name}: there is no `{argv[0]}` here (Debian: apt-get install {argv[0]})"
        ) from None
    except subprocess.TimeoutExpired:
        raise PackError(f"{it.name}: `{argv[0]}` did not end within {INSTALL_TIMEOUT_S} s") from None
    if done.returncode:
        end = "\n".join([line for line in done.stdout.splitlines() if line.strip()][-LAST_LINES:])
        raise PackError(f"{it.name}: cannot install {', '.join(it.packages)}:\n{end}")


def _install(it: Part, place: Path, interpreter: Interpreter | None) -> None:
    names = {
        kind: [p.partition(":")[2] for p in it.packages if p.startswith(kind)] for kind in ("npm:", "pypi:")
    }
    if names["npm:"]:
        quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--no-progress")
        _run(it, ["npm", "install", "--prefix", str(place), *quiet, *names["npm:"]], place)
    if names["pypi:"] and interpreter:
        pinned = ["==".join(name.rsplit("@", 1)) for name in names["pypi:"]]
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(interpreter.program),
            "--disable-pip-version-check",
        ]
        quiet = ("--no-input", "--quiet", "--root-user-action=ignore", "--no-warn-script-location")
        _run(it, [*pip, "install", *quiet, "--target", str(place / "site"), *pinned], place)


def _install_node(it: Part, place: Path) -> None:
    _install(it, place, None)
    (place / "bin").mkdir()
    (place / "node_modules/node/bin/node").rename(place / "bin/node")
    shutil.rmtree(place / "node_modules")


def _interpreter(named: str | None) -> Interpreter:
    """The one that was named; else this one, or the oldest of the machine, that is new enough.

    Raises:
        PackError: There is none.
    """
    home = Path.home()
    kept = (Path(os.environ.get("PYENV_ROOT", home / ".pyenv"), "versions"), home / ".local/share/uv/python")
    on_path = [shutil.which(f"python3.{minor}") for minor in range(OLDEST_PYTHON[1], OLDEST_PYTHON[1] + 4)]
    programs = [str(path) for place in kept for path in sorted(place.glob("*3.*/bin/python3"))]
    for program in [named] if named else filter(None, [sys.executable, *on_path, *programs]):
        # A program of that name may be a stand-in that leads nowhere.
        looked = subprocess.run([program, "-IS", "-c", LOOK], capture_output=True, text=True, check=False)
        if looked.returncode == 0:
            version, executable, library = json.loads(looked.stdout)
            if tuple(version) >= OLDEST_PYTHON:
                return Interpreter(".".join(map(str, version)), Path(executable).resolve(), Path(library))
    wanted = ".".join(map(str, OLDEST_PYTHON))
    raise PackError(
        f"python: {named or 'no interpreter here'} is not Python {wanted} or newer; name one by --python"
    )


def _copy_python(interpreter: Interpreter, place: Path) -> None:
    """Copy an interpreter with all libraries that it loads, its C library too: no image need have any."""
    target = place / "lib" / interpreter.library.name
    shutil.copytree(interpreter.library, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (place / "bin").mkdir()
    shutil.copy2(interpreter.program, place / "bin/python3")
    loaded = subprocess.run(
        ["ldd", interpreter.program, *target.rglob("*.so")], capture_output=True, text=True, check=False
    ).stdout
    # What wheels may expect of a machine beside these.
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    loaded += "\n".join(
        line for line in known.splitlines() if "64" in line and re.search(r"(stdc\+\+|gcc_s)\.so", line)
    )
    libraries = {Path(path) for path in re.findall(r"(?:=>\s|^\s+)(/\S+\.so\S*)", loaded, re.MULTILINE)}
    (place / "libs").mkdir()
    for library in libraries:
        shutil.copy2(library, place / "libs" / library.name)
    loader = next(path.name for path in libraries if path.name.startswith("ld-"))
    (place / "bin/start").write_text(START.format(loader=loader))
    (place / "bin/start").chmod(0o755)
    (place / "start.py").write_text(START_PY)
