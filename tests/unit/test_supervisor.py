"""What a supervisor outlives itself: a machine without room, and pids that are others' by now."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from services.local.plan import Part
from services.local.processes import Adopted, Process, start_time
from services.local.supervisor import Supervisor


@pytest.fixture
def stranger():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_who_has_a_dead_parts_pid_now_is_left_alone(tmp_path, stranger):
    supervisor = Supervisor(tmp_path)
    part = Part("part", ["/bin/true"])
    dead = Adopted(Process("part", stranger.pid, start_time(stranger.pid) - 1, str(tmp_path / "log")))
    supervisor.adopt(part, {}, tmp_path / "log", dead)
    supervisor.look()
    supervisor.stop_all(0.1)
    time.sleep(0.1)
    assert stranger.poll() is None


def test_a_part_that_cannot_be_started_now_is_started_later(tmp_path, monkeypatch):
    supervisor = Supervisor(tmp_path)
    part = Part("part", [sys.executable, "-c", "import time; time.sleep(60)"])
    child = supervisor.start(part, dict(os.environ))
    os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()
    supervisor.look()
    spawn = supervisor._spawn

    def no_memory(*_):
        raise OSError("Cannot allocate memory")

    for attempt in (no_memory, spawn):
        child.again_at = 0.0
        monkeypatch.setattr(supervisor, "_spawn", attempt)
        supervisor.look()
    assert child.alive
    supervisor.stop_all(5.0)
