"""A hostile agent: what it tries from inside is contained, reported, and ends with its sandbox.

Limits are small here, so that the attacks are quick; what they are is no matter to what is tested.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox import processes
from sandbox.client import BashResult
from sandbox.connection import Address
from sandbox.errors import SandboxGone
from sandbox.spec import BindSpec, SandboxInfo, SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient, private_host, sandbox_of
from tests.helpers.sandboxes import leftovers, new_state
from tests.sandbox.conftest import why_not

MEMORY_MB, PROCESSES, DISK_MB, FILES = 300, 48, 50, 2000
PATIENCE_S = 60.0
"""How long an answer may take on a slow machine before a test gives up."""


@dataclass
class Victim:
    """A sandbox under attack, and the machine around it."""

    host: SyncHostClient
    state: Path
    shared: Path
    """Bound read-write at /shared."""
    info: SandboxInfo
    client: SyncSandboxClient

    def python(self, code: str, timeout: float = PATIENCE_S) -> BashResult:
        """Run a script with the image's Python."""
        self.client.write_file("/tmp/attack.py", code)
        return self.client.bash("python3 /tmp/attack.py", timeout)

    def until_limited(self, what: str) -> str:
        """Wait for the report of a limit; what the shell answers meanwhile does not matter."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            result = self.client.bash("sleep 0.3", timeout=10)
            if result.limit_exceeded:
                assert what in result.limit_exceeded
                assert result.shell_restarted
                return result.limit_exceeded
        raise AssertionError(f"no report of a limit of {what} in {PATIENCE_S} s")

    def works(self) -> None:
        """The next command is carried out, and nothing of the attack runs any more."""
        result = self.client.bash(
            "cd /workspace; echo alive; cat </dev/null | cat; touch new; ls new", PATIENCE_S
        )
        assert result.output == "alive\nnew\n"
        assert not result.limit_exceeded


@pytest.fixture(scope="module", params=["apptainer", "bubblewrap"])
def node(request) -> Iterator[tuple[SyncHostClient, Path, Path, str]]:
    """A host with small limits and one place that may be bound."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    shared = new_state()
    shared.chmod(0o777)
    settings = {
        "MEMORY_MB": MEMORY_MB,
        "PROCESSES": PROCESSES,
        "DISK_MB": DISK_MB,
        "FILES": FILES,
        "BINDS": f"{shared}:rw",
    }
    names = {f"ROLLOUT_SANDBOX_{name}": value for name, value in settings.items()}
    with private_host(**names, ROLLOUT_TEST_TOKEN="s3cret", ROLLOUT_SANDBOX_TEST_SECRET="s3cret") as host:
        yield host, host.state, shared, request.param
    shutil.rmtree(shared)


@pytest.fixture
def victim(node) -> Iterator[Victim]:
    """A sandbox of its own for each attack; afterwards nothing of it is left."""
    host, state, shared, runtime = node
    bind = BindSpec(str(shared), "/shared", read_only=False)
    with sandbox_of(host, runtime=runtime, binds=(bind,)) as (info, client):
        yield Victim(host, state, shared, info, client)
    assert [trace for trace in leftovers(state) if info.id in trace] == []
    assert not processes.with_variable("ROLLOUT_SANDBOX_ID", info.id)
    assert processes.start_time(info.pid) is None


# -- too much of everything ----------------------------------------------


def test_a_fork_bomb_is_bounded_and_cleared_away(victim):
    victim.client.bash("bomb() { bomb | bomb & }; bomb", timeout=20)
    most = 0
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        most = max(most, len(processes.usages(victim.info.pid)))
        time.sleep(0.02)
    assert 5 < most < PROCESSES + 10
    victim.until_limited("processes")
    victim.works()


def test_a_fork_bomb_out_of_reach_of_the_terminal_is_cleared_away_too(victim):
    victim.python(
        """
import os, signal, time
if os.fork(): os._exit(0)
os.setsid()
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
while True:
    try:
        if os.fork() == 0: time.sleep(1000)
    except OSError:
        time.sleep(0.01)
"""
    )
    victim.until_limited("processes")
    victim.works()


def test_one_process_is_refused_more_memory_than_the_limit(victim):
    result = victim.python(f"x = bytearray({MEMORY_MB + 50} << 20)")
    assert "MemoryError" in result.output
    assert not result.limit_exceeded
    victim.works()


@pytest.mark.parametrize(
    "code",
    [
        f"for _ in range(4): os.fork()\nx = b'x' * ({MEMORY_MB} << 20 >> 3)",
        f"for _ in range(20): os.write(os.memfd_create('x'), b'x' * ({DISK_MB - 5} << 20))",
    ],
    ids=["of many processes", "in unnamed files"],
)
def test_too_much_memory_together_is_ended(victim, code):
    result = victim.python(f"import os, time\n{code}\ntime.sleep(1000)")
    assert "memory" in result.limit_exceeded
    assert f"at most {MEMORY_MB} MiB" in result.limit_exceeded
    victim.works()


def test_a_cell_that_uses_too_much_with_its_children_is_told_why_the_kernel_died(victim):
    code = f"""
import os, time
for _ in range(3): os.fork()
x = b"x" * ({MEMORY_MB} << 20 >> 2)
time.sleep(1000)
"""
    result = victim.client.ipython(code, PATIENCE_S)
    assert result.restarted
    assert "memory" in result.limit_exceeded
    assert victim.client.ipython("1 + 1", PATIENCE_S).limit_exceeded is None
    victim.client.bash("true")  # the shell has the same to tell
    victim.works()


def test_memory_shared_by_forks_is_counted_once(victim):
    result = victim.python(
        f"""
import os, time
x = b"x" * ({MEMORY_MB // 2} << 20)
children = [os.fork() for _ in range(1)]
if 0 in children: time.sleep(8); os._exit(0)
for _ in range(6):
    pid = os.fork()
    if pid == 0: time.sleep(7); os._exit(0)
    children.append(pid)
for pid in children: os.waitpid(pid, 0)
print("fine")
"""
    )
    assert result.output == "fine\n"


def test_a_file_is_no_larger_than_the_disk_limit(victim):
    # It begins with a hole: as many bytes on disk would be over the limit of all files, which ends the shell.
    result = victim.client.bash(
        f"head -c 40M /dev/zero | dd of=/tmp/f bs=1M seek={DISK_MB - 2}; stat -c '%s bytes' /tmp/f; rm /tmp/f"
    )
    assert "File size limit exceeded" in result.output or "File too large" in result.output
    assert f"{DISK_MB << 20} bytes" in result.output
    victim.works()


@pytest.mark.parametrize(
    "script",
    [
        "for i in 1 2 3 4 5 6 7 8; do head -c 12M /dev/zero >/dev/shm/$i; done; sleep 1000",
        "mkdir d; cd d; for i in 1 2 3 4 5 6 7; do head -c 12M /dev/zero >$i; done; chmod 0 ../d; sleep 1000",
        'for i in 3 4 5 6 7 8 9; do eval "exec $i>f"; rm f; head -c 12M /dev/zero >&$i; done; sleep 1000',
    ],
    ids=["shm", "closed-directory", "unlinked"],
)
def test_disk_filled_by_many_files_is_reported_and_stopped(victim, script):
    result = victim.client.bash(script, timeout=PATIENCE_S)
    assert "disk" in result.limit_exceeded
    assert f"at most {DISK_MB} MiB" in result.limit_exceeded
    victim.works()


def test_too_many_files_are_reported_and_stopped(victim):
    result = victim.client.bash(f"mkdir d; cd d; seq {FILES + 500} | xargs touch; sleep 1000", PATIENCE_S)
    assert "files" in result.limit_exceeded
    victim.works()


def test_who_fills_the_disk_again_is_ended_and_it_is_known_why(victim):
    fill = "for i in $(seq 40); do head -c 10M /dev/zero >/tmp/{}$i; done; sleep 1000"
    victim.client.bash(fill.format("a"), timeout=PATIENCE_S)
    with pytest.raises(SandboxGone):
        for round_ in range(20):
            victim.client.bash(fill.format(f"b{round_}"), timeout=PATIENCE_S)
    fate = victim.host.fate(victim.info.id)
    assert (fate.kind, "disk limit again" in fate.reason) == ("limited", True)


def test_a_cpu_hog_yields_to_the_server_and_the_node(victim):
    victim.client.bash("for i in 1 2 3 4 5 6; do (while :; do :; done) & done")
    hogs = [hog.pid for hog in processes.usages(victim.info.pid) if hog.pid not in own_processes(victim)]
    assert len(hogs) >= 6
    for pid in hogs:
        assert niceness(pid) >= min(niceness(os.getpid()) + 10, 19)
    assert niceness(server_of(victim)) == niceness(os.getpid())
    victim.works()


def niceness(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def own_processes(victim: Victim) -> list[int]:
    """The runtime's processes and the server: each the only child of the one before."""
    chain = [victim.info.pid]
    while chain[-1] != server_of(victim):
        (below,) = processes.children(chain[-1])
        chain.append(below)
    return chain


def server_of(victim: Victim) -> int:
    for usage in processes.usages(victim.info.pid):
        command = Path(f"/proc/{usage.pid}/cmdline").read_bytes().split(b"\0")
        if (
            any(part.endswith((b"/start.py", b"/template.py")) for part in command)
            and b"--chdir" not in command
        ):
            return usage.pid
    raise AssertionError("no server")


def test_a_flood_of_output_costs_the_server_no_memory(victim):
    before = Path(f"/proc/{server_of(victim)}/statm").read_text().split()[1]
    result = victim.client.bash("yes flood", timeout=1)
    after = Path(f"/proc/{server_of(victim)}/statm").read_text().split()[1]
    assert result.timed_out
    assert result.truncated
    assert len(result.output) < 40_000
    assert int(after) - int(before) < 20 << 20 >> 12
    victim.works()


# -- out of the sandbox ----------------------------------------------


def test_no_secret_of_the_worker_or_the_host_is_anywhere_inside(victim):
    result = victim.client.bash(
        "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; cat /run/sbx/*; id; mount"
    )
    for secret in ("s3cret", "ROLLOUT_TEST_TOKEN", "REDIS", "ROLLOUT_SANDBOX_BINDS", "APPTAINERENV"):
        assert secret not in result.output
    victim.works()


def test_the_server_cannot_be_traced_read_or_robbed_of_its_socket(victim):
    result = victim.python(
        """
import ctypes, os, socket
def server():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = open(f"/proc/{pid}/cmdline", "rb").read()
            if b"/start.py" in command or b"/template.py" in command: yield int(pid)
        except OSError: pass
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PIDFD_OPEN, PIDFD_GETFD = 16, 434, 438
for pid in filter(str.isdigit, os.listdir("/proc")):
    handle = libc.syscall(PIDFD_OPEN, int(pid), 0)
    for fd in range(64):
        copy = libc.syscall(PIDFD_GETFD, handle, fd, 0)
        try:
            if copy >= 0 and socket.socket(fileno=copy).getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                print("robbed", pid, fd)
        except OSError: pass  # no socket
found = [pid for pid in server() if pid != os.getpid()]
assert found
for pid in found:
    if libc.ptrace(PTRACE_ATTACH, pid, 0, 0) == 0: print("traced", pid)
    for name in ("mem", "environ", "maps", "fd", "cwd", "root"):
        try:
            path = f"/proc/{pid}/{name}"
            if os.path.isdir(path): os.listdir(path)
            else: open(path, "rb").read(1)
            if name not in ("cwd", "root"): print("read", path)
            else: os.readlink(path); print("read", path)
        except OSError: pass
print("done")
"""
    )
    assert result.output == "done\n"


def test_there_is_no_socket_to_forge_replies_on(victim):
    result = victim.client.bash(
        "find / -xdev -type s 2>/dev/null; find /run /tmp -type s; grep -c / /proc/net/unix"
    )
    assert result.output.split() == ["0"]
    victim.client.bash(
        "rm -rf /run/sbx/* /run/sbx; python3 -c 'import socket; socket.socket(1).bind(\"/run/sbx/s\")'"
    )
    victim.works()


def test_the_server_can_be_neither_killed_nor_stopped(victim):
    result = victim.client.bash("sleep 60 & kill -STOP -1 $PPID; kill -9 $PPID; kill -9 -1; kill -9 $$")
    assert result.shell_restarted
    assert victim.client.bash("echo lives").output == "lives\n"


def test_a_server_that_is_killed_from_outside_ends_the_sandbox_with_all_that_outlives_it(victim):
    victim.client.bash("(trap '' HUP TERM INT; setsid -f sleep 600)")
    os.kill(server_of(victim), signal.SIGKILL)
    with pytest.raises(SandboxGone):
        victim.client.bash("sleep 5")
    deadline = time.monotonic() + PATIENCE_S
    while (fate := victim.host.fate(victim.info.id)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert fate.kind == "died"
    victim.host.release(victim.info.id)  # waits for the end that the host has begun itself
    assert not processes.with_variable("ROLLOUT_SANDBOX_ID", victim.info.id)
    assert processes.start_time(victim.info.pid) is None


def test_a_stopped_server_does_not_keep_the_sandbox(victim):
    os.kill(server_of(victim), signal.SIGSTOP)
    assert victim.host.release(victim.info.id)


def test_links_left_behind_lead_the_clean_up_nowhere(victim, tmp_path):
    precious = new_state()
    (precious / "file").write_text("precious")
    precious.chmod(0o777)
    (precious / "file").chmod(0o666)
    victim.client.bash(
        f"cd /workspace; ln -s {precious} a; ln -s {precious}/file b; mkdir -p c/d; ln -s {precious} c/d/e;"
        f"chmod 0 c/d c; cd /tmp; ln -s {precious} x; cd ~; ln -s / root; ln -s {precious} /workspace/cmd"
    )
    victim.host.release(victim.info.id)
    assert (precious / "file").read_text() == "precious"
    assert precious.stat().st_mode & 0o777 == 0o777
    shutil.rmtree(precious)


def test_a_link_in_a_bound_place_cannot_be_bound_next(victim, node):
    from sandbox.errors import SandboxRequestError

    victim.client.bash(
        "ln -s /etc /shared/etc; ln -s ../../etc /shared/up; mkdir /shared/fine; echo x >/shared/fine/x"
    )
    for name in ("etc", "up", "../../etc", "fine/../../../etc"):
        bind = BindSpec(f"{victim.shared}/{name}", "/data")
        with pytest.raises(SandboxRequestError, match="ROLLOUT_SANDBOX_BINDS"):
            victim.host.start(SandboxSpec(runtime=node[3], binds=(bind,)))
    bind = BindSpec(f"{victim.shared}/fine", "/data")
    info = victim.host.start(SandboxSpec(runtime=node[3], binds=(bind,)))
    with SyncSandboxClient(info.socket) as client:
        assert client.bash("cat /data/x").output == "x\n"
        assert client.bash("touch /data/y").exit_code != 0
    victim.host.release(info.id)


def test_another_sandboxs_memory_files_and_processes_are_out_of_reach(victim, node):
    neighbour = victim.host.start(SandboxSpec(runtime=node[3]))
    with SyncSandboxClient(neighbour.socket) as client:
        client.bash("echo hers >/tmp/hers; echo hers >/dev/shm/hers; sleep 1000 & ")
        places = f"{victim.state} {Address.parse(neighbour.socket)}"
        result = victim.client.bash(
            f"find / -name hers 2>/dev/null; ls {places}; ps ax | grep 'sleep 100[0]'"
        )
        assert "hers" not in result.output
        assert "sleep 1000" not in result.output
        victim.client.bash("kill -9 -1")
        assert client.bash("cat /dev/shm/hers; jobs").output.startswith("hers\n")
    victim.host.release(neighbour.id)
