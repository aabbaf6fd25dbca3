from __future__ import annotations

import pytest

from rollout.client import KEY_VARIABLE


@pytest.fixture(autouse=True)
def _as_a_user(monkeypatch, tmp_path_factory):
    """Clients find the key by themselves: none in the environment, and no other service of the account."""
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state-home")))
