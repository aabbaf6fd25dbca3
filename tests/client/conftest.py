from __future__ import annotations

import pytest

from rollout.client import Client
from tests.client.fake_gateway import FakeGateway


@pytest.fixture
def gateway():
    with FakeGateway() as fake:
        yield fake


@pytest.fixture
def client(gateway):
    with Client(gateway.url, timeout=5.0, retry_for=5.0) as client:
        yield client
