"""One stack for all integration tests: real Redis, gunicorn, Celery fleets, sandboxes, a real model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from services.gateway import auth
from services.state.redis import connect
from tests.helpers import swe_toy
from tests.helpers.capture import capture_world
from tests.helpers.sandboxes import leftovers, stop_host
from tests.helpers.stack import Stack, wait_until
from tests.helpers.tenants import World


@pytest.fixture(scope="package")
def stack(tmp_path_factory, embedded):
    """Gateway and the three fleets, with the embedded backend registered."""
    # Socket paths end at 107 bytes: pytest's own directories are too long for them.
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as sandbox_dir:
        try:
            # Tests count attempts, and beside others a worker may stand still for a stack's usual 3 s.
            env = {"ROLLOUT_LEASE_S": "10"}
            with Stack(tmp_path_factory.mktemp("stack"), Path(sandbox_dir), env) as stack:
                stack.start_workers({stage: stage for stage in ("init", "run", "eval")})
                stack.client.add_backend(embedded.url)
                yield stack
                wait_until(lambda: leftovers(stack.sandbox_dir) == [], 120, "all sandboxes to be gone")
        finally:
            stop_host(Path(sandbox_dir))


@pytest.fixture(scope="package")
def captured(tmp_path_factory):
    """A service with two processes of capture, for all files whose programs follow plans.

    What a test breaks it mends: the engine is fast and well again, and of each kind of process there is one.
    """
    with pytest.MonkeyPatch.context() as patch:
        # An image of `swe_toy` is a directory, too.
        patch.setenv("ROLLOUT_SANDBOX_IMAGE_ROOTS", str(swe_toy.image().parent))
        engine = {"max_model_len": 65536, "script": "tests.helpers.product_script:turn"}
        with capture_world(tmp_path_factory.mktemp("captured"), processes=2, **engine) as world:
            yield world


@pytest.fixture
def client(stack):
    return stack.client


@pytest.fixture
def emptied(server):
    """A client of the file's Redis, which is empty; a file that has no other calls it `client`."""
    client = connect(server.url)
    client.flushall()
    return client


@pytest.fixture
def world(server, monkeypatch):
    """A gateway in this process, its keys, and calls in the name of tenants."""
    # Keys made in a test count at once; the test of the cache sets its own.
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    return World(server.url)
