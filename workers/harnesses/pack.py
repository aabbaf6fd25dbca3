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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from sandbox.paths import pack_dir as directory
from workers.harnesses.base import Harness

Say = Callable[[str], None]
OLDEST_PYTHON = (3, 12)
"""That all programs of PyPI here run with."""
INSTALL_TIMEOUT_S = 1800
RECORD = "built.json"
"""In each part: what it was made of."""
LAST_LINES = 8
"""Of a failed installation, which the error shows."""
LEFT_OUT = ("site-packages", "dist-packages", "test", "idlelib", "tkinter", "ensurepip", "config-*")
"""Of Python's library."""
WRAPPER = """\
#!/bin/sh
here=${{0%/bin/*}}
exec "$here/libs/{loader}" --inhibit-cache --library-path "$here/libs" "$here/bin/python3" {options} "$@"
"""
START = """\
import runpy, sys

_, site, name, *arguments = sys.argv
sys.argv = [name, *arguments]
sys.path.insert(0, site)
(runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
"""
LOOK = "import sys, sysconfig as s; print(*sys.version_info[:3], sys.executable, s.get_path('stdlib'))"


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
        linked = link.is_symlink() and link.readlink().name == self.place.name
        return linked and _record(self.name).get("packages") == list(self.packages)

    def of(self, registry: str) -> list[str]:
        """What of its packages a registry has, without its prefix."""
        return [package.removeprefix(registry) for package in self.packages if package.startswith(registry)]


@cache
def versions() -> dict[str, str]:
    """The version of each package that programs are made of."""
    return json.loads(Path(__file__).with_name("versions.json").read_text())


def part(harness: Harness) -> Part | None:
    """What a harness is made of; None = nothing of its own. PackError when a package has no version."""
    packages = [f"{name}@{versions()[name]}" if name in versions() else name for name in harness.packages]
    for package in packages:
        if not re.fullmatch(r"(npm|pypi):.+@[^@/]+", package):
            raise PackError(f"{harness.name}: no version of {package}, in versions.json or behind an @")
    if any(package.startswith("pypi:") for package in packages):
        # What is compiled in them serves that Python alone.
        packages.append(f"python@{_record('python').get('version', 'none')}")
    return Part(harness.name, packages[0].rpartition("@")[2], tuple(packages)) if packages else None


def require(harness: Harness) -> None:
    """Raise PackError unless all that the harness needs is in the pack."""
    own = part(harness)
    needed = [] if own is None else [own, *([_node()] if own.of("npm:") else [])]
    if lacks := " and ".join(f"{it.name} {it.version}" for it in needed if not it.built):
        raise PackError(f"{lacks}: not in {directory()}; make it by `rollout harness build {harness.name}`")


def build(harness: Harness, say: Say, python: str | None = None) -> bool:
    """Make the part of a harness, and those that it shares, unless they are there. Returns whether it did.

    Args:
        python: Program of the interpreter to copy; None = what was copied before, else one of this machine.

    Raises:
        PackError: What failed, with the end of its output. What was there before is there still.
    """
    own = part(harness)
    if not python:
        with suppress(PackError):
            require(harness)
            return False
    if own is None:
        return False
    directory().mkdir(parents=True, exist_ok=True)
    with (directory() / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is under way; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if own.of("npm:"):
            _make(_node(), _install_node, say)
        if own.of("pypi:") and (python or not _record("python")):
            version, program, library = _interpreter(python)
            _make(Part("python", version), partial(_copy_python, program, library), say)
        return _make(part(harness) or own, _install, say)


def _node() -> Part:
    return Part("node", versions()["npm:node"], (f"npm:node@{versions()['npm:node']}",))


def _record(name: str) -> dict[str, Any]:
    """What the part that the name leads to was made of; nothing where it is not there."""
    try:
        return json.loads((directory() / name / RECORD).read_text())
    except (OSError, ValueError):
        return {}


def _make(it: Part, fill: Callable[[Part, Path], None], say: Say) -> bool:
    """Have `fill` make the part beside its place; then put it there, and lead its name to it."""
    if it.built:
        return False
    say(f"{it.name} {it.version}: installing")
    with tempfile.TemporaryDirectory(prefix=".new-", dir=directory()) as work:
        new, link = Path(work, "new"), Path(work, "link")
        new.mkdir()
        fill(it, new)
        (new / RECORD).write_text(json.dumps({"version": it.version, "packages": it.packages}))
        for path in [new, *new.rglob("*")]:
            if not path.is_symlink():  # a sandbox's user is another one
                path.chmod(path.stat().st_mode | (0o555 if os.access(path, os.X_OK) else 0o444))
        if it.place.exists():
            it.place.rename(Path(work, "old"))
        new.rename(it.place)
        link.symlink_to(it.place.name)
        link.replace(directory() / it.name)
    return True


def _run(it: Part, argv: list[str]) -> None:
    """Run an installer; PackError when it is not there, fails, or takes too long."""
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "errors": "replace"}
    try:
        subprocess.run(argv, stdout=subprocess.PIPE, timeout=INSTALL_TIMEOUT_S, check=True, **options)
    except FileNotFoundError:
        raise PackError(f"{it.name}: there is no `{argv[0]}` here; install it") from None
    except subprocess.SubprocessError as error:
        lines = str(getattr(error, "output", "")).splitlines()
        end = "\n".join([line for line in lines if line.strip()][-LAST_LINES:] or [str(error)])
        raise PackError(f"{it.name}: cannot install {', '.join(it.packages)}:\n{end}") from None


def _install(it: Part, place: Path) -> None:
    if names := it.of("npm:"):
        quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--no-progress")
        _run(it, ["npm", "install", "--prefix", str(place), *quiet, *names])
    if names := it.of("pypi:"):
        pip = [sys.executable, "-m", "pip", "--python", str(directory() / "python/bin/python"), "install"]
        quiet = ("--disable-pip-version-check", "--no-input", "--quiet", "--root-user-action=ignore")
        pinned = [name.replace("@", "==") for name in names]
        _run(it, [*pip, *quiet, "--target", str(place / "site"), *pinned])


def _install_node(it: Part, place: Path) -> None:
    _install(it, place)
    (place / "bin").mkdir()
    (place / "node_modules/node/bin/node").rename(place / "bin/node")
    shutil.rmtree(place / "node_modules")


def _interpreter(named: str | None) -> tuple[str, Path, Path]:
    """Version, program and library of the one named, else of one here; PackError where none is new enough."""
    home, (major, oldest) = Path.home(), OLDEST_PYTHON
    kept = (Path(os.environ.get("PYENV_ROOT", home / ".pyenv"), "versions"), home / ".local/share/uv/python")
    on_path = [shutil.which(f"python{major}.{minor}") for minor in range(oldest, oldest + 4)]
    programs = [str(path) for place in kept for path in sorted(place.glob(f"*{major}.*/bin/python3"))]
    for program in [named] if named else filter(None, [sys.executable, *on_path, *programs]):
        with suppress(OSError, ValueError):  # not there, or a stand-in that leads nowhere
            looked = subprocess.run([program, "-IS", "-c", LOOK], capture_output=True, text=True, check=False)
            *version, executable, library = looked.stdout.split()
            if tuple(map(int, version)) >= OLDEST_PYTHON:
                return ".".join(version), Path(executable).resolve(), Path(library)
    wanted = f"Python {major}.{oldest} or newer"
    raise PackError(f"python: {named or 'no interpreter here'} is not {wanted}; name one by --python")


def _copy_python(program: Path, library: Path, _: Part, place: Path) -> None:
    """Copy an interpreter with all libraries that it loads, its C library too: no image need have any."""
    target = place / "lib" / library.name
    shutil.copytree(library, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (place / "bin").mkdir()
    shutil.copy2(program, place / "bin/python3")
    read = partial(subprocess.run, capture_output=True, text=True, check=False)
    # And what wheels may expect of a machine.
    known = [line for line in read(["/sbin/ldconfig", "-p"]).stdout.splitlines() if "64" in line]
    lines = read(["ldd", program, *target.rglob("*.so")]).stdout.splitlines()
    lines += [line for line in known if re.search(r"(stdc\+\+|gcc_s)\.so", line)]
    (place / "libs").mkdir()
    for path in {found[1] for line in lines if (found := re.search(r"(?:=>\s|^\s+)(/\S+\.so\S*)", line))}:
        shutil.copy2(path, place / "libs")
    loader = next((place / "libs").glob("ld-*")).name
    for name, options in {"python": "", "start": '-IB "$here/start.py"'}.items():
        (place / "bin" / name).write_text(WRAPPER.format(loader=loader, options=options))
        (place / "bin" / name).chmod(0o755)
    (place / "start.py").write_text(START)
