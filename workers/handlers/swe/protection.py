"""Which changes of the agent do not belong into its patch.

The patch is what is scored, so it must fix the code and leave alone what judges the code. Dropped are

* the specified tests: files of the test patch, files the tests' names begin with, and the `test` or `tests`
  directories around them, whose helpers run with the tests;
* what runs the tests or configures their run or the start of Python: `runtests.py`, `conftest.py`,
  `pytest.ini`, `setup.cfg`, `sitecustomize.py`, metadata of packages with their plug-ins, new modules that
  stand before the standard library's or pytest's;
* what programs leave behind, such as `__pycache__`.

The official harness applies all of it but overwritten tests. A file that the reference fix touches is kept in
any case but the first.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

TEST_DIRECTORIES = {"test", "tests", "r2e_tests"}
MACHINERY = {
    *(".coveragerc", ".pytest.ini", ".pytest.toml", "conftest.py", "noxfile.py", "pyproject.toml"),
    *("pytest.ini", "pytest.toml", "runtests.py", "setup.cfg", "setup.py", "sitecustomize.py", "tox.ini"),
    "usercustomize.py",
}
RUNNER_SCRIPTS = {"bin/test"}
"""Of SymPy; what it calls is called `runtests.py`, as Django's runner is."""
METADATA = (".dist-info", ".egg-info", ".egg-link", ".pth")
LEFT_BEHIND = {
    *(".DS_Store", ".coverage", ".hypothesis", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache"),
    *(".ruff_cache", ".tox", ".venv", "__pycache__", "node_modules"),
}
LEFT_BEHIND_ENDINGS = (".orig", ".pyc", ".pyo", ".rej")
IMPORT_ROOTS = ("", "src/", "lib/")
"""Directories of a repository that tests have on Python's path."""
RUNNERS = {
    *("_pytest", "attr", "coverage", "exceptiongroup", "iniconfig", "packaging", "pip", "pkg_resources"),
    *("pluggy", "py", "pytest", "rollout_recorder", "setuptools", "tomli", "xdist"),
}
SHADOWED = RUNNERS | sys.stdlib_module_names | {"distutils", "imp", "asyncore", "asynchat", "smtpd"}


class Protection:
    """The rules for one instance."""

    def __init__(
        self, test_files: Sequence[str], gold_files: Collection[str], base_roots: Collection[str] = ()
    ) -> None:
        """
        Args:
            base_roots: Names directly in the import roots of the base tree, such as `src/pkg` or `setup.py`.
        """
        self._tests = set(test_files)
        self._gold = set(gold_files)
        self._modules = {_module(name) for name in base_roots} - {""}
        self._directories = {_test_directory(name) for name in test_files} - {None}

    def objection(self, path: str, added: bool) -> str | None:
        """Why a change at `path` is dropped, in a word; None = it stays. `added`: not in the base."""
        if path in self._tests:
            return "test"
        if path in self._gold:
            return None
        if any(path == directory or path.startswith(f"{directory}/") for directory in self._directories):
            return "test"
        parts = path.split("/")
        if parts[-1] in MACHINERY or path in RUNNER_SCRIPTS or any(part.endswith(METADATA) for part in parts):
            return "machinery"
        if added and _module(path) in SHADOWED - self._modules:
            return "machinery"
        if added and (LEFT_BEHIND & set(parts) or path.endswith(LEFT_BEHIND_ENDINGS)):
            return "left behind"
        return None


def _test_directory(path: str) -> str | None:
    """The outermost directory around a test file that is one of tests."""
    parts = path.split("/")
    for number, part in enumerate(parts[:-1]):
        if part in TEST_DIRECTORIES:
            return "/".join(parts[: number + 1])
    return None


def _module(path: str) -> str:
    """The top-level module that a path is of, seen from the import root it lies in."""
    for root in sorted(IMPORT_ROOTS, key=len, reverse=True):
        if path.startswith(root):
            return path.removeprefix(root).split("/")[0].split(".")[0]
    return ""
