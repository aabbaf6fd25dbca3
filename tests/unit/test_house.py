"""What docs/house.md says of the source: its paths, the core and its size, the wings and their doors."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.conftest import SECONDS, SHARED
from tests.helpers.stack import ROOT

PACKAGES = ("rollout", "services", "workers", "sandbox")
MOST_LINES = 10100
PATH = re.compile(r"`([^`]+)`")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of the page."""
    section = (ROOT / "docs" / "house.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


def files(cell: str) -> set[Path]:
    """The source files that a cell names; a folder stands for all that is in it."""
    paths = [ROOT / name for name in PATH.findall(cell)]
    absent = [str(path.relative_to(ROOT)) for path in paths if not path.exists()]
    assert not absent, f"docs/house.md names what is not there: {absent}"
    inside = (path.rglob("*") if path.is_dir() else [path] for path in paths)
    return {path for folder in inside for path in folder if path.suffix in (".py", ".lua")}


CORE = frozenset().union(*(files(row[1]) for row in rows("The core")))
WINGS = {name: (files(where), files(doors)) for name, where, doors in rows("The wings")}
IN_WINGS = frozenset().union(*(inside for inside, _ in WINGS.values()))


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    """The modules that a file imports, a submodule from its package included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path} imports relatively"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@functools.cache
def sources() -> dict[Path, set[str]]:
    """What each file of the product imports."""
    return {path: imported(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def test_the_path_of_an_hour_is_about_fifteen_files_of_the_core_and_its_way_in():
    hour = [row[0] for row in rows("One hour")]
    assert 13 <= len(hour) <= 17
    assert set().union(*map(files, hour)) - CORE == {ROOT / "services" / "gateway" / "routes" / "rollouts.py"}


def test_the_core_keeps_its_budget():
    assert {row[0] for row in rows("The core")} >= {"records and states", "chain", "stages", "agent loop"}
    lines = sum(len(path.read_text().splitlines()) for path in CORE)
    assert 4000 < lines <= MOST_LINES


@pytest.mark.parametrize("wing", WINGS)
def test_beside_other_wings_only_its_doors_import_a_wing_and_nothing_of_the_core_does(wing):
    inside, doors = WINGS[wing]
    assert inside and not inside & CORE and not doors & CORE
    modules = {module(path) for path in inside}
    entrants = {path for path, names in sources().items() if names & modules} - IN_WINGS
    assert {str(path.relative_to(ROOT)) for path in entrants} == {
        str(path.relative_to(ROOT)) for path in doors
    }


def test_each_word_has_one_meaning():
    words = [row[0] for row in rows("Words")]
    assert len(words) == len(set(words)) > 20


def test_the_files_that_the_order_of_the_tests_goes_by_are_there():
    starts = [*SECONDS, *(start for files in SHARED.values() for start in files)]
    assert [start for start in starts if not list(ROOT.glob(f"{start}*"))] == []
