"""Sandboxes to attack: on each runtime, and with no walls at all for the controls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.client import BashResult
from sandbox.spec import SandboxInfo
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient, private_host, sandbox_of
from tests.sandbox.conftest import why_not

CONTROL = "control"
PATIENCE_S = 120.0
"""How long an answer may take on a slow machine before a test gives up."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Tell `python -m tests.attacks` of each attack, through xdist as well."""
    report = yield
    stopped_by = getattr(item.function, "stopped_by", None)
    if stopped_by is not None:
        target = item.funcargs.get("target")
        place = getattr(target, "place", None) or item.callspec.id
        report.attack = {
            "attack": item.originalname.removeprefix("test_").replace("_", " "),
            "subject": item.path.stem.removeprefix("test_"),
            "place": place,
            "control": getattr(target, "control", CONTROL in item.callspec.id),
            "stopped_by": stopped_by,
        }
    return report


@dataclass
class SandboxTarget:
    """A sandbox, and the host that gave it. The attacker works through `client`, as an agent does."""

    place: str
    control: bool
    runtime: str
    host: SyncHostClient
    state: Path
    info: SandboxInfo
    client: SyncSandboxClient

    def python(self, code: str, timeout: float = PATIENCE_S) -> BashResult:
        """Run a script with the Python inside."""
        path = f"{self.info.workspace}/attack.py"
        self.client.write_file(path, code)
        return self.client.bash(f"python3 {path}", timeout)


@pytest.fixture(scope="module", params=["apptainer", "bubblewrap", CONTROL])
def attacked_host(request) -> Iterator[tuple[SyncHostClient, Path, str]]:
    """A host for the attacks of a file, and the runtime to ask it for."""
    runtime = "local-unsafe" if request.param == CONTROL else request.param
    if runtime != "local-unsafe" and (reason := why_not(runtime)):
        pytest.skip(reason)
    with private_host(runtime=runtime, **getattr(request.module, "HOST_SETTINGS", {})) as host:
        yield host, host.state, runtime


@contextlib.contextmanager
def attacked_sandbox(host: SyncHostClient, state: Path, runtime: str) -> Iterator[SandboxTarget]:
    control = runtime == "local-unsafe"
    with sandbox_of(host, runtime=runtime) as (info, client):
        yield SandboxTarget(CONTROL if control else runtime, control, runtime, host, state, info, client)


@pytest.fixture(scope="module")
def shared_target(attacked_host) -> Iterator[SandboxTarget]:
    """One sandbox for all attacks of a file."""
    with attacked_sandbox(*attacked_host) as target:
        yield target


@pytest.fixture
def target(request, attacked_host) -> Iterator[SandboxTarget]:
    """A sandbox of its own for each attack, or the shared one in a file that says `ONE_SANDBOX`: its attacks
    leave nothing that the next could profit from. Attacks on something else define a `target` in their file.
    """
    if getattr(request.module, "ONE_SANDBOX", False):
        yield request.getfixturevalue("shared_target")
        return
    with attacked_sandbox(*attacked_host) as target:
        yield target
