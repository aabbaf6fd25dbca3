"""What starts containers for a host: it may be killed, and what it starts are the host's own children."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from sandbox import processes
from sandbox.host_client import SyncHostClient
from sandbox.spec import SandboxSpec
from sandbox.sync_client import SyncSandboxClient
from tests.helpers.sandboxes import leftovers

pytestmark = pytest.mark.apptainer
SPEC = SandboxSpec(runtime="apptainer")


def launchers(host_pid: int) -> list[int]:
    return [
        pid
        for pid in processes.children(host_pid)
        if b"--serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]


def works(info) -> bool:
    with SyncSandboxClient(info.socket) as client:
        return client.bash("echo hi").output == "hi\n"


def test_one_serves_all_and_another_takes_its_place(state):
    host = SyncHostClient(state)
    first, second = host.start(SPEC), host.start(SPEC)
    daemon = host.stats()["pid"]
    (launcher,) = launchers(daemon)
    assert {first.pid, second.pid} <= set(processes.children(daemon))
    os.kill(launcher, signal.SIGKILL)
    third = host.start(SPEC)
    assert launchers(daemon) != [launcher]
    assert works(first) and works(second) and works(third)
    for info in (first, second, third):
        host.release(info.id)
    assert not [pid for pid in processes.children(daemon) if pid not in launchers(daemon)], "zombies"


def test_it_ends_with_its_host(state):
    host = SyncHostClient(state)
    host.release(host.start(SPEC).id)
    (launcher,) = launchers(host.stats()["pid"])
    host.stop()
    assert processes.start_time(launcher) is None
    assert leftovers(state) == []
