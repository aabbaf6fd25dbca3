"""Instances from real projects, made once, and a sandbox host of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import swe_instances
from tests.helpers.sandboxes import own_sandboxes, require_apptainer


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    """All instances; making them takes a package index and some twenty seconds."""
    require_apptainer()
    return swe_instances.instances()


@pytest.fixture(scope="session")
def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The instances by the name of their package."""
    return {row["spec"]["repo_dir"].split("/")[-1]: row for row in rows}


@pytest.fixture(scope="module")
def host(rows: list[dict[str, Any]]) -> Iterator[Path]:
    """The node's sandbox host for the tests of a module, which leave nothing on it."""
    with own_sandboxes() as state:
        yield state
