"""A Redis for all, emptied for each test."""

from __future__ import annotations

import pytest

from services.state.redis import connect
from tests.helpers.batch_world import World


@pytest.fixture
def world(server) -> World:
    client = connect(server.url)
    client.flushall()
    return World(client, server.url)
