"""The import direction of the architecture, read from the source itself."""

from __future__ import annotations

import ast
import configparser
import graphlib
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.helpers.stack import ROOT

FORBIDDEN = {
    "rollout": {"services", "workers", "sandbox", "flask", "celery", "redis", "torch"},
    "sandbox": {"rollout", "services", "workers", "flask", "celery", "redis", "torch"},
    "services/state": {"workers", "sandbox", "flask"},
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

OWN = {"rollout", "services", "workers", "sandbox"}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
            if node.module.startswith("services.gateway"):
                names.add("services.gateway")
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_run_one_way(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        wrong = imported(path) & FORBIDDEN[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_workers_do_not_reach_into_the_gateway():
    for path in sorted((ROOT / "workers").rglob("*.py")):
        assert "services.gateway" not in imported(path), path


def modules_imported(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of workers that one imports, for its types alone or in a function included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            # A submodule that is imported from its package is meant, and not the package.
            names |= members & modules.keys() or {node.module}
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
    for path in sorted((ROOT / package).rglob("*.py")):
        for name in loaded(path) - sys.stdlib_module_names - OWN:
            sources = {normal(source) for source in distributions.get(name, [name])}
            assert sources & declared, f"{path.relative_to(ROOT)} imports {name}, which {extras} lack"


def loaded(path: Path) -> set[str]:
    """The packages that a module imports when it is loaded itself."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-")
