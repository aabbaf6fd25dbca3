"""The import direction of the architecture, read from the source itself."""

from __future__ import annotations

import configparser
import dis
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from types import CodeType

import pytest

from tests.helpers.stack import ROOT

FORBIDDEN = {
    "rollout": {"services", "workers", "sandbox", "flask", "celery", "redis", "torch"},
    "sandbox": {"rollout", "services", "workers", "flask", "celery", "redis", "torch"},
    "services/state": {"workers", "sandbox", "flask"},
    "services/capture": {"sandbox", "flask", "celery", "torch", "services.gateway"},
    "services/engines": {"workers", "sandbox", "flask", "celery", "torch", "services.gateway"},
    "services/gateway": {"workers", "sandbox"},
    "services/inference": {"workers", "sandbox", "celery", "redis", "flask"},
    "services/launch": {"workers"},
    "services/launch/slurm": {"workers", "flask", "services.gateway"},
    "workers": {"flask"},
}

EXTRAS = [
    ("services/engines", ["gateway"]),
    ("services/engines", ["worker"]),
    ("services/gateway", ["gateway"]),
    ("services/inference", ["inference"]),
    ("services/state", ["gateway"]),
    ("services/state", ["worker"]),
    # Only the processes that score load what needs the last three.
    ("workers", ["worker", "math", "reasoning-gym", "stem"]),
]
"""These extras, together, install all that a folder imports when it is loaded."""

PARTS = {"pydantic-core": "pydantic", "redis": "celery", "sympy": "reasoning-gym", "werkzeug": "flask"}
"""Distributions that come with another one, which our bound on that other one covers."""

OWN = {"rollout", "services", "services.gateway", "workers", "sandbox"}


def imports(path: Path, inside: bool = True) -> Iterator[tuple[str, set[str]]]:
    """What a module imports, relative names aside: each name, and what is taken from it; `inside`: in its
    functions, too.

    Read from the compiled code: `ast.parse` counts its depth for the whole interpreter, and fails with a
    SystemError where another thread's Python runs in between (python/cpython#106905).
    """
    codes = [compile(path.read_text(), path, "exec", dont_inherit=True)]
    while codes:
        code = codes.pop()
        if inside:
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for level, members, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname == "IMPORT_NAME":
                assert level.opname == members.opname == "LOAD_CONST", (path, step)
                if level.argval == 0:
                    yield step.argval, set(members.argval or ())


def imported(path: Path, inside: bool = True) -> set[str]:
    names = {name for name, _ in imports(path, inside)}
    gateway = {"services.gateway"} if any(name.startswith("services.gateway") for name in names) else set()
    return {name.split(".")[0] for name in names} | gateway


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_run_one_way(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        wrong = imported(path) & FORBIDDEN[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_who_makes_chains_of_captured_turns_loads_nothing_that_serves_them():
    """Workers and the gateway take `chains` alone of capture, which takes codec and router of the workers."""
    load = "import sys, services.capture.chains; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", load], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {name.split(".")[0] for name in loaded.stdout.split()}.isdisjoint({"workers", "torch", "aiohttp"})
    taken = {
        name
        for package in ("workers", "services/gateway", "services/state")
        for path in (ROOT / package).rglob("*.py")
        for name, _ in imports(path)
        if name.startswith("services.capture")
    }
    assert taken == {"services.capture.chains"}


def test_workers_do_not_reach_into_the_gateway():
    for path in sorted((ROOT / "workers").rglob("*.py")):
        assert "services.gateway" not in imported(path), path


def modules_imported(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of workers that one imports, for its types alone or in a function included."""
    names = set()
    for name, members in imports(path):
        # A submodule that is imported from its package is meant, and not the package.
        names |= {f"{name}.{member}" for member in members} & modules.keys() or {name}
    return names & modules.keys()


def test_modules_of_workers_import_each_other_in_no_circle():
    paths = sorted((ROOT / "workers").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    modules = {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}
    graph = {name: modules_imported(path, modules) for name, path in modules.items()}
    assert len(graph["workers.process"]) > 2
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(("package", "extras"), EXTRAS)
def test_what_a_package_imports_is_installed_with_its_extras(package, extras):
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    values = [config["options.extras_require"][extra] for extra in extras]
    lines = "\n".join([config["options"]["install_requires"], *values]).split("\n")
    declared = {normal(re.match(r"[\w-]+", line)[0]) for line in lines if line}
    declared |= {part for part, whole in PARTS.items() if whole in declared}
    distributions = packages_distributions()
    elsewhere = ROOT / "workers/handlers/environments/inside"  # by Pythons of their own, with their packages
    for path in sorted(set((ROOT / package).rglob("*.py")) - set(elsewhere.rglob("*.py"))):
        for name in imported(path, inside=False) - sys.stdlib_module_names - OWN:
            sources = {normal(source) for source in distributions.get(name, [name])}
            assert sources & declared, f"{path.relative_to(ROOT)} imports {name}, which {extras} lack"


def normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-")
