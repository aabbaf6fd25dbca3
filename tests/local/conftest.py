from __future__ import annotations

import pytest

from rollout.client import KEY_VARIABLE


@pytest.fixture(autouse=True, scope="module")
def _as_a_user(tmp_path_factory):
    """Clients find the key by themselves: none in the environment, and no other service of the account."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(KEY_VARIABLE, raising=False)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state-home")))
        yield
