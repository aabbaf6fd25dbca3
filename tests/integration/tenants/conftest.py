"""A gateway with a real Redis, its keys, and calls in the name of tenants."""

from __future__ import annotations

import pytest

from services.gateway import auth
from tests.helpers.tenants import World


@pytest.fixture
def world(server, monkeypatch):
    # Keys made in a test count at once; the test of the cache sets its own.
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    return World(server.url)
