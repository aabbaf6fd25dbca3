"""A SWE instance of a few lines, for what agents try on it: without a package index, made in seconds.

Its repository has the fix as a later commit, as published images have.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from sandbox import paths, trees
from sandbox.images import ImageStore, squashfs
from sandbox.images.store import hand_over

REPO = "/repos/calc"
CODE = '''"""Arithmetic."""


def twice(x):
    """Two times x."""
    return x + x + 1


def half(x):
    """The half of x, rounded down."""
    return x // 2
'''
FIXED = CODE.replace("x + x + 1", "x + x")
OLD_TESTS = "from calc import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
TESTS = """import pytest
from calc import half, twice


@pytest.mark.parametrize(("x", "expected"), [(1, 2), (2, 4)])
def test_twice(x, expected):
    assert twice(x) == expected


def test_twice_of_zero():
    assert twice(0) == 0


def test_half():
    assert half(4) == 2
"""
UNITTESTS = '''import unittest
from calc import half, twice


class TestCalc(unittest.TestCase):
    def test_twice(self):
        """Twice is twice."""
        self.assertEqual(twice(-2), -4)
        self.assertTrue(twice(5) == 10)

    def test_half(self):
        self.assertEqual(half(4), 2)
'''
RUNNERS = {
    # As Django's `runtests.py` and SymPy's `bin/test` print, and as tox runs what it is told to.
    "bin/tox": """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
exec python3 -X dev -m pytest -rA -p no:cacheprovider "$@"
""",
    "run_unittest.py": """import sys, unittest
names = [path[:-3].replace("/", ".") for path in sys.argv[1:]]
unittest.main(module=None, argv=["run", "-v", *names])
""",
    "run_plain.py": """import importlib, sys
sys.path.insert(0, "tests")
failed = 0
for path in sys.argv[1:]:
    module = importlib.import_module(path.split("/")[-1][:-3])
    print(f"{path}[?]")
    for name, test in list(vars(module).items()):
        if name.startswith("test_"):
            try:
                test()
                print(name, "ok")
            except Exception:
                failed = 1
                print(name, "F")
sys.exit(failed)
""",
}
PLAIN_TESTS = """from calc import half, twice


def test_twice():
    assert twice(2) == 4


def test_half():
    assert half(4) == 2
"""
CASES = TESTS.split("def test_twice_of_zero")[0]

_BASE_FILES = {
    "calc.py": CODE,
    "tests/__init__.py": "",
    "tests/test_calc.py": OLD_TESTS,
    "README.rst": "Calc\n",
}


def instance(tests: str = TESTS, name: str = "tests/test_calc.py") -> dict[str, Any]:
    """A row whose specified tests are the text given; run by pytest, all to pass with the fix."""
    names = _functions(tests)
    return {
        "instance_id": "toy__calc-1",
        "repo": "toy/calc",
        "version": "1",
        "base_commit": "base",
        "environment_setup_commit": "base",
        "problem_statement": "twice(2) is 5.",
        "patch": diff("calc.py", CODE, FIXED),
        "test_patch": diff(name, OLD_TESTS if name in _BASE_FILES else "", tests),
        "FAIL_TO_PASS": json.dumps([f"{name}::{test}" for test in names if "half" not in test]),
        "PASS_TO_PASS": json.dumps([f"{name}::{test}" for test in names if "half" in test]),
        "image": str(image()),
        "spec": {
            "repo_dir": REPO,
            "setup": ['export PYTHONPATH="$PWD" PYTHONDONTWRITEBYTECODE=1'],
            "test_cmd": "python3 -m pytest -rA -p no:cacheprovider",
            "log_parser": "parse_log_pytest",
        },
    }


def cases_instance() -> dict[str, Any]:
    """The same with nothing but a parametrized test."""
    return instance(CASES)


def unittest_instance() -> dict[str, Any]:
    """The same with tests of `unittest`, run by pytest."""
    return instance(UNITTESTS)


def django_instance() -> dict[str, Any]:
    """The same, run and read as Django's tests are."""
    row = instance(UNITTESTS)
    spec = row["spec"] | {"test_cmd": "python3 run_unittest.py", "log_parser": "parse_log_django"}
    of = "tests.test_calc.TestCalc"
    # What has a docstring is printed with it.
    return row | {
        "FAIL_TO_PASS": json.dumps(["Twice is twice."]),
        "PASS_TO_PASS": json.dumps([f"test_half ({of}.test_half)"]),
        "spec": spec,
    }


def tox_instance() -> dict[str, Any]:
    """The same, run as Sphinx's tests are."""
    row = instance()
    setup = [*row["spec"]["setup"], 'export PATH="$PWD/bin:$PATH"']
    return row | {"spec": row["spec"] | {"setup": setup, "test_cmd": "tox --current-env -epy39 -v --"}}


def sympy_instance() -> dict[str, Any]:
    """The same, run and read as SymPy's tests are."""
    row = instance(PLAIN_TESTS)
    spec = row["spec"] | {"test_cmd": "python3 run_plain.py {files}", "log_parser": "parse_log_sympy"}
    return row | {"FAIL_TO_PASS": '["test_twice"]', "PASS_TO_PASS": '["test_half"]', "spec": spec}


def diff(path: str, old: str, new: str) -> str:
    """A patch that turns the text at a path into another one; `old` "" = a new file."""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True),
        new.splitlines(keepends=True),
        f"a/{path}" if old else "/dev/null",
        f"b/{path}",
    )
    kind = "" if old else "new file mode 100644\n"
    return f"diff --git a/{path} b/{path}\n{kind}" + "".join(lines)


def large_instance(files: int) -> dict[str, Any]:
    """The same in a repository with so many more files, in an image of its own."""
    return instance() | {"image": str(image(files))}


def image(more_files: int = 0) -> Path:
    """The unpacked image, made now if it is not there."""
    home = paths.rollout_home() / (f"swe-toy-{more_files}" if more_files else "swe-toy")
    home.mkdir(parents=True, exist_ok=True)
    base = ImageStore().find("base").stat()
    recipe = (
        Path(__file__).read_bytes() + f"{paths.sandbox_user()} {base.st_size} {base.st_mtime_ns}".encode()
    )
    rootfs = home / hashlib.sha256(recipe).hexdigest()[:12]
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not rootfs.exists():
            for old in home.iterdir():
                if old.is_dir():
                    trees.remove(old)
            part = home / "part"
            squashfs.unpack(ImageStore().find("base"), part)
            _make_repository(part, more_files)
            if os.geteuid() == 0:
                hand_over(part, paths.sandbox_user())
            part.rename(rootfs)
    return rootfs


def _make_repository(rootfs: Path, more_files: int) -> None:
    repository = rootfs / REPO.lstrip("/")
    more = {f"data/{number // 50}/file_{number}.py": f"NUMBER = {number}\n" for number in range(more_files)}
    for path, text in (_BASE_FILES | RUNNERS | more).items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    (repository / "bin/tox").chmod(0o755)
    _git(repository, "init", "-q", "-b", "main")
    _git(repository, "add", "-A")
    _git(repository, "commit", "-q", "-m", "Base")
    _git(repository, "tag", "base")
    (repository / "calc.py").write_text(FIXED)
    _git(repository, "commit", "-q", "-am", "Fix twice")


def _git(repository: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=toy", "-c", "user.email=toy@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=repository, check=True, capture_output=True)


def _functions(tests: str) -> list[str]:
    """Names of the tests, as pytest has them; of parametrized ones those of `TESTS`."""
    names, owner = [], ""
    for line in tests.splitlines():
        words = line.split("(")[0].split()
        if line.startswith("class "):
            owner = f"{words[1].rstrip(':')}::"
        elif words[:1] == ["def"] and words[1].startswith("test_"):
            prefix = owner if line.startswith(" ") else ""
            cases = ["[1-2]", "[2-4]"] if "expected)" in line else [""]
            names += [f"{prefix}{words[1]}{case}" for case in cases]
    return names
