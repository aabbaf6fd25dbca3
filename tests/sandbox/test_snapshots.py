"""Snapshots: what of a sandbox is in another one that begins with it, and what harms neither."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sandbox import processes
from sandbox.client import SandboxClient
from sandbox.config import HostConfig
from sandbox.connection import Address
from sandbox.containers import Containers
from sandbox.errors import SandboxRequestError, SnapshotError
from sandbox.host_client import HostClient
from sandbox.layer import Layer
from sandbox.runtimes import RUNTIMES, Launch
from sandbox.snapshots import copying, keeper, store
from sandbox.spec import SandboxInfo, SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient
from tests.helpers.sandboxes import never_begun
from tests.sandbox.conftest import THREADS, run, why_not
from tests.sandbox.test_host import inside, until

# What an agent can leave behind, in a directory of its own and among the image's.
TREE = r"""
import os, socket
os.makedirs("/workspace/odd/deep/er")
os.chdir("/workspace/odd")
for name in (b"new\nline", b"\xff\xfe", b" -rf", b"x" * 255):
    open(name, "w").close()
with open("sparse", "wb") as file:
    file.seek(1 << 30)
    file.write(b"end")
with open("text", "w") as file:
    file.write("text")
os.link("text", "deep/er/hard")
os.link("text", "/workspace/hard")
for number, target in enumerate(("/etc/passwd", "nothing", "..", "../../../../../etc/shadow")):
    os.symlink(target, f"link{number}")
for name, mode in (("setuid", 0o4755), ("none", 0), ("sticky", 0o1777)):
    with open(name, "w") as file:
        file.write(name * 1000)
    os.setxattr(name, "user.mine", bytes(range(256)))
    os.chmod(name, mode)
os.utime("text", ns=(1, 123456789123456789))
os.utime("link1", ns=(5, 5), follow_symlinks=False)
os.mkfifo("pipe")
socket.socket(socket.AF_UNIX).bind("socket")
os.chmod("deep/er", 0o000)
os.chmod("deep", 0o311)
for place in ("/tmp/t", "/home/sandbox/.profile", "/dev/shm/s", "/opt/new"):
    with open(place, "w") as file:
        file.write(place)
os.utime("/workspace/odd", ns=(7, 7))
"""
MANY = r"""
import os
os.mkdir("/workspace/many")
for i in range(20000):
    with open(f"/workspace/many/{i}", "w") as file:
        file.write(f"{i}" * 7)
"""
IN_THE_IMAGE = r"""
rm -r /usr/share/lintian && mkdir /usr/share/lintian && echo mine >/usr/share/lintian/only &&
mv /usr/share/python3 /usr/share/moved && rm /etc/issue && echo more >>/etc/profile &&
chmod 700 /usr/share/man
"""
# One line for each thing below these, whatever it is; what is closed is opened for the look.
LOOK = r"""
import hashlib, os, stat, sys
def look(path):
    info = os.lstat(path)
    mode, kind = stat.S_IMODE(info.st_mode), stat.S_IFMT(info.st_mode)
    closed = kind in (stat.S_IFREG, stat.S_IFDIR) and not mode & 0o400
    if closed:
        os.chmod(path, 0o700)
    marks = {mark: os.getxattr(path, mark, follow_symlinks=False)
             for mark in os.listxattr(path, follow_symlinks=False)}
    says = []
    if kind == stat.S_IFREG:
        says = [info.st_size, info.st_nlink, info.st_blocks < 64]
        if info.st_size < 1 << 28:
            with open(path, "rb") as file:
                says.append(hashlib.sha1(file.read()).hexdigest())
    elif kind == stat.S_IFLNK:
        says = [os.readlink(path)]
    print(os.fsencode(path), oct(info.st_mode), info.st_mtime_ns, says, marks)
    if kind == stat.S_IFDIR:
        for name in sorted(os.listdir(path)):
            look(path + "/" + name)
    if closed:
        os.chmod(path, mode)
for top in sys.argv[1:]:
    look(top)
"""
NOT_ITS_OWN = {f"/etc/{name}" for name in ("passwd", "group", "hosts", "resolv.conf")} | {
    "/workspace/odd/socket"
}
"""What the runtime shows in their places, and what no archive holds."""
TOPS = "/workspace /home/sandbox /tmp /dev/shm /opt /etc /usr/share"


def look(client: SyncSandboxClient) -> set[str]:
    """All that can be seen of the sandbox's files, a line each."""
    client.write_file("/var/look.py", LOOK)
    assert client.bash(f"python3 /var/look.py {TOPS} >/var/seen; echo $?", timeout=60).output == "0\n"
    return set(client.read_file("/var/seen").decode().splitlines())


def layer_of(info: SandboxInfo) -> Layer:
    return Layer(Address.parse(info.socket))


def test_what_is_kept_is_in_the_next_one_and_both_go_on(host, runtime):
    info = host.start(SandboxSpec(runtime=runtime, owner="me", env={"A": "1"}))
    with SyncSandboxClient(info.socket) as client:
        client.bash("mkdir -p d/closed; cd d; export B=2; echo kept > f; (sleep 1000; echo never) & ")
        client.bash("echo closed > closed/c; chmod 0 closed/c closed")
        told = host.snapshot(info.id, "one:1.0", owner="r")
        assert told.name == "one:1.0" and told.way in ("copy", "reflink") and told.files > 10
        assert "Running" in client.bash("echo later > f; jobs").output
    again = host.start(SandboxSpec(snapshot="one:1.0", owner="you", max_lifetime_s=100))
    assert again.owner == "you" and again.runtime == info.runtime and again.limits == info.limits
    with SyncSandboxClient(again.socket) as client:
        assert client.bash("cat f; echo $A $B; basename $PWD").output == "kept\n1 2\nd\n"
        opened = client.bash(
            "echo mine >f; stat -c %a closed; chmod 700 closed; stat -c %a closed/c; chmod 600 closed/c"
        )
        assert opened.output == "0\n0\n"
        assert client.bash("cat closed/c").output == "closed\n"
    third = host.start(SandboxSpec(snapshot="one:1.0"))
    with SyncSandboxClient(third.socket) as client, SyncSandboxClient(info.socket) as first:
        assert (client.bash("cat f").output, first.bash("cat f").output) == ("kept\n", "later\n")
    stats = host.stats()
    assert (stats["snapshots_taken"], stats["snapshots_begun"], stats["snapshots_kept"]) == (1, 2, 1)
    assert host.forget_snapshots("r") == 1
    with pytest.raises(SnapshotError, match=r"no snapshot 'one:1\.0' is kept"):
        host.start(SandboxSpec(snapshot="one:1.0"))


@pytest.mark.apptainer
def test_a_whole_tree_is_the_same_copied_and_packed(host, shared):
    info = host.start(SandboxSpec(runtime="apptainer"))
    packed = shared / "deeper" / "whole.tar"
    with SyncSandboxClient(info.socket) as client:
        client.bash("touch /opt/same /opt/other")
        layer_of(info).note()
        for number, code in enumerate((TREE, MANY)):
            client.write_file(f"/var/tree{number}.py", code)
        command = f"python3 /var/tree0.py && {IN_THE_IMAGE.strip()} && echo x >/opt/other && echo done"
        assert client.bash(command).output == "done\n"
        for name, way in (("few", "copy"), (str(packed), "packed"), ("many", "copy")):
            if name == "many":
                assert client.bash("python3 /var/tree1.py && echo done").output == "done\n"
            told = host.snapshot(info.id, name)
            assert told.way in (way, "reflink") and told.bytes < 200 << 20
            noted, seen = layer_of(info).unchanged(), look(client)
            assert len(seen) > (20_000 if name == "many" else 1000)
            begun = host.start(SandboxSpec(snapshot=name))
            assert layer_of(begun).unchanged() == noted
            assert noted["/opt/same"] and not noted["/opt/other"]
            with SyncSandboxClient(begun.socket) as other:
                differences = {line for line in seen ^ look(other) if line.split("'")[1] not in NOT_ITS_OWN}
            assert not differences
            host.release(begun.id)
    assert packed.stat().st_mode & 0o777 == 0o600 and [*packed.parent.iterdir()] == [packed]


@pytest.mark.apptainer
def test_what_runs_goes_on_as_if_nothing_had_been(host):
    """Also a command in the foreground, which a shell that ran before it would take for suspended."""
    info = host.start(SandboxSpec(runtime="apptainer"))
    many = " | ".join(["sleep 900"] * 60)  # for 3 s the server waits for what it can ask the shell
    with SyncSandboxClient(info.socket) as client:
        client.bash("sleep 1000 & sleep 1001 & kill -STOP %1; sleep 0.1")
        command = THREADS.submit(client.bash, f"{many} | cat; echo $?", 900)
        until(lambda: inside(info, "sleep 900"), lambda pids: len(pids) == 60)
        assert host.snapshot(info.id, "s").seconds < 3 and not command.done()
        for pid in inside(info, "sleep 900"):
            os.kill(pid, signal.SIGTERM)
        result = command.result()
        assert (result.output, result.exit_code, result.suspended) == ("0\n", 0, False)
        jobs = client.bash("jobs").output
        assert "Stopped" in jobs.splitlines()[0] and "Running" in jobs.splitlines()[1], jobs


def test_quota_restart_and_retention(state, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SANDBOX_SNAPSHOTS_MB", "5")
    host = SyncHostClient(state)
    info = host.start(SandboxSpec(runtime="local-unsafe", owner="me"))
    with SyncSandboxClient(info.socket) as client:
        client.bash("head -c 2M /dev/urandom >f")
        for name in ("a", "b", "c"):  # the third has no room beside the others
            host.snapshot(info.id, name, owner="r")
        host.snapshot(info.id, "c", owner="r")  # in the place of its like
        assert host.stats()["snapshots_kept"] == 2
        client.bash("head -c 9M /dev/urandom >g")
        with pytest.raises(SnapshotError, match="11 MiB are more than ROLLOUT_SANDBOX_SNAPSHOTS_MB=5"):
            host.snapshot(info.id, "d", owner="r")
        assert client.bash("rm g; jobs; echo works").output == "works\n"
        stats = host.stats()
        assert (stats["snapshots_failed"], stats["snapshots_kept"]) == (1, 2)
        assert 4 << 20 < stats["snapshots_bytes"] <= 5 << 20
        # A host that was killed in the middle of one.
        (state / "snapshots" / ".begun" / "files").mkdir(parents=True)
        (state / info.id / "still").touch()
        client.bash("sleep 1000 &")
        processes.send(processes.descendants(info.pid), signal.SIGSTOP)
        os.kill(stats["pid"], signal.SIGKILL)
        while processes.start_time(stats["pid"]) is not None:
            time.sleep(0.01)
        host.list()  # asks a new host
        assert client.bash("jobs").output.count("Running") == 1
    assert host.stats()["snapshots_kept"] == 2 and not (state / info.id / "still").exists()
    for name, gone in (("a", True), ("b", False), ("c", False)):
        if gone:
            with pytest.raises(SnapshotError, match="no snapshot"):
                host.start(SandboxSpec(snapshot=name))
            continue
        begun = host.start(SandboxSpec(snapshot=name, owner="it"))
        with SyncSandboxClient(begun.socket) as client:
            assert client.bash("wc -c <f").output == f"{2 << 20}\n"
    place = state / "snapshots"
    assert place.stat().st_mode & 0o777 == 0o700
    host.stop()
    kept = sorted(path.name for path in place.iterdir())
    assert len(kept) == 2 and not [name for name in kept if name.startswith(".")]
    monkeypatch.setattr(store.time, "time", lambda clock=time.time: clock() + 100)
    removed: list[Path] = []
    later = store.Store(place, 1 << 40, 3600, removed.append)
    later.open()
    later.tidy(short=False)
    assert (len(later), removed) == (2, [])
    later.tidy(short=True)  # of disk: one at a time, the oldest first
    assert len(later) == 1 and removed[0].parent == place
    with later.used("c") as used:
        later.tidy(short=True)
        assert len(later) == 0 and used not in removed
    assert removed[1:] == [used]
    other = store.Store(place, 1 << 40, 99, removed.append)
    other.open()
    other.tidy(short=False)
    assert len(other) == 0


@pytest.mark.apptainer
def test_one_that_ends_and_one_that_is_cancelled(host, shared):
    info = host.start(SandboxSpec(runtime="apptainer"))
    with SyncSandboxClient(info.socket) as client:
        client.bash("head -c 200M /dev/zero >zero; (while :; do date +%N >/tmp/now; sleep 0.01; done) &")
        with pytest.raises(SandboxRequestError):
            host.snapshot(info.id, "/nowhere.tar", ends=True)
        host.snapshot(info.id, "big")
        began = [run(_cancelled(host, SandboxSpec(snapshot="big"), after)) for after in (0.02, 0.05, 0.1)]
        assert any(began)
        scratch = host.state / "scratch"
        deadline = time.monotonic() + 60
        while [path.name for path in scratch.iterdir()] != [info.id] or host.stats()["known"] != 1:
            assert time.monotonic() < deadline, "a start that was cancelled has left something"
            time.sleep(0.02)
        now = scratch / info.id / "tmp" / "now"
        host.snapshot(info.id, f"{shared}/last.tar", ends=True)
        before = now.read_text()
        time.sleep(0.3)
        assert now.read_text() == before
    assert host.release(info.id)
    begun = host.start(SandboxSpec(snapshot=f"{shared}/last.tar"))
    with SyncSandboxClient(begun.socket) as client:
        assert client.bash("cat /tmp/now").output == before


async def _cancelled(host: SyncHostClient, spec: SandboxSpec, after: float) -> bool:
    """Whether a start was cancelled in its middle."""
    task = asyncio.create_task(HostClient(host.state).start(spec))
    await asyncio.sleep(after)
    task.cancel()
    try:
        await HostClient(host.state).release((await task).id)
    except asyncio.CancelledError:
        return True
    return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
@pytest.mark.may_skip
@pytest.mark.parametrize("where", ["store", "shared"])
def test_a_disk_that_is_full_in_the_middle_harms_nobody(state, shared, monkeypatch, where):
    if reason := why_not("apptainer"):
        pytest.skip(reason)
    monkeypatch.setattr(keeper, "free_disk", lambda place: 1 << 40)  # another fills it after the look
    state.chmod(0o711)
    place = {"store": state / "snapshots", "shared": shared}[where]
    place.mkdir(mode=0o700, exist_ok=True)
    name = {"store": "x", "shared": f"{shared}/x.tar"}[where]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", place], check=True)

    async def scenario() -> None:
        containers = Containers(state, HostConfig())
        info = await containers.start(SandboxSpec(runtime="apptainer"))
        client = SandboxClient(info.socket)
        await client.bash("for i in $(seq 9); do head -c 5M /dev/urandom >f$i; done; sleep 1000 &")
        request = {"op": "snapshot", "id": info.id, "name": name, "owner": "", "wait_s": 0, "ends": True}
        with pytest.raises(SnapshotError, match=r"No space left on device|Wrote only"):
            await containers.snapshots.answer(request)
        assert (await client.bash("jobs; cat f* | wc -c")).output.endswith(f"{45 << 20}\n")
        await client.bash("rm f*")
        for _ in range(200):
            if not [*place.iterdir()]:
                break
            await asyncio.sleep(0.05)
        assert [*place.iterdir()] == []
        await containers.snapshots.answer(request)
        assert len([*place.iterdir()]) == 1
        monkeypatch.setattr(RUNTIMES["apptainer"], "in_memory", True)
        with pytest.raises(SnapshotError, match="kept in memory"):
            await containers.start(SandboxSpec(snapshot=name))
        await client.close()
        await containers.close()

    try:
        run(scenario())
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_what_is_kept_in_memory_is_not_taken(state):
    (state / "records").mkdir()
    container = never_begun("00000001", state, pid=os.getpid())
    container.info = SandboxInfo("00000001", "s", "apptainer", "n", [], os.getpid(), 0.0)
    snapshots = keeper.Snapshots(state, HostConfig(), {container.id: container}, lambda path: None)
    request = {"op": "snapshot", "id": container.id, "name": "x", "owner": "", "wait_s": 0, "ends": False}
    with pytest.raises(SnapshotError, match="kept in memory"):
        run(snapshots.answer(request))
    assert snapshots.stats()["snapshots_failed"] == 1
    with pytest.raises(SandboxRequestError, match="incomplete request"):
        run(snapshots.answer({"op": "snapshot", "id": 1}))


def test_a_copy_that_shares_blocks_is_the_same_too(tmp_path):
    """By `cp`, which only file systems are given that can: here it copies."""
    runtime, trees = RUNTIMES["bubblewrap"](), []
    for name in ("one", "two"):
        launch = Launch(name, tmp_path)
        launch.make_directories(None)
        trees.append(launch)
    own = trees[0].scratch / "workspace"
    (own / "d").mkdir()
    (own / "d" / "f").write_text("text")
    (own / "hard").hardlink_to(own / "d" / "f")
    (own / "link").symlink_to("/etc/passwd")
    with (own / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (own / "d" / "f").chmod(0o4711)
    kept = tmp_path / "kept"
    kept.mkdir()
    asyncio.run(copying.copy_out(runtime, trees[0], kept))
    asyncio.run(copying.copy_in(runtime, trees[1], kept, copying.parts_of(trees[0])))
    seen = [
        sorted(
            (str(path.relative_to(root)), info.st_mode, info.st_nlink, info.st_size, info.st_blocks < 100)
            for path in root.rglob("*")
            for info in [path.lstat()]
            if not path.is_dir()
        )
        for root in (own, trees[1].scratch / "workspace")
    ]
    assert seen[0] == seen[1] and len(seen[0]) == 4
