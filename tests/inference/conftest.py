"""The embedded backend of the session, put back as it was after a test that changes it."""

from __future__ import annotations

import httpx
import pytest

from tests.helpers.llm_servers import DEMO_MODEL


@pytest.fixture
def restored(embedded):
    """The server, with its first weights, version and pause state put back afterwards."""
    yield embedded
    httpx.post(f"{embedded.url}/resume")
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(DEMO_MODEL)}}
    httpx.post(f"{embedded.url}/collective_rpc", json=body).raise_for_status()
    httpx.post(f"{embedded.url}/update_weight_version", json={"new_version": "default"})
