"""Snapshots: what of a sandbox is in another one that begins with it, and what harms neither."""

from __future__ import annotations

import pytest

from sandbox.spec import SandboxSpec
from tests.helpers.blocking import SyncSandboxClient


def test_what_is_kept_is_in_the_next_one_and_both_go_on(host, runtime):
    info = host.start(SandboxSpec(runtime=runtime, owner="me", env={"A": "1"}))
    with SyncSandboxClient(info.socket) as client:
        client.bash("mkdir d; cd d; export B=2; echo kept > f; (sleep 1000; echo never) & ")
        told = host.snapshot(info.id, "one:1.0", owner="r")
        assert told.name == "one:1.0" and told.way in ("copy", "reflink") and told.files > 10
        assert "Running" in client.bash("echo later > f; jobs").output
    again = host.start(SandboxSpec(snapshot="one:1.0", owner="you"))
    assert again.owner == "you" and again.runtime == info.runtime and again.limits == info.limits
    with SyncSandboxClient(again.socket) as client:
        result = client.bash("cat f; echo $A $B; basename $PWD")
        assert result.output == "kept\n1 2\nd\n"
    assert host.stats()["snapshots_taken"] == host.stats()["snapshots_begun"] == 1
    assert host.forget_snapshots("r") == 1
    with pytest.raises(Exception, match="no snapshot"):
        host.start(SandboxSpec(snapshot="one:1.0"))
