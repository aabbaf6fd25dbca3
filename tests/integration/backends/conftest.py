"""A heap of backends in a Redis that is empty for each test."""

from __future__ import annotations

import pytest

from services.settings import Settings
from services.state.rollouts.store import RolloutStore
from tests.helpers.heap import Heap
from tests.integration.conftest import emptied

client = emptied


@pytest.fixture
def heap(client):
    return Heap(client)


@pytest.fixture
def rollouts(client, server):
    return RolloutStore(client, Settings(redis_url=server.url, lease_s=30))
