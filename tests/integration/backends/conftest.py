"""A heap of backends in a Redis that is empty for each test."""

from __future__ import annotations

import pytest

from services.settings import Settings
from services.state.backends.store import BackendStore
from services.state.redis import connect
from services.state.rollouts.store import RolloutStore


@pytest.fixture
def client(server):
    client = connect(server.url)
    client.flushall()
    return client


@pytest.fixture
def heap(client):
    return BackendStore(client)


@pytest.fixture
def rollouts(client, server):
    return RolloutStore(client, Settings(redis_url=server.url, lease_s=30))
