"""A Redis for all, emptied for each test."""

from __future__ import annotations

import pytest

from tests.helpers.batch_world import World


@pytest.fixture
def world(emptied, server) -> World:
    return World(emptied, server.url)
