"""What a tenant may have a sandbox use, as the worker checks it."""

from __future__ import annotations

import pytest

from rollout.schema import Blame
from sandbox.errors import ImageError, NodeShort
from sandbox.spec import BindSpec, SandboxSpec
from services.state.tenants import Tenant
from workers.errors import TaskError, from_sandbox
from workers.sandboxes import check_sandbox


def refusal(tenant, runtime=None, **spec):
    """What is said, or None where the sandbox is allowed."""
    try:
        check_sandbox(SandboxSpec(**spec), Tenant(name="a", **tenant), runtime=runtime)
    except TaskError as error:
        assert error.blame is Blame.TASK and not error.retry
        return str(error)


def test_a_tenant_without_limits_may_have_anything():
    assert refusal({}, image="any", runtime="apptainer", binds=(BindSpec("/", "/data"),)) is None


@pytest.mark.parametrize(
    ("image", "allowed"),
    [
        ("swe-1", True),
        ("base", False),
        ("/images/team-a/x.sif", True),
        ("/images/team-a/../team-b/x.sif", False),
        ("/images/team-b/x.sif", False),
    ],
)
def test_images_are_held_to_the_tenant_s_patterns_whatever_their_path_goes_through(image, allowed):
    reason = refusal({"images": ("swe-*", "/images/team-a/*")}, image=image)
    assert (reason is None) == allowed
    if reason:
        assert repr(image) in reason and "allowed images: swe-*, /images/team-a/*" in reason


def test_a_runtime_is_checked_where_the_request_names_one():
    only = {"runtimes": ("apptainer",)}
    assert refusal(only, runtime="apptainer") is None
    assert "sandbox_runtime 'local-unsafe'" in refusal(only, runtime="local-unsafe")
    # What the deployment is set to is the operator's choice.
    assert refusal(only, runtime=None) is None


def test_mounts_are_held_to_where_links_lead(tmp_path):
    for name in ("mine/below", "theirs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "also-mine").symlink_to(tmp_path / "mine")

    def reason(path, *mounts):
        return refusal({"mounts": mounts}, binds=(BindSpec(str(path), "/data"),))

    for path in ("mine", "mine/below", "also-mine/below"):
        assert reason(tmp_path / path, str(tmp_path / "mine")) is None
        assert reason(tmp_path / path, str(tmp_path / "also-mine")) is None
        assert reason(tmp_path / path, str(tmp_path / "m*")) is None
    for path in ("theirs", "mine/link", "mine/../theirs", "mineral"):
        assert "allowed mounts: " in reason(tmp_path / path, str(tmp_path / "mine")), path
    assert "allowed mounts: none" in reason(tmp_path / "mine")


def test_a_node_that_is_short_is_to_blame_and_not_the_sandbox():
    short, broken = from_sandbox(NodeShort("no room")), from_sandbox(ImageError("no image"))
    assert (short.blame, short.retry) == (Blame.INFRASTRUCTURE, True)
    assert (broken.blame, broken.retry) == (Blame.SANDBOX, True)
