"""A sandbox host, a cache of bundles and an event loop of these tests' own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.settings import settings
from tests.helpers.players import Player
from tests.helpers.sandboxes import own_sandboxes, stop_host
from workers import bundles


@pytest.fixture(scope="package", autouse=True)
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where rollouts of these tests start their sandboxes, and find the bundles of their tasks."""
    variables = {"ROLLOUT_BUNDLE_CACHE": str(tmp_path_factory.mktemp("bundles")), "ROLLOUT_TASK_EGRESS": "1"}
    with own_sandboxes(**variables) as state:
        settings.cache_clear()
        bundles._cache.cache_clear()
        yield state
        stop_host(state)  # with the sandboxes that it keeps ready
    settings.cache_clear()
    bundles._cache.cache_clear()


@pytest.fixture(scope="package")
def player(host: Path) -> Iterator[Player]:
    """Plays the rollouts of all tests on one event loop."""
    with asyncio.Runner() as runner:
        yield Player(runner)
