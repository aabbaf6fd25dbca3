"""The template of which sandboxes are clones: it may be killed or hang, and no clone can tell of another."""

from __future__ import annotations

import marshal
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import paths, payload, processes, trees
from sandbox.errors import SandboxStartError
from sandbox.images import ImageStore
from sandbox.runtimes import Launch
from sandbox.runtimes import template as template_module
from sandbox.runtimes.apptainer import MOST_FAILURES, Apptainer
from sandbox.runtimes.template import ANSWER_S, Clone
from sandbox.spec import SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient
from tests.helpers.sandboxes import leftovers, new_state, small_image
from tests.helpers.stack import wait_until

pytestmark = pytest.mark.apptainer
SPEC = SandboxSpec(runtime="apptainer")
END_S = 20.0


def processes_of(state: Path) -> list[int]:
    """The templates that belong to a host's directory, and their clones."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if command[-3:-1] == [b"/sbx/template.py", f"{state}/".encode()]:
                pids.append(int(entry.name))
    return pids


def template_of(state: Path) -> int:
    (pid,) = [pid for pid in processes_of(state) if not processes.is_init(pid)]
    return pid


def works(info) -> bool:
    with SyncSandboxClient(info.socket) as client:
        return client.bash("echo hi").output == "hi\n"


def test_another_takes_its_place_and_no_clone_notices(state):
    host = SyncHostClient(state)
    first, second = host.start(SPEC), host.start(SPEC)
    daemon, template = host.stats()["pid"], template_of(state)
    assert {first.pid, second.pid} <= set(processes.children(daemon)) & set(processes_of(state))
    os.kill(template, signal.SIGKILL)
    third = host.start(SPEC)
    assert template_of(state) != template
    assert works(first) and works(second) and works(third)
    for info in (first, second, third):
        host.release(info.id)
    for pid in processes.children(daemon):  # the container of the template that runs, and no zombie
        assert processes.start_time(pid) is not None


def test_it_ends_with_its_host(state):
    host = SyncHostClient(state)
    host.release(host.start(SPEC).id)
    template = template_of(state)
    host.stop()
    assert processes.start_time(template) is None
    assert leftovers(state) == []


def test_it_ends_with_a_host_that_is_killed_and_the_next_one_adopts_the_clones(state):
    host = SyncHostClient(state)
    info = host.start(SPEC)
    template, daemon = template_of(state), host.stats()["pid"]
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: processes.start_time(template) is None, END_S, "its end")
    assert works(info)
    other = host.start(SPEC)
    assert host.stats()["adopted"] == 1
    assert works(info) and works(other)
    assert host.release(info.id) and host.release(other.id)
    assert processes.start_time(info.pid) is None


def test_one_that_hangs_holds_up_only_who_waits_for_it(state):
    host = SyncHostClient(state)
    host.release(host.start(SPEC).id)
    template = template_of(state)
    os.kill(template, signal.SIGSTOP)
    errors: list[Exception] = []

    def start() -> None:
        try:
            host.start(SPEC)
        except SandboxStartError as error:
            errors.append(error)

    waiting = threading.Thread(target=start)
    waiting.start()
    slowest, began = 0.0, time.monotonic()
    while time.monotonic() < began + ANSWER_S / 4:
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
    assert template_of(state) != template


def test_clones_cannot_tell_of_each_other(state):
    """What a tenant could find, or leave to be found: processes, files, mounts, sockets, memory, chance."""
    host = SyncHostClient(state)
    infos = [host.start(SPEC) for _ in range(2)]
    leave = (
        "echo secret >/tmp/left; echo secret >/dev/shm/left; ipcmk -M 64 >/dev/null; ipcmk -Q >/dev/null;"
        'python3 -c \'import socket, time; s = socket.socket(socket.AF_UNIX); s.bind("\\0left");'
        't = socket.create_server(("127.0.0.1", 4711)); time.sleep(600)\' & sleep 1; kill -0 $!'
    )
    look = (
        "cat /proc/self/mountinfo; ls -R /tmp /dev/shm /dev/mqueue /workspace; ipcs -m | grep -c 0x || true;"
        "cat /proc/net/unix; ls /proc | grep -E '^[0-9]+$' | sort -n | tr '\\n' ' ';"
        "(echo >/dev/tcp/127.0.0.1/4711) 2>&1; readlink /proc/self/ns/*"
    )
    with SyncSandboxClient(infos[0].socket) as first, SyncSandboxClient(infos[1].socket) as second:
        before = second.bash(look).output
        assert first.bash(leave).exit_code == 0
        after = second.bash(look).output
        assert "Connection refused" in after
        for info in (infos[0].id, "left", "template"):
            assert info not in after
        seen = [client.bash("readlink /proc/self/ns/*").output.split() for client in (first, second)]
        shared = {line.split(":")[0] for line in set(seen[0]) & set(seen[1])}
        assert shared <= {"cgroup", "time", "time_for_children", "uts"}
        nonces = [client.bash("cat /run/sbx/rc").output for client in (first, second)]
        assert nonces[0] != nonces[1]
        assert [line for line in before.splitlines() if "/scratch/" in line] == [
            line for line in after.splitlines() if "/scratch/" in line
        ]
    for info in infos:
        host.release(info.id)


def test_the_sandboxes_user_has_a_name_where_the_image_knows_none(state, monkeypatch):
    images = new_state()
    images.chmod(0o755)
    monkeypatch.setenv("ROLLOUT_SANDBOX_IMAGE_ROOTS", str(images))
    owner = paths.sandbox_user()
    image = small_image(images / "small", os.getuid() if owner is None else owner)
    host = SyncHostClient(state)
    info = host.start(SandboxSpec(image=str(image), runtime="apptainer"))
    with SyncSandboxClient(info.socket) as client:
        assert client.exec(["/usr/bin/id", "-un"]).stdout == "sandbox\n"
        assert client.exec(["/usr/bin/id", "-gn"]).stdout == "sandbox\n"
    assert host.stats()["cloned"] >= 1
    host.release(info.id)
    assert not (image / "etc").exists()
    trees.remove(images)


class Node:
    """What starts containers on a node, with a payload of its own that a test may change."""

    def __init__(self, state: Path) -> None:
        state.chmod(0o711)
        self.runtime = Apptainer()
        self.runtime.run_as = paths.sandbox_user()
        self.rootfs = ImageStore().rootfs("base", self.runtime.run_as)
        self.runtime.shows = (self.rootfs.parent,)
        self.payload = payload.stage(state)
        self._state, self._number = state, 0

    def change(self, old: str, new: str) -> None:
        """Have the template do something else."""
        program = self.payload / "template.py"
        text = program.read_text()
        assert old in text
        program.write_text(text.replace(old, new))

    def start(self, rootfs: Path | None = None) -> tuple[Clone, socket.socket]:
        """A process that waits for its listening socket, and the socket over which it would come."""
        self._number += 1
        launch = Launch(
            f"{self._number:08x}",
            self._state,
            self.payload,
            rootfs or self.rootfs,
            interpreter=self.rootfs / "usr",
        )
        launch.make_directories(self.runtime.run_as)
        config = launch.scratch / "private" / "config"
        config.write_bytes(marshal.dumps({"walls": True, "binds": []}, 2))
        config.chmod(0o644)
        process, stdin = self.runtime.start(launch, ["/sbx/start.py", "/run/sbx/config"])
        assert isinstance(process, Clone)
        return process, stdin


@pytest.fixture
def node() -> Iterator[Node]:
    """Nothing may be left of it."""
    state = new_state()
    node = Node(state)
    yield node
    node.runtime.close()
    wait_until(lambda: not processes_of(state), END_S, "the end of all")
    trees.remove(state)


def ends(process: Clone) -> bool:
    wait_until(lambda: process.poll() is not None, END_S, "its end")
    return True


def test_nothing_runs_before_its_pid_is_known(node):
    """Whoever started it writes the pid down first; has that one ended, so does the clone."""
    process, stdin = node.start()
    assert process.poll() is None and processes.is_init(process.pid)
    stdin.close()
    assert ends(process)


DIE_ONCE = """TEMPLATE = os.getpid()


def die_once(request, victim):
    if "/00000001/" in request["overlay"] or os.path.exists(request["overlay"] + "/../run/died"):
        return
    os.mkdir(request["overlay"] + "/../run/died")
    os.kill(victim, 9)
    os.kill(os.getpid(), 9)


def main():"""


@pytest.mark.parametrize(
    ("place", "victim"),
    [
        ("        pid = os.fork()", "TEMPLATE"),
        ('        host.send(b"%d" % pid)', "TEMPLATE"),
        ("    require(libc.mount(None", "os.getpid()"),
    ],
    ids=["before its clone", "after its clone", "the clone"],
)
def test_one_that_ends_while_it_is_asked_is_asked_again(node, place, victim):
    """As one that was killed, and looked alive. What it had begun ends, for nobody tells it to go on."""
    indent = place[: len(place) - len(place.lstrip())]
    node.change(place, f"{indent}die_once(request, {victim})\n{place}")
    node.change("def main():", DIE_ONCE)
    node.start()[1].close()  # an Apptainer whose program ends at once may not notice
    process, stdin = node.start()
    assert (node.payload.parent / "scratch" / "00000002" / "run" / "died").is_dir()
    wait_until(lambda: len(processes_of(node.payload.parent)) == 2, END_S, "its end")  # beside this clone
    stdin.close()
    assert ends(process)


def test_what_does_not_answer_is_an_error_and_ended(node, monkeypatch):
    node.start()[1].close()
    node.runtime.close()
    node.change('        host.send(b"%d" % pid)', "        signal.pause()")
    monkeypatch.setattr(template_module, "ANSWER_S", 2.0)
    with pytest.raises(SandboxStartError, match="does not answer"):
        node.start()


def test_where_none_can_be_cloned_sandboxes_start_without_one(node, caplog):
    """A kernel that gives a container no namespaces: it is tried a few times, and then left alone."""
    node.change(
        "def be_clone(fds):", 'def be_clone(fds):\n    os.write(fds[2], b"no namespace")\n    os._exit(1)'
    )
    for _ in range(MOST_FAILURES + 1):
        with pytest.raises(AssertionError):
            node.start()
    assert caplog.text.count("without a template: no namespace") == MOST_FAILURES


def test_an_image_that_cannot_be_mounted_is_its_own_fault(node):
    node.start()[1].close()
    broken = node.payload.parent / "broken"
    broken.write_text("no directory")
    with pytest.raises(SandboxStartError):
        node.start(broken)
    process, stdin = node.start()
    stdin.close()
    assert ends(process)
