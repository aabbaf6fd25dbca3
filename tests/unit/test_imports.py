"""The import direction of the architecture, read from the source itself."""

from __future__ import annotations

import ast
import graphlib
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
