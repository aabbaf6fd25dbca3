"""A heap of backends in a Redis that is empty for each test."""

from __future__ import annotations

import pytest

from services.settings import Settings
from services.state.backends.store import BackendStore
from services.state.rollouts.store import RolloutStore
from tests.integration.conftest import emptied

client = emptied


@pytest.fixture
def heap(client):
    return BackendStore(client)


@pytest.fixture
def rollouts(client, server):
    return RolloutStore(client, Settings(redis_url=server.url, lease_s=30))
