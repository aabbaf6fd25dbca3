"""`rollout sandbox-host`, as an operator calls it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from sandbox.spec import SandboxSpec
from tests.helpers.blocking import SyncHostClient


def rollout(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollout.cli", "sandbox-host", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_status_shows_the_sandboxes_and_stop_ends_them(state, anything):
    assert f"no sandbox host serves {state}" in rollout("status", f"--state-dir={state}").stderr
    info = SyncHostClient(state).start(SandboxSpec(runtime=anything, owner="somebody"))
    done = rollout("status", f"--state-dir={state}")
    assert done.returncode == 0, done.stderr
    for part in (info.id, "somebody", "started 1", "claimed 1", "over the memory limit 0"):
        assert part in done.stdout
    assert rollout("stop", f"--state-dir={state}").returncode == 0
    assert not (state / info.id).exists()
    assert rollout("stop", f"--state-dir={state}").returncode == 0  # nothing to do


def test_run_serves_in_the_foreground_until_a_signal(state):
    command = [sys.executable, "-m", "rollout.cli", "sandbox-host", "run", f"--state-dir={state}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        host = SyncHostClient(state)
        deadline = time.monotonic() + 120
        while not (stats := host.stats()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert stats["pid"] == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
