"""One stack for the clients of other servers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from services.state.fleet import FleetStore
from services.state.tenants import DEFAULT_TENANT
from tests.helpers.compatibility import Service
from tests.helpers.fake_engine import fake_engine
from tests.helpers.nemo_gym_client import GymClient
from tests.helpers.policy_script import VARIABLE, Plans
from tests.helpers.prorl_client import ProrlClient
from tests.helpers.stack import Stack, free_port
from workers.handlers.noop import Noop


@pytest.fixture(scope="package")
def plans(tmp_path_factory) -> Iterator[Plans]:
    plans = Plans(tmp_path_factory.mktemp("plans"))
    os.environ[VARIABLE] = str(plans.directory)
    yield plans
    del os.environ[VARIABLE]


@pytest.fixture(scope="package")
def idle(tmp_path_factory) -> Iterator[Stack]:
    """A gateway that knows a handler, and no worker yet: jobs stay queued. For the tests that come first."""
    directory = tmp_path_factory.mktemp("stack")
    env = {
        "ROLLOUT_HANDLERS": "tests.helpers.chaos_handlers:Gated,tests.helpers.handlers:all_handlers",
        "ROLLOUT_DATA_SOURCES": "my_math=math",
        "ROLLOUT_BACKEND_WAIT_S": "0.2",
        # A slow machine must not make the one LLM server look dead.
        "ROLLOUT_BACKEND_PROBE_S": "600",
        # These clients know of no keys.
        "ROLLOUT_COMPAT_PORT": str(free_port()),
        "ROLLOUT_COMPAT_TENANT": DEFAULT_TENANT,
    }
    with Stack(directory, directory / "sbx", env) as stack:
        FleetStore(stack.redis.client).put_handlers([Noop().info()])
        yield stack


@pytest.fixture(scope="package")
def service(idle, plans) -> Iterator[Service]:
    """The same stack with a worker. The policy plays plans; nobody has registered it yet."""
    with fake_engine(script="tests.helpers.policy_script:play", max_model_len=65536) as engine:
        idle.start_worker("init,run,eval", "all")
        yield Service(idle, plans, engine.url)


@pytest.fixture(scope="package")
def trainer(service) -> ProrlClient:
    client = ProrlClient(service.stack.compat_url)
    client.post("/add_llm_server", {"address": service.address}).raise_for_status()
    client.start()
    return client


@pytest.fixture(scope="package")
def collector(service, trainer) -> GymClient:
    return GymClient(service.stack.compat_url)


@pytest.fixture
def waiting(idle) -> ProrlClient:
    workers = idle.client.status()["workers"]
    assert not any(workers.values()), "test_jobs.py comes first, while there is no worker"
    client = ProrlClient(idle.compat_url)
    client.start()
    return client
