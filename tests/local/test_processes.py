"""Processes are ended by identity: all of ours, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

from services.local.processes import MARK, SANDBOX_MARK, end, end_marked, marked, spawn, start_time, tail

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


def start(tmp_path, *command: str, env: dict[str, str] | None = None):
    return spawn("child", command, {**os.environ, **(env or {})}, tmp_path, tmp_path / "child.log")


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_term_is_enough_for_a_polite_process(tmp_path):
    process = start(tmp_path, "sleep", "60")
    assert process.alive
    assert end([process], 5.0) == [process]
    assert not process.alive
    assert end([process], 5.0) == []


def test_a_process_that_ignores_term_is_killed_after_the_grace(tmp_path):
    process = start(tmp_path, sys.executable, "-c", STUBBORN)
    until(lambda: "up" in tail(process.log))
    begun = time.monotonic()
    end([process], 0.3)
    assert not process.alive
    assert 0.3 <= time.monotonic() - begun < 30


def test_the_rest_of_the_group_goes_too(tmp_path):
    process = start(tmp_path, "sh", "-c", "sleep 61 & echo $!; wait")
    until(lambda: tail(process.log).strip().isdigit())
    member = int(tail(process.log))
    end([process], 5.0)
    until(lambda: start_time(member) is None)


def test_a_later_owner_of_the_pid_is_left_alone(tmp_path):
    process = start(tmp_path, "sleep", "60")
    try:
        earlier = replace(process, started=process.started - 1)
        assert not earlier.alive
        assert end([earlier], 0.1) == []
        assert process.alive
    finally:
        end([process], 5.0)


def test_strays_are_found_by_the_mark_in_their_environment(tmp_path):
    ours = [
        subprocess.Popen(["sleep", "60"], env={name: "a1"}, start_new_session=True)
        for name in (MARK, SANDBOX_MARK)
    ]
    other = subprocess.Popen(["sleep", "60"], env={MARK: "a12"})
    try:
        until(lambda: sorted(marked("a1")) == sorted(child.pid for child in ours))
        assert end_marked("a1", 5.0) == 2
        assert list(marked("a1")) == []
        assert other.poll() is None
    finally:
        for child in [*ours, other]:
            child.kill()
            child.wait()


def test_a_zombie_counts_as_ended(tmp_path):
    process = start(tmp_path, "sleep", "60")
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not process.alive)


def test_tail_of_a_missing_log_says_so(tmp_path):
    assert "No such file" in tail(tmp_path / "none.log")
