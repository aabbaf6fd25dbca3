"""docs/security.md claims nothing without a test: each row of its attacks names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
TEST = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")
TABLES = [part for part in PAGE.split("\n\n") if part.startswith("| Wants |")]
ROWS = [row for table in TABLES for row in table.splitlines()[2:]]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_tests_that_exist(row):
    named = TEST.findall(row.rsplit("|", 2)[1])
    assert named, "a claim without a test"
    for path, function in named:
        assert (ROOT / "tests" / path).is_file(), path
        assert not function or function in functions_of(ROOT / "tests" / path), (path, function)


def test_each_subject_of_the_attacks_is_on_the_page():
    subjects = {f"attacks/{path.name}" for path in (ROOT / "tests" / "attacks").glob("test_*.py")}
    assert len(ROWS) > 20
    assert subjects == {path for path, _ in TEST.findall(PAGE) if path.startswith("attacks/")}
