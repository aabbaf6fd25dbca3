"""Processes are ended by identity, all of ours and no others; parts that end are started anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.launch import SlurmError, supervisor
from services.launch.supervisor import (
    MARK,
    SANDBOX_MARK,
    Part,
    Supervisor,
    end_marked,
    is_alive,
    marked,
    tail,
)
from tests.helpers.stack import wait_until

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def watched(tmp_path):
    watched = Supervisor(tmp_path / "logs", SlurmError)
    yield watched
    watched.stop_all(0.0)


def start(watched, *command):
    return watched.start(Part("part", list(command)), os.environ)


def test_term_is_enough_for_a_polite_process(watched):
    part = start(watched, "sleep", "60")
    assert part.alive
    assert watched.stop(["part"], 5.0) == [part]
    assert not part.alive
    assert watched.stop(["part"], 5.0) == []


def test_a_process_that_ignores_term_is_killed_after_the_grace(watched):
    part = start(watched, sys.executable, "-c", STUBBORN)
    wait_until(lambda: "up" in tail(part.log), 10, "it to ignore TERM")
    begun = time.monotonic()
    watched.stop(["part"], 0.3)
    assert not part.alive
    assert 0.3 <= time.monotonic() - begun < 30


def test_the_rest_of_the_group_goes_too(watched):
    part = start(watched, "sh", "-c", "sleep 61 & echo $!; wait")
    wait_until(lambda: tail(part.log).strip().isdigit(), 10, "the child to be there")
    member = psutil.Process(int(tail(part.log)))
    watched.stop(["part"], 5.0)
    wait_until(lambda: not is_alive(member), 10, "the child to be gone")


def test_a_zombie_counts_as_ended(watched):
    part = start(watched, "sleep", "60")
    os.kill(part.pid, signal.SIGKILL)
    wait_until(lambda: not part.alive, 10, "it to count as ended")


@pytest.mark.parametrize("do", ["look", "stop"])
def test_what_a_part_left_that_ended_unseen_goes_too(watched, tmp_path, do):
    def member(mark):
        """What is left of a part that ended while nobody looked after it."""
        script = "sleep 61 >/dev/null & echo $!"
        leader = subprocess.Popen(
            ["sh", "-c", script], env={MARK: mark}, start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        output, _ = leader.communicate()
        return leader.pid, psutil.Process(int(output))

    (pid, ours), (_, foreign) = member("a1b2"), member("c3")
    try:
        part = Part("part", ["/bin/true"], env={MARK: "a1b2"}, log=str(tmp_path / "log"), pid=pid)
        watched.parts["part"] = part
        if do == "look":
            watched.look()
        else:
            assert watched.stop_all(0.1) == []
        wait_until(lambda: not is_alive(ours), 10, "the member to be gone")
        assert is_alive(foreign)
    finally:
        foreign.kill()


@pytest.mark.parametrize("do", ["look", "stop"])
def test_who_has_a_dead_parts_pid_now_is_left_alone(watched, tmp_path, do):
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        part = Part("part", ["/bin/true"], log=str(tmp_path / "log"), pid=stranger.pid)
        part.started = supervisor.started_at(psutil.Process(stranger.pid)) - 1
        assert not part.alive
        watched.parts["part"] = part
        if do == "look":
            watched.look()
        assert watched.stop_all(0.1) == []
        time.sleep(0.1)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_part_of_an_earlier_supervisor_is_adopted_and_started_anew(watched, tmp_path):
    part = start(watched, "sleep", "60")
    watched.parts.clear()
    second = Supervisor(tmp_path / "logs")
    child = second.parts["part"] = replace(part)
    assert child.alive
    os.kill(part.pid, signal.SIGKILL)
    wait_until(lambda: not child.alive, 10, "it to have ended")
    second.look()
    assert (child.away, child.restarts) == (True, 0)
    child.again_at = 0.0
    second.look()
    assert (child.away, child.restarts) == (False, 1)
    assert child.pid != part.pid and child.alive
    assert second.stop_all(5.0) == [child]


def test_strays_are_found_by_the_mark_in_their_environment():
    ours = [
        subprocess.Popen(["sleep", "60"], env={name: "a1"}, start_new_session=True)
        for name in (MARK, SANDBOX_MARK)
    ]
    foreign = subprocess.Popen(["sleep", "60"], env={MARK: "a12"})
    try:
        pids = sorted(child.pid for child in ours)
        wait_until(lambda: sorted(stray.pid for stray in marked("a1")) == pids, 10, "both to be found")
        assert end_marked("a1", 5.0) == 2
        assert list(marked("a1")) == []
        assert foreign.poll() is None
    finally:
        for child in [*ours, foreign]:
            child.kill()
            child.wait()


def test_tail_of_a_missing_log_says_so(tmp_path):
    assert "No such file" in tail(tmp_path / "none.log")


def test_a_part_that_cannot_be_started_now_is_started_later(watched, monkeypatch):
    child = start(watched, "sleep", "60")
    os.killpg(child.pid, signal.SIGKILL)
    wait_until(lambda: not child.alive, 10, "it to have ended")
    watched.look()

    def no_memory(*_):
        raise OSError("Cannot allocate memory")

    for attempt in (no_memory, Part.start):
        child.again_at = 0.0
        monkeypatch.setattr(Part, "start", attempt)
        watched.look()
    assert child.alive


def test_a_part_that_ends_is_started_anew_and_ends_with_its_children(watched, tmp_path):
    # Ends once, then stays, with a child that ignores TERM.
    script = (
        f"echo life >> {tmp_path}/lives; [ $(wc -l < {tmp_path}/lives) -gt 1 ] || exit 3; "
        f"(trap '' TERM; echo $BASHPID > {tmp_path}/child; while :; do sleep 0.2; done) & wait"
    )
    part = start(watched, "bash", "-c", script)

    def has_a_child():
        watched.look()
        return (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip()

    grandchild = psutil.Process(int(wait_until(has_a_child, 120, "the part to be started anew")))
    assert (part.restarts, part.exit, part.away) == (1, 3, False)
    watched.stop_all(10.0)
    assert not watched.parts and (tmp_path / "lives").read_text() == "life\nlife\n"
    wait_until(lambda: not is_alive(grandchild), 120, "the child to be gone")


def test_a_part_that_keeps_ending_is_told_until_it_lives(watched, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.01)
    child = start(watched, "bash", "-c", f"[ -e {tmp_path}/mended ] && exec sleep 900; kill -9 $$")

    def fails():
        watched.look()
        return watched.failing().get("part", "").startswith("signal 9, 2 times")

    wait_until(fails, 120, "it to be told")
    (tmp_path / "mended").touch()

    def lives():
        watched.look()
        return child.alive and Path(f"/proc/{child.pid}/comm").read_text().strip() == "sleep"

    wait_until(lives, 120, "it to live")
    assert watched.failing()  # it has not settled
    child.begun -= 2 * supervisor.SETTLED_S
    assert watched.failing() == {}


def test_a_part_that_does_not_start_is_reported_with_the_end_of_its_log(watched):
    child = watched.start(Part("redis", ["bash", "-c", "echo no space left; exit 1"]), os.environ)
    wait_until(lambda: not child.alive, 120, "it to end")
    with pytest.raises(SlurmError, match=r"(?s)redis ended. The end of .*redis.log:\nno space left"):
        watched.wait_for(child, lambda: "nothing answers")


def test_a_part_that_does_not_answer_in_time_is_reported_with_the_reason(watched):
    child = start(watched, "sleep", "60")
    with pytest.raises(SlurmError, match=r"part is not ready after 0 s \(nothing answers\)"):
        watched.wait_for(child, lambda: "nothing answers", 0.0)
