"""One service for all tests of this directory: they break it one after the other."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.chaos.harness import Chaos
from tests.helpers.sandboxes import stop_host


@pytest.fixture(scope="package")
def service(tmp_path_factory):
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as sandbox_dir:
        try:
            with Chaos(tmp_path_factory.mktemp("chaos"), Path(sandbox_dir)) as service:
                yield service
        finally:
            stop_host(Path(sandbox_dir))


@pytest.fixture
def chaos(service):
    """The service with a living worker in each stage."""
    service.start_stages([stage for stage in ("init", "run", "eval") if stage not in service.workers])
    return service
