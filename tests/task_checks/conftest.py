"""A sandbox host and a cache of bundles of these tests' own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sandbox import paths
from services.settings import settings
from tests.helpers.sandboxes import own_sandboxes
from workers import bundles
from workers.scoring import pool
from workers.task_checks.commands import check


def forget() -> None:
    """Have settings and what is made of them read anew."""
    settings.cache_clear()
    bundles._cache.cache_clear()


@pytest.fixture(scope="package", autouse=True)
def sandbox_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    bundled, toy = tmp_path_factory.mktemp("bundles"), paths.rollout_home() / "swe-toy"
    with own_sandboxes(ROLLOUT_BUNDLE_CACHE=str(bundled), ROLLOUT_SANDBOX_IMAGE_ROOTS=str(toy)):
        forget()
        yield
    pool.close()
    forget()


Checked = Callable[..., tuple[Result, dict[str, Any]]]


@pytest.fixture
def checked(tmp_path: Path) -> Checked:
    """Runs the command; gives what came of it, and its report."""

    def run(path: object, *options: str) -> tuple[Result, dict[str, Any]]:
        target = tmp_path / "report.json"
        result = CliRunner().invoke(check, [str(path), "--json", str(target), *options])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result, json.loads(target.read_text())

    return run


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes tasks as lines."""

    def write(*tasks: dict[str, Any]) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        return path

    return write
