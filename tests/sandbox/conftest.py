"""Real containers on private state directories; one host per test module where tests do not disturb it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandbox.container import Container
from sandbox.errors import ImageError, RuntimeUnavailable
from sandbox.images import ImageStore
from sandbox.runtimes import RUNTIMES
from sandbox.spec import SandboxInfo, SandboxSpec
from sandbox.watchdog import Watchdog
from tests.helpers.blocking import SyncHostClient
from tests.helpers.sandboxes import new_state

THREADS = ThreadPoolExecutor(16, "tests")
"""For what goes on while a test does something else."""
NEEDS = {
    "apptainer": "run deploy/setup/apptainer.sh and deploy/setup/image.sh",
    "bubblewrap": "run deploy/setup/apptainer.sh",
}


def why_not(runtime: str) -> str | None:
    """Why tests on that runtime cannot run here, or None."""
    try:
        RUNTIMES[runtime]().check_installed()
        if runtime == "apptainer":
            ImageStore().find("base")
    except (RuntimeUnavailable, ImageError) as error:
        return f"{error} ({NEEDS[runtime]})"
    return None


@pytest.fixture(autouse=True)
def _skip_without_apptainer(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("apptainer") and (reason := why_not("apptainer")):
        pytest.skip(reason)


def state_directory() -> Iterator[Path]:
    """A private state directory; its host, if a test started one, is stopped afterwards."""
    path = new_state()
    yield path
    SyncHostClient(path).stop()
    shutil.rmtree(path, ignore_errors=True)


state = pytest.fixture(state_directory, name="state")
shared_state = pytest.fixture(state_directory, name="shared_state", scope="module")
"""For all tests of a module."""


def sandbox_on(*runtimes: str, **spec: object):
    """A fixture that gives the tests of a module one sandbox (its info) on each of these runtimes that works
    here; `spec`: the rest of its `SandboxSpec`.
    """

    @pytest.fixture(scope="module", params=runtimes)
    def sandbox(request, shared_state) -> Iterator[SandboxInfo]:
        if reason := why_not(request.param):
            pytest.skip(reason)
        host = SyncHostClient(shared_state)
        info = host.start(SandboxSpec(runtime=request.param, **spec))
        yield info
        assert host.release(info.id), "it ended by itself"

    return sandbox


@pytest.fixture(params=["apptainer", "bubblewrap"])
def container(request) -> str:
    """The name of a runtime that isolates."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=["apptainer", "bubblewrap", "local-unsafe"])
def runtime(request) -> str:
    """The name of each runtime that works here."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def anything() -> str:
    """The name of a runtime for tests about the host, not the isolation."""
    return "bubblewrap" if why_not("apptainer") else "apptainer"


@pytest.fixture
def images(monkeypatch) -> Iterator[Path]:
    """A place whose directories may be images by their paths."""
    place = new_state()
    place.chmod(0o755)
    monkeypatch.setenv("ROLLOUT_SANDBOX_IMAGE_ROOTS", str(place))
    yield place
    shutil.rmtree(place)


@pytest.fixture
def shared(monkeypatch) -> Iterator[Path]:
    """A place for packed snapshots."""
    place = new_state()
    monkeypatch.setenv("ROLLOUT_SNAPSHOT_DIR", str(place))
    yield place
    subprocess.run(["rm", "-rf", place], check=True)


@pytest.fixture
def host(state: Path) -> SyncHostClient:
    """A client of a host of one's own."""
    return SyncHostClient(state)


class Watching(Watchdog):
    """A watchdog of these containers that only notes whom it would have ended: (name, why, kind)."""

    def __init__(self, directory: Path, *containers: Container) -> None:
        self.ended: list[tuple[str, str, str]] = []
        note = lambda container, *why: self.ended.append((container.id, *why))  # noqa: E731
        super().__init__(lambda: list(containers), note, directory)

    def look_until_ended(self) -> tuple[str, str, str]:
        """The only one ended: at once, at a later look, or when found not to listen."""

        async def scenario() -> None:
            while not self.ended:
                await self.look()
                await asyncio.sleep(0.05)

        run(asyncio.wait_for(scenario(), 60))
        (only,) = self.ended
        return only


def run(coroutine):
    """Run a coroutine; the tests are plain functions."""
    return asyncio.run(coroutine)
