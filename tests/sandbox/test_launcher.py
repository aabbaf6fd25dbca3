"""What starts containers for a host: it may be killed, and what it starts are the host's own children."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from sandbox import processes
from sandbox.errors import SandboxStartError
from sandbox.runtimes import launcher as launchers_module
from sandbox.runtimes import writable_root
from sandbox.runtimes.launcher import ANSWER_S, Launcher, Started
from sandbox.spec import SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient
from tests.helpers.sandboxes import leftovers

pytestmark = pytest.mark.apptainer
SPEC = SandboxSpec(runtime="apptainer")


def launchers(host_pid: int) -> list[int]:
    return [
        pid
        for pid in processes.children(host_pid)
        if b"--serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]


SCRIPT = Path(writable_root.__file__).read_text()
ANSWER = "connection.send(str(pid).encode())"


def launcher_of(script: str) -> Launcher:
    return Launcher([sys.executable, "-IS", "-c", script])


def start(launcher: Launcher, directory: Path, stdin: socket.socket) -> Started:
    """Have it start `echo ran` behind an empty image in that directory."""
    mount = [directory / "image", directory / "overlay"]
    for path in mount:
        path.mkdir(parents=True)
    return launcher.start([*map(str, mount)], ["/bin/echo", "ran"], {}, stdin)


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


def test_one_that_hangs_holds_up_only_who_waits_for_it(state):
    host = SyncHostClient(state)
    host.release(host.start(SPEC).id)
    daemon = host.stats()["pid"]
    (launcher,) = launchers(daemon)
    os.kill(launcher, signal.SIGSTOP)
    errors: list[Exception] = []

    def start() -> None:
        try:
            host.start(SPEC)
        except SandboxStartError as error:
            errors.append(error)

    waiting = threading.Thread(target=start)
    waiting.start()
    slowest, began = 0.0, time.monotonic()
    while time.monotonic() < began + ANSWER_S / 2:
        asked = time.monotonic()
        host.stats()
        slowest = max(slowest, time.monotonic() - asked)
        time.sleep(0.05)
    waiting.join()
    assert slowest < ANSWER_S * 0.8  # whom it held up would have waited as long as the start
    assert "does not answer" in str(errors[0])
    info = host.start(SPEC)
    assert works(info)
    host.release(info.id)
    assert processes.children(daemon) == launchers(daemon) != [launcher]


def test_what_it_starts_too_late_is_ended(tmp_path, monkeypatch):
    """One that clones and does not say so: nobody would know of the child, or wait for it."""
    hanging = SCRIPT.replace(ANSWER, "signal.pause()")
    assert hanging != SCRIPT
    monkeypatch.setattr(launchers_module, "FIRST_ANSWER_S", 1.0)
    before = set(processes.children(os.getpid()))
    near_end, far_end = socket.socketpair()
    with near_end, far_end, pytest.raises(SandboxStartError, match="does not answer"):
        start(launcher_of(hanging), tmp_path, far_end)
    assert set(processes.children(os.getpid())) == before


def test_what_others_wait_for_runs_on_when_it_does_not_answer(tmp_path, monkeypatch):
    """A container is of the launcher's group until it knows that it is known."""
    hanging = SCRIPT.replace(
        ANSWER, f"{ANSWER} if {str(tmp_path / 'b')!r} not in str(text) else signal.pause()"
    )
    assert hanging != SCRIPT
    monkeypatch.setattr(launchers_module, "ANSWER_S", 1.0)
    launcher = launcher_of(hanging)
    near_end, far_end = socket.socketpair()
    with near_end, far_end:
        started = start(launcher, tmp_path / "a", far_end)
        with pytest.raises(SandboxStartError, match="does not answer"):
            start(launcher, tmp_path / "b", far_end)
        near_end.send(b"x")
        with started.stdout:
            assert started.stdout.read() == b"ran\n"
    assert os.waitpid(started.pid, 0)[0] == started.pid


def test_one_that_ends_while_it_is_asked_is_asked_again(tmp_path):
    """As one that was killed and still looked alive: before it took the request, and after its clone."""
    for place in ("if not text", ANSWER):
        flag = tmp_path / str(len(place))
        once = f"not os.path.exists({str(flag)!r}) and (os.mkdir({str(flag)!r}), os.abort())"
        dying = SCRIPT.replace(place, f"{place} or {once}" if place != ANSWER else f"{once} or {place}")
        assert dying != SCRIPT
        before = set(processes.children(os.getpid()))
        launcher = launcher_of(dying)
        near_end, far_end = socket.socketpair()
        with near_end, far_end:
            started = start(launcher, tmp_path / f"{flag.name}-of", far_end)
            near_end.send(b"x")
            with started.stdout:
                assert started.stdout.read() == b"ran\n"
        assert os.waitpid(started.pid, 0)[0] == started.pid
        launcher.close()
        assert set(processes.children(os.getpid())) == before


def test_two_that_end_are_an_error(tmp_path):
    launcher = launcher_of("pass")
    near_end, far_end = socket.socketpair()
    ended = r"does not answer: (it has ended|.*[Cc]onnection|.*pipe)"
    with near_end, far_end, pytest.raises(SandboxStartError, match=ended):
        start(launcher, tmp_path, far_end)


def test_nothing_runs_before_its_pid_is_known(tmp_path):
    launcher = launcher_of(SCRIPT)
    near_end, far_end = socket.socketpair()
    with far_end:
        started = start(launcher, tmp_path, far_end)
    near_end.close()
    assert started.stdout.read() == b""
    assert os.waitpid(started.pid, 0)[0] == started.pid
    launcher.close()
