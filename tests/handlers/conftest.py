"""A sandbox host of these tests' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.players import Player, player
from tests.helpers.sandboxes import own_sandboxes


@pytest.fixture(scope="package", autouse=True)
def sandbox_directory() -> Iterator[None]:
    """Where in-process rollouts start their sandboxes."""
    with own_sandboxes():
        yield


@pytest.fixture(scope="module")
def players() -> Iterator[Player]:
    """Who plays the rollouts of a module, with one scorer for all."""
    with player() as only:
        yield only
