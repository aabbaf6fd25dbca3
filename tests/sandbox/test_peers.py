"""Who may call the host: its own namespaces' processes, told from others by the kernel."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from sandbox import peers
from tests.helpers.sandboxes import new_state

CONNECT = """
import os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
if sys.argv[2] == "end": os._exit(0)
sys.stdin.read()
"""


@pytest.fixture
def refusal() -> Iterator[Callable[..., str | None]]:
    """What is said of a program that connects, `before` the command of which may go another."""

    directory = new_state()
    directory.chmod(0o755)

    def ask(*before: str, then: str = "stay") -> str | None:
        path = directory / "s"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(30)
            listener.bind(str(path))
            path.chmod(0o777)
            listener.listen(1)
            command = [*before, sys.executable, "-c", CONNECT, str(path), then]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
                connection, _ = listener.accept()
                with connection:
                    if then == "end":
                        process.wait()
                    reason = peers.refusal(connection)
                process.communicate()
            return reason

    yield ask
    shutil.rmtree(directory)


@pytest.fixture(params=["pidfd of the peer", "a kernel before 6.5"])
def kernel(request, monkeypatch) -> None:
    if request.param != "pidfd of the peer":
        monkeypatch.setattr(peers, "SO_PEERPIDFD", 9999)


def test_our_own_programs_are_answered(refusal, kernel):
    assert refusal() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="a plain user's namespace has its own uid alone")
@pytest.mark.may_skip
def test_another_user_is_not_answered(refusal):
    assert refusal("setpriv", "--reuid=65534", "--clear-groups", "--") == "uid 65534 is not ours"


def test_the_same_user_in_another_namespace_is_not_answered(refusal, kernel):
    assert "runs in another user namespace" in refusal("unshare", "--user", "--map-current-user")
    reason = refusal("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child")
    assert "runs in another user namespace" in reason


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace alone takes root")
@pytest.mark.may_skip
def test_a_namespace_of_pids_alone_is_enough_to_be_refused(refusal, kernel):
    assert "runs in another pid namespace" in refusal("unshare", "--pid", "--fork", "--kill-child")


def test_who_has_ended_is_not_answered(refusal, kernel):
    """Another process may have the pid by now."""
    assert any(word in refusal(then="end") for word in ("has ended", "No such file"))


@pytest.mark.may_skip
def test_a_host_with_many_descriptors_still_tells_its_own():
    """`select` takes none above 1023, and a host has two for each sandbox."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("no process may have so many descriptors here")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        near_end, far_end = socket.socketpair()
        with near_end, far_end:
            assert peers.refusal(near_end) is None
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
