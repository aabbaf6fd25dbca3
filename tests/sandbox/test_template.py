"""The template of which sandboxes are clones: it may be killed or hang, and no clone can tell of another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from sandbox import processes
from sandbox.config import HostConfig
from sandbox.equipment import Equipment
from sandbox.errors import ImageError, SandboxStartError
from sandbox.runtimes import template as template_module
from sandbox.runtimes.apptainer import MOST_FAILURES
from sandbox.runtimes.template import Clone
from sandbox.spec import SandboxInfo, SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient
from tests.helpers.sandboxes import leftovers
from tests.helpers.stack import wait_until
from tests.helpers.templates import (
    CONFIG,
    END_S,
    ends,
    fresh_node,
    mounts_of,
    processes_of,
    template_of,
    trees_of,
)

pytestmark = pytest.mark.apptainer
# The template begins beside Apptainer and joins its container, or Apptainer starts it.
node = pytest.fixture(fresh_node, params=["0", "1"], ids=["beside", "within"], name="node")
SPEC = SandboxSpec(runtime="apptainer")


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
    wait_until(lambda: processes.children(daemon) == [template_of(state)], END_S, "the end of all zombies")


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
    infos: list[SandboxInfo] = []
    waiting = threading.Thread(target=lambda: infos.append(host.start(SPEC)))
    waiting.start()
    answers = 0
    while waiting.is_alive():
        host.stats()
        answers += 1
        time.sleep(0.05)
    assert answers > 20  # whom it held up would have waited as long as the start
    assert "without a template" in (state / "host.log").read_text()
    infos.append(host.start(SPEC))
    assert all(map(works, infos)) and template_of(state) != template
    for info in infos:
        host.release(info.id)


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


def test_nothing_runs_before_its_pid_is_known(node):
    """Whoever started it writes the pid down first; has that one ended, so does the clone."""
    process, stdin = node.clone()
    assert process.poll() is None and processes.is_init(process.pid)
    stdin.close()
    assert ends(process)


def test_one_that_is_given_up_ends_none_that_has_begun(node):
    """Although that has only just been forked; and none is signalled that has its number by then."""
    wait = '    while not os.path.exists("go-on"):\n        __import__("time").sleep(0.01)\n'
    node.change("    writable_root.keep_names(", f"{wait}    writable_root.keep_names(")
    clones: list[tuple[Clone, socket.socket]] = []
    asking = threading.Thread(target=lambda: clones.append(node.clone()))
    asking.start()

    def has_begun() -> bool:
        pids = [pid for pid in processes_of(node.state) if processes.is_init(pid)]
        return any(os.getsid(pid) == pid for pid in pids)

    wait_until(has_begun, END_S, "a clone")
    node.runtime._template.close()
    (node.state / "template/go-on").touch()
    asking.join()
    ((process, stdin),) = clones
    assert process.poll() is None
    stdin.close()
    assert ends(process)


def test_no_other_process_is_ended_in_the_place_of_a_clone():
    """One that has its pid, when the clone has ended and somebody has waited for it."""
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            pid = int(parent.stdout.readline())
            clone = Clone(pid, *os.pipe())
            clone._started -= 1  # the clone had begun before it
            clone.end()
            assert clone.returncode is not None and processes.start_time(pid) is not None
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_only_the_template_and_clones_become_our_children(node):
    """An orphan of somebody else's would stay a zombie, and who waits for its end would wait for ever."""
    process, stdin = node.clone()
    command = ["sh", "-c", "sleep 600 >/dev/null & echo $!"]
    orphan = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    children = processes.children(os.getpid())
    os.kill(orphan, signal.SIGKILL)
    assert {process.pid, template_of(node.state)} <= {*children} and orphan not in children
    stdin.close()
    assert ends(process)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_joins_the_container_and_keeps_nothing_of_outside(node):
    """Apptainer and what it had started end; the template has no capabilities, and no way back."""
    process, stdin = node.clone()
    template = template_of(node.state)
    shown = dict(mounts_of(template))
    assert {"/", "/dev", "/proc", str(node.state), str(node.rootfs.parent)} <= shown.keys()
    assert set(trees_of(template)) <= set(shown.values())
    status = status_of(template)
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    spaces = [Path(f"/proc/{pid}/ns/mnt").readlink() for pid in (os.getpid(), template, process.pid)]
    assert len(set(spaces)) == 3
    assert template in processes.children(os.getpid())
    container, *program = node.runtime._template._processes
    assert {process.pid for process in program} <= {template}
    wait_until(lambda: container.poll() == 0, END_S, "Apptainer's end")
    # The clone has the same two trees open, each as it is mounted in its own root.
    mounts = dict(mounts_of(process.pid))
    assert trees_of(process.pid) == sorted(mounts[place] for place in ("/sbx", "/sbx-python"))
    stdin.close()
    assert ends(process)


POISON = """
for place in $(tr '\\0' '\\n' </proc/1/cmdline | tail -n 2); do
    for name in . ptyprocess lib/python3.11 lib/python3.11/encodings lib/x86_64-linux-gnu; do
        mkdir -p $place/$name && cd $place/$name || exit 1
        for module in hashlib _hashlib archive editor kernel kernel_life idna; do
            echo 'open("/tmp/poisoned", "w")' >$module.py
        done
        echo nonsense >libcrypto.so.3
    done
done
cd; ls -d /tmp/sbx*/payload/*/hashlib.py /var/tmp/*/*/usr/lib/python3.11/hashlib.py
"""


def test_nothing_is_imported_from_where_the_server_had_begun(state):
    """An agent sees the names on the command line, and may make them its own inside; they lead nowhere."""
    host = SyncHostClient(state)
    info = host.start(SPEC)
    with SyncSandboxClient(info.socket) as client:
        poisoned = client.bash(POISON)
        assert poisoned.exit_code == 0 and len(poisoned.output.split()) == 2, poisoned.output
        client.bash("printf 'one\\ntwo\\n' >/workspace/text")
        client.editor("str_replace", "/workspace/text", old_str="two", new_str="three")  # imports `hashlib`
        assert client.ipython("1 + 1").output.strip().endswith("2")
        assert client.bash("ls /tmp/poisoned; cat /workspace/text").output.split()[-2:] == ["one", "three"]
        assert client.bash("test -e /tmp/poisoned").exit_code == 1
    if os.geteuid() == 0:  # else what the server has mapped is closed to us
        maps = Path(f"/proc/{info.pid}/maps").read_text()
        assert "/libcrypto.so" in maps and "/_hashlib." in maps
    host.release(info.id)


def test_a_newer_one_is_not_ended_for_the_end_of_an_older_one(node, monkeypatch):
    node.clone()[1].close()
    template = node.runtime._template
    stopped = template_of(node.state)
    has_ended = template_module._has_ended

    def and_another_has_begun(connection: socket.socket) -> bool:
        monkeypatch.setattr(template_module, "_has_ended", has_ended)
        os.kill(stopped, signal.SIGKILL)
        wait_until(lambda: has_ended(connection), END_S, "its end")
        node.clone()[1].close()
        return True

    monkeypatch.setattr(template_module, "_has_ended", and_another_has_begun)
    template.tidy()
    assert template._connection is not None and template_of(node.state) != stopped


WITHOUT_CLONE3 = """    import seccomp
    seccomp._assembled[False] = struct.pack(
        "=HBBIHBBIHBBIHBBI", 0x20, 0, 0, 0, 0x15, 0, 1, 435, 0x06, 0, 0, 0x50000 | 38, 0x06, 0, 0, 0x7FFF0000
    )
    seccomp.load()
    seccomp._assembled.clear()
    if locked_libc.syscall(435, None, 0) != -1 or ctypes.get_errno() != 38:
        os._exit(9)
    seccomp.assembled()
"""


def test_a_filter_that_knows_no_clone3_is_no_obstacle(node):
    """As that of Docker, in which a node may run."""
    node.change("    seccomp.assembled()\n", WITHOUT_CLONE3)
    process, stdin = node.clone()
    assert process.poll() is None and processes.is_init(process.pid)
    stdin.close()
    assert ends(process)


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_whatever_the_hosts_umask_is_a_sandboxs_is_the_same(node, mask):
    before = os.umask(mask)
    try:
        process, stdin = node.clone()
    finally:
        os.umask(before)
    beneath = node.state / "template/beneath"
    assert {path.stat().st_mode & 0o777 for path in (beneath, *beneath.rglob("*"))} == {0o755}
    assert "Umask:\t0022\n" in Path(f"/proc/{process.pid}/status").read_text()
    stdin.close()
    assert ends(process)


def test_a_base_image_that_lost_its_python_says_so(node):
    """Which it had when the host looked first."""
    base = node.image()
    for name in ("bin/python3", "lib/python3.11/os.py", "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"):
        (base / "usr" / name).parent.mkdir(parents=True, exist_ok=True)
        (base / "usr" / name).touch()
    equipment = Equipment(node.state, HostConfig())
    assert equipment.interpreter(node.runtime, base, base) == base / "usr"
    (base / "usr/bin/python3").unlink()
    with pytest.raises(ImageError, match="no Python that could run the server; run deploy"):
        equipment.interpreter(node.runtime, base, base)


DIE_SECOND = """SEEN = []


def die_second():
    SEEN.append(1)
    if len(SEEN) == 2:
        os.kill(os.getpid(), 9)


def main():"""


@pytest.mark.parametrize("place", ["pid = clone()", "os.write(fds[0]"], ids=["before", "after"])
def test_one_that_ends_before_it_tells_of_its_clone_is_asked_again(node, place):
    """As one that was killed, and looked alive. What it had begun ends, for nobody knows of that."""
    node.change(f"            {place}", f"            die_second()\n            {place}")
    node.change("def main():", DIE_SECOND)
    node.clone()[1].close()
    template = template_of(node.state)
    process, stdin = node.clone()
    assert template_of(node.state) != template
    wait_until(lambda: len(processes_of(node.state)) == 2, END_S, "its end")  # beside this clone
    stdin.close()
    assert ends(process)


def test_a_clone_that_ends_amid_its_mounts_is_its_own_failure(node):
    end = '    if "/00000002/" in request["overlay"]:\n        os._exit(9)\n'
    node.change("    trees = [", f"{end}    trees = [")
    node.clone()[1].close()
    template = template_of(node.state)
    with pytest.raises(SandboxStartError, match="before all was mounted"):
        node.clone()
    assert template_of(node.state) == template
    process, stdin = node.clone()
    stdin.close()
    assert ends(process)


def test_a_slow_disk_costs_nobody_the_template(node, monkeypatch):
    slow = '    if os.path.exists("slow"):\n        __import__("time").sleep(4)\n'
    node.change("    trees = [", f"{slow}    trees = [")
    node.clone()[1].close()  # the template's own start has all its time
    (node.state / "template/slow").touch()
    monkeypatch.setattr(template_module, "ANSWER_S", 2.0)
    process, stdin = node.clone()
    stdin.close()
    assert ends(process)
    monkeypatch.setattr(template_module, "MOUNT_S", 1.0)
    template = template_of(node.state)
    with pytest.raises(SandboxStartError, match="not mounted after 1 s"):
        node.clone()
    assert processes_of(node.state) == [template]


def test_what_does_not_answer_is_an_error_and_ended(node, monkeypatch):
    node.clone()[1].close()
    node.runtime.close()
    node.change('            os.write(fds[0], b"%d" % pid)', "            __import__('time').sleep(600)")
    monkeypatch.setattr(template_module, "ANSWER_S", 2.0)
    with pytest.raises(SandboxStartError, match="does not answer"):
        node.clone()


def test_where_none_can_be_cloned_sandboxes_start_without_one(node, caplog):
    """A kernel that gives a container no namespaces: it is tried a few times, and then left alone a while."""
    node.change("    number = ctypes", '    raise OSError("no namespace")\n    number = ctypes')
    for _ in range(MOST_FAILURES + 1):
        process, stdin = node.runtime.start(node.launch(), ["true"], CONFIG)
        with process, stdin:
            assert isinstance(process, subprocess.Popen) and process.wait(60) == 0
    assert caplog.text.count("without a template: cannot be cloned: no namespace") == MOST_FAILURES


def test_one_that_cannot_be_started_again_costs_nobody_a_sandbox(node):
    node.clone()[1].close()
    os.kill(template_of(node.state), signal.SIGKILL)
    node.runtime._template.command = ["/bin/false"]
    process, stdin = node.runtime.start(node.launch(), ["true"], CONFIG)
    with process, stdin:
        assert isinstance(process, subprocess.Popen) and process.wait(60) == 0
