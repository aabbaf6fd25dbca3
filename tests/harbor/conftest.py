"""A sandbox host, a cache of bundles and an event loop of these tests' own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.schema import Limits, Rollout
from services.settings import settings
from tests.helpers.harbor_tasks import NO_NETWORK, Play, request, write_task
from tests.helpers.players import Player
from tests.helpers.sandboxes import own_sandboxes, stop_host
from workers import bundles
from workers.agent.replay import Action
from workers.handlers.harbor import Harbor


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


@pytest.fixture
def play(player: Player, tmp_path: Path) -> Play:
    """Plays turns on a task, written as `write_task` has it; `task` has further fields of the request's."""

    def play(*actions: Action | str, toml: str = NO_NETWORK, task: Any = None, **parts: Any) -> Rollout:
        limits, place = parts.pop("limits", Limits()), tmp_path / f"task-{len(list(tmp_path.iterdir()))}"
        directory = write_task(place, toml, **parts)
        turns = [*actions, "Done."]
        return player.play(Harbor(), request(directory, **(task or {})), turns, limits=limits)

    return play
