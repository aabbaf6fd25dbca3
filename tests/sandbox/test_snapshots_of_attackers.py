"""Snapshots whose agents mean harm: to the copy, to who begins with it, or by a file of their own making."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import time

import pytest

from sandbox.errors import NotAllowed, SandboxGone, SandboxRequestError, SnapshotError
from sandbox.snapshots import copying
from sandbox.spec import BindSpec, Limits, SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient

BUSY = {
    "swaps": "mkdir d; while :; do mv d r; ln -s / d; rm d; ln -s ../../.. d; rm d; mv r d; done",
    "forks": r"""python3 -c '
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    try:
        if os.fork() and os.getpid() % 5: os._exit(0)
    except OSError: pass
' """,
    "comet": "python3 -c 'import os\nwhile True:\n  if os.fork(): os._exit(0)'",
    "continues": """python3 -c '
import os, signal, threading
def wake():
    while True: os.kill(-1, signal.SIGCONT)
for _ in range(4): threading.Thread(target=wake).start()' & yes >/dev/null""",
    "pipes": "mkfifo p; ln p q; cat <p",
    # Who has a timer wake him is stopped and runs, and is stopped again when one looks. One timer would be
    # lost where the host stops him before he has come to set it anew.
    "wakes": r"""head -c 60M /dev/zero >z; python3 -c '
import ctypes, os, signal
class Event(ctypes.Structure):
    _fields_ = [("v", ctypes.c_void_p), ("signal", ctypes.c_int), ("rest", ctypes.c_int * 13)]
libc, kind, timers = ctypes.CDLL(None), Event(None, signal.SIGCONT), [ctypes.c_void_p() for _ in range(40)]
for timer in timers: libc.timer_create(1, ctypes.byref(kind), ctypes.byref(timer))
while True:
    for number, timer in enumerate(timers, 1):
        libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 0, number * 20_000_000), None)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.path.exists("woken") or os.mkdir("woken")
'""",
}


@pytest.mark.parametrize("kind", BUSY)
def test_no_agent_that_is_busy_wins(shared_state, anything, kind):
    """It stands still or there is no snapshot; either way nothing of the machine is in it and all goes on."""
    host = SyncHostClient(shared_state)
    info = host.start(SandboxSpec(runtime=anything, limits=Limits(processes=100)))
    with SyncSandboxClient(info.socket) as client:
        client.bash(f"({BUSY[kind]}) >/dev/null 2>&1 & sleep 0.5")
        if kind == "wakes":  # who has no timer yet stands still
            assert client.bash("until [ -e woken ]; do sleep 0.1; done").exit_code == 0
        taken = 0
        for number in range(3):
            try:
                assert host.snapshot(info.id, f"{kind}{number}", owner=kind).seconds < 10
                taken += 1
            except SnapshotError as error:
                assert "still" in str(error)
        if kind != "comet":  # who leaves nobody to be stopped may get away, and is not copied
            assert bool(taken) == (kind != "wakes")
        result = client.bash("echo works; kill -9 $!", timeout=60)
        if kind == "forks" and result.limit_exceeded:  # it was as full as this allows for too long
            result = client.bash("echo works")
        assert result.output.startswith("works")
    files = [path for path in (shared_state / "snapshots").rglob("*") if not path.is_symlink()]
    assert len(files) < 200 * 3 and not [path for path in files if path.name == "shadow"]
    assert not (shared_state / info.id / "still").exists()
    assert host.forget_snapshots(kind) == taken
    assert host.release(info.id)


@pytest.mark.apptainer
def test_what_it_left_for_the_next_boot_does_nothing(host, shared, images, monkeypatch):
    """The image's walls have to hold for what an agent made of it, too."""
    monkeypatch.setenv("ROLLOUT_SANDBOX_BINDS", f"{images}:ro,{shared}:ro")
    with pytest.raises(NotAllowed, match="which no sandbox may show"):
        host.start(SandboxSpec(runtime="apptainer", binds=(BindSpec(str(shared), "/data"),)))
    info = host.start(SandboxSpec(runtime="apptainer", binds=(BindSpec(str(images), "/data/x/y"),)))
    with SyncSandboxClient(info.socket) as client:
        client.bash(
            "echo /tmp/evil.so >/etc/ld.so.preload; rm -rf /.singularity.d; mkdir -p /.singularity.d/env"
        )
        client.bash("echo touch /tmp/ran >/.singularity.d/env/9.sh")
        for name, show in (("files", "ls /tmp /.singularity.d/env"), ("link", "ls -A /.singularity.d")):
            host.snapshot(info.id, name)
            client.bash("rm -rf /.singularity.d; touch ran; ln -s /workspace /.singularity.d")
            begun = host.start(SandboxSpec(snapshot=name))
            with SyncSandboxClient(begun.socket) as other:
                result = other.bash(
                    f"{show}; cat /etc/ld.so.preload; ls -d /data/x/y; grep Seccomp: /proc/1/status"
                )
            assert "evil" not in result.output and "ran" not in result.output
            assert result.output.endswith("/data/x/y\nSeccomp:\t2\n")
            assert not [*(host.state / "scratch" / begun.id / "overlay/upper/.singularity.d").iterdir()]
        for replaced in ("mv /data/x /data/z && ln -s /workspace /data/x", "rm /data/x && echo >/data/x"):
            assert client.bash(replaced).exit_code == 0
            host.snapshot(info.id, "trap")
            with pytest.raises(SnapshotError, match="/data/x/y cannot be shown in it"):
                host.start(SandboxSpec(snapshot="trap"))
    assert len([*(host.state / "scratch").iterdir()]) == host.stats()["known"]


def test_a_file_from_elsewhere_writes_nowhere_else(host, shared):
    """`local-unsafe` has no wall but the program that unpacks."""
    info = host.start(SandboxSpec(runtime="local-unsafe"))
    good = shared / "good.tar"
    host.snapshot(info.id, str(good))
    with good.open("rb", buffering=0) as file:
        about = copying.packed_manifest(file)
    aim = shared / "aim"
    aim.mkdir()

    def packed(name: str, text: bytes, *members: tuple[str, bytes, str]) -> str:
        with tarfile.open(shared / name, "w", format=tarfile.PAX_FORMAT) as archive:
            for path, kind, leads in ((copying.MANIFEST, tarfile.REGTYPE, ""), *members):
                member = tarfile.TarInfo(path)
                content = text if path == copying.MANIFEST else b"evil"
                member.type, member.linkname, member.mode = kind, leads, 0o755
                member.size = len(content) if kind == tarfile.REGTYPE else 0
                archive.addfile(member, io.BytesIO(content))
        return str(shared / name)

    every = [(part, tarfile.DIRTYPE, "") for part in json.loads(about)["parts"]]
    for members in (
        [("workspace/../../../evil", tarfile.REGTYPE, "")],
        [(f"{aim}/evil", tarfile.REGTYPE, "")],
        [("workspace/a", tarfile.SYMTYPE, str(aim)), ("workspace/a/evil", tarfile.REGTYPE, "")],
        [("workspace/a", tarfile.SYMTYPE, "../../../.."), ("workspace/a/evil", tarfile.REGTYPE, "")],
        [("workspace/a", tarfile.LNKTYPE, str(good)), ("workspace/a", tarfile.REGTYPE, "")],
        [("workspace", tarfile.SYMTYPE, str(aim)), ("workspace/evil", tarfile.REGTYPE, "")],
        [("workspace", tarfile.SYMTYPE, str(aim))],
    ):
        with contextlib.suppress(SnapshotError):
            begun = host.start(SandboxSpec(snapshot=packed("bad.tar", about, *every, *members)))
            assert not (host.state / "scratch" / begun.id / "workspace").is_symlink()
            host.release(begun.id)
        assert [*aim.iterdir()] == [] and not [*host.state.rglob("evil")] and not [*shared.rglob("evil")]
        assert good.read_bytes()[:100].startswith(copying.MANIFEST.encode())
    newer = json.dumps(json.loads(about) | {"version": 2}).encode()
    elsewhere = json.dumps(json.loads(about) | {"parts": ["../.."]}).encode()
    for text in (newer, elsewhere, b"{}", b"no", b"x"):
        with pytest.raises(SnapshotError, match=r"not known here|damaged"):
            host.start(SandboxSpec(snapshot=packed("bad.tar", text, *every)))
    (shared / "short.tar").write_bytes(good.read_bytes()[:3000])
    (shared / "empty.tar").write_bytes(b"")
    (shared / "link.tar").symlink_to(good)
    os.mkfifo(shared / "pipe.tar")
    for name in ("short", "empty", "link", "pipe", "absent"):
        with pytest.raises(SnapshotError):
            host.start(SandboxSpec(snapshot=f"{shared}/{name}.tar"))
    assert [entry["id"] for entry in host.list()] == [info.id]
    (shared / "out").symlink_to("/tmp")
    for name in (
        "",
        "-x",
        "a/b",
        "..",
        "/etc/x.tar",
        f"{shared}/x",
        f"{shared}/out/x.tar",
        f"{shared}/../x.tar",
    ):
        with pytest.raises(SandboxRequestError, match="no name, and no path"):
            host.snapshot(info.id, name)
    host.snapshot(info.id, str(shared / "link.tar"))  # in the place of the link
    assert not (shared / "link.tar").is_symlink()
    with pytest.raises(SandboxGone):
        host.snapshot("00000000", "x")
    with pytest.raises(SandboxRequestError, match="given no others"):
        host.start(SandboxSpec(snapshot=str(good), files={"a": "b"}))


@pytest.mark.apptainer
def test_who_begins_with_the_bash_of_an_agent_is_stopped_with_all_that_it_began(host):
    info = host.start(SandboxSpec(runtime="apptainer"))
    beat = "(while :; do echo x >/workspace/beat; done) & (exec sleep 999) &"
    bash = f'#!/bin/sh\n{beat}\nexec /bin/bash "$@"\n'
    with SyncSandboxClient(info.socket) as client:
        client.write_file("/usr/local/sbin/bash", bash, 0o755)
        host.snapshot(info.id, "first")
    begun = host.start(SandboxSpec(snapshot="first"))
    made = "until test -e /workspace/beat; do sleep 0.1; done"
    with SyncSandboxClient(begun.socket) as client:
        assert client.bash(made).exit_code == 0, "the bash that was begun is the agent's"
        host.snapshot(begun.id, "second", ends=True)
    written = host.state / "scratch" / begun.id / "workspace" / "beat"
    before = written.read_bytes(), written.stat().st_mtime_ns
    time.sleep(0.2)
    assert (written.read_bytes(), written.stat().st_mtime_ns) == before
