"""A sandbox host of these tests' own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.sandboxes import leftovers, new_state, stop_host


@pytest.fixture(scope="package", autouse=True)
def sandbox_directory() -> Iterator[Path]:
    """Where in-process rollouts start their sandboxes; nothing is left there in the end."""
    before = os.environ.get("ROLLOUT_SANDBOX_DIR")
    state = new_state()
    os.environ["ROLLOUT_SANDBOX_DIR"] = str(state)
    yield state
    left = leftovers(state)
    stop_host(state)
    shutil.rmtree(state, ignore_errors=True)
    if before is None:
        del os.environ["ROLLOUT_SANDBOX_DIR"]
    else:
        os.environ["ROLLOUT_SANDBOX_DIR"] = before
    assert left == []
