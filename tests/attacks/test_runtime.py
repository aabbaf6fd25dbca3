"""How a sandbox is isolated, and by whose programs, is the deployment's choice and not the request's.

The control is the same request to a host, or for a tenant, that was allowed it, or the step that the host
leaves out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from flask import Flask, g

from rollout.schema import HandlerInfo, RolloutRequest
from sandbox import payload, trees
from sandbox.errors import SandboxError
from sandbox.runtimes import select_runtime
from sandbox.spec import SandboxSpec
from services.gateway.auth import Caller
from services.gateway.tasks import not_permitted
from services.settings import Settings
from services.state.api_keys import ApiKey, Scope
from services.state.tenants import Tenant
from tests.attacks import attack
from tests.attacks.conftest import CONTROL
from tests.helpers.blocking import SyncHostClient, private_host
from tests.helpers.sandboxes import new_state
from tests.sandbox.conftest import why_not

PLANTED = """#!/bin/sh
echo outside >{proof}
exit 0
"""


@dataclass
class Service:
    """A host that runs Apptainer alone, or for controls whatever is asked for."""

    control: bool
    host: SyncHostClient
    place: str = "service"

    def starts(self, runtime: str) -> bool:
        """Whether a sandbox of that runtime is to be had."""
        try:
            info = self.host.start(SandboxSpec(runtime=runtime))
        except SandboxError:
            return False
        self.host.release(info.id)
        return info.runtime == runtime

    def accepts(self, tenant: Tenant, settings: Settings, **request: object) -> bool:
        """Whether the gateway lets a tenant's request pass."""
        key = ApiKey(id="k", tenant="a", scopes=frozenset({Scope.SUBMIT}), digest="", created_at=0.0)
        handlers = {"boxed": HandlerInfo(name="boxed", uses_sandbox=True)}
        with Flask("gateway").test_request_context():
            g.caller = Caller(tenant, key)
            rollout_request = RolloutRequest(handler="boxed", **request)
            return not list(not_permitted([("", rollout_request)], handlers, settings))


@pytest.fixture(scope="module", params=["service", CONTROL])
def target(request) -> Iterator[Service]:
    if reason := why_not("apptainer"):
        pytest.skip(reason)
    control = request.param == CONTROL
    runtimes = "auto,local-unsafe" if control else "apptainer"
    settings = {"ROLLOUT_SANDBOX_RUNTIMES": runtimes, "ROLLOUT_SANDBOX_WARM": 1}
    with private_host(runtime="auto", **settings) as host:
        yield Service(control, host)


@attack(stopped_by="runtimes are the host's setting")
def test_run_without_any_walls_by_naming_local_unsafe(target) -> bool:
    return target.starts("local-unsafe")


@attack(stopped_by="runtimes are the host's setting")
def test_choose_another_container_runtime_than_the_deployment_s(target) -> bool:
    return target.starts("bubblewrap")


@attack(stopped_by="what is started ahead is checked alike")
def test_have_a_sandbox_without_walls_started_ahead(target) -> bool:
    try:
        target.host.keep_warm(SandboxSpec(runtime="local-unsafe"))
    except SandboxError:
        return False
    return True


@attack(stopped_by="a tenant names the deployment's runtime alone")
def test_submit_a_rollout_without_walls_as_a_tenant(target) -> bool:
    tenant = Tenant(name="a", runtimes=("local-unsafe",) if target.control else None)
    return target.accepts(tenant, Settings(), sandbox_runtime="local-unsafe")


@attack(stopped_by="every field that names an image is checked")
@pytest.mark.parametrize("field", ["image", "image_name", "docker_image"])
def test_submit_a_task_whose_image_is_a_directory_of_the_node(target, field) -> bool:
    settings = Settings(sandbox_image_roots="/etc" if target.control else "")
    return target.accepts(Tenant(name="a"), settings, task={field: "/etc/ssl"})


@attack(stopped_by="only the base image's Python runs outside")
def test_run_a_program_outside_that_an_image_brought_as_its_loader(target) -> bool:
    """On a node without a base image, where the task's image once served in its place."""
    ground = new_state()
    ground.chmod(0o777)
    image, proof = ground / "image", ground / "proof"
    _plant(image, PLANTED.format(proof=proof))
    if target.control:
        with contextlib.suppress(SandboxError):  # the planted loader is no sandbox that works
            select_runtime("apptainer", lambda runtime: image, ground)  # a probe with the task's own image
    else:
        _start_without_base(ground, image)
    ran = proof.exists()
    trees.remove(ground)
    return ran


def _plant(image: Path, loader: str) -> None:
    for name in ("lib/python3.11/os.py", "bin/python3", "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"):
        path = image / "usr" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(loader)
        path.chmod(0o755)
    assert payload.find_interpreter(image) is not None


def _start_without_base(ground: Path, image: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUT_IMAGES", str(ground / "none"))
        patch.setenv("ROLLOUT_SANDBOX_IMAGE_ROOTS", str(ground))
        host = SyncHostClient(ground / "s")
        for runtime in ("apptainer", "bubblewrap"):
            with contextlib.suppress(SandboxError):
                host.start(SandboxSpec(image=str(image), runtime=runtime))
        host.stop()
