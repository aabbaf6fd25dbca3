"""What a sandbox must not see or touch."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import paths, trees
from sandbox.errors import SandboxError, SandboxRequestError
from sandbox.server import writable_root
from sandbox.spec import BindSpec, SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient, sandbox_of
from tests.helpers.sandboxes import new_state
from tests.sandbox.conftest import sandbox_on

box = sandbox_on("apptainer", "bubblewrap")


@pytest.fixture
def client(box) -> Iterator[SyncSandboxClient]:
    with SyncSandboxClient(box.socket) as client:
        yield client


def test_files_of_the_machine_are_not_there(client, shared_state, tmp_path):
    (tmp_path / "secret").write_text("x")
    for path in (tmp_path, shared_state, Path(__file__).parent):
        assert client.bash(f"ls -a {path}").exit_code != 0, path


def test_processes_of_the_machine_are_not_there(client):
    pids = client.bash("ls /proc | grep -c '^[0-9]'").output
    assert int(pids) < 10
    assert client.bash(f"kill -0 {os.getpid()}").exit_code != 0


def test_there_is_no_network_but_loopback(client):
    names = client.bash("tail -n +3 /proc/net/dev | cut -d: -f1").output.split()
    assert names == ["lo"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert client.bash(f"echo >/dev/tcp/127.0.0.1/{server.getsockname()[1]}").exit_code != 0


def test_there_are_no_capabilities_and_no_way_to_the_kernels_switches(client):
    assert "CapEff:\t0000000000000000" in client.bash("cat /proc/self/status").output
    for path in ("/proc/sys/kernel/core_pattern", "/sys/kernel/uevent_helper", "/proc/sysrq-trigger"):
        assert client.bash(f": >>{path}").exit_code != 0, path


def test_all_processes_inside_are_under_the_filter_of_system_calls(client):
    client.bash("sleep 60 &")
    cell = client.ipython("print(*[l for l in open('/proc/self/status') if l.startswith('Seccomp:')])", 60)
    assert cell.output.split() == ["Seccomp:", "2"]
    words = client.bash("grep -h '^Seccomp:' /proc/[0-9]*/status | sort | uniq -c").output.split()
    assert words[1:] == ["Seccomp:", "2"]
    assert int(words[0]) >= 6  # server, shell, sleep, the kernel's two, grep


def test_the_servers_code_is_read_only(client):
    assert client.bash("ls /sbx/ptyprocess").exit_code == 0
    assert client.bash("touch /sbx/x").exit_code != 0


@pytest.mark.apptainer
def test_scripts_of_an_image_are_not_run_before_the_walls_are_up(images, state):
    """Apptainer sources them in the container; they could also give the server a library to load."""
    image = images / "scripts"
    scripts = image / ".singularity.d" / "env"
    scripts.mkdir(parents=True)
    (scripts / "10-hostile.sh").write_text("echo ran >/tmp/ran\n")
    image.chmod(0o755)
    with sandbox_of(SyncHostClient(state), runtime="apptainer", image=str(image)) as (_, client):
        result = client.bash("[ ! -e /tmp/ran ] && echo no")
        assert result.output == "no\n"


def test_an_image_has_no_library_loaded_into_the_server(images, state, container):
    image = images / f"preload-{container}"
    (image / "etc").mkdir(parents=True)
    (image / "etc" / "ld.so.preload").write_text("/workspace/hostile.so\n")
    image.chmod(0o755)
    with sandbox_of(SyncHostClient(state), runtime=container, image=str(image)) as (_, client):
        # The loader says so for each program when it cannot load what is named there.
        assert client.bash('read -r line </etc/ld.so.preload; echo "<$line>"').output == "<>\n"


@pytest.mark.apptainer
def test_system_directories_may_be_changed_and_are_private(shared_state):
    host = SyncHostClient(shared_state)
    with (
        sandbox_of(host, runtime="apptainer") as (_, changed),
        sandbox_of(host, runtime="apptainer") as (_, neighbour),
    ):
        assert changed.bash("touch /usr/bin/mine").exit_code == 0
        assert neighbour.bash("ls /usr/bin/mine").exit_code != 0


@pytest.mark.apptainer
def test_directories_of_the_image_may_be_removed_renamed_and_made_anew(shared_state):
    """As `git checkout` and `pip uninstall` do; without userxattr each of these ended with EIO."""
    anew = "rm -r /usr/share/git-core && mkdir /usr/share/git-core && ls -A /usr/share/git-core"
    move = "mv /usr/share/perl /usr/share/elsewhere && ls -d /usr/share/perl; ls /usr/share/elsewhere"
    with sandbox_of(SyncHostClient(shared_state), runtime="apptainer") as (_, client):
        result = client.bash(anew)
        assert (result.exit_code, result.output) == (0, "")
        renamed = client.bash(move)
        assert "No such file" in renamed.output and renamed.exit_code == 0


@pytest.mark.parametrize(
    "link", ["workspace -> /tmp/outside", "opt -> /tmp/outside", "opt -> ../../../../../../../../tmp/outside"]
)
def test_a_link_in_an_image_leads_the_making_of_places_nowhere(tmp_path, link):
    """In the image's own tree, whatever its links say: the user may own what lies elsewhere."""
    name, _, target = link.partition(" -> ")
    outside = Path("/tmp/outside") / tmp_path.name
    lower, overlay = tmp_path / "lower", tmp_path / "overlay"
    for path in (lower / "tmp", overlay):
        path.mkdir(parents=True)
    (lower / name).symlink_to(target.replace("/tmp/outside", str(outside)))
    program = [sys.executable, str(Path(writable_root.__file__)), str(lower), str(overlay)]
    points = ["/workspace/inner", "/opt/sbx", "=/etc/a/file"]
    shown = ["--", "/bin/sh", "-c", f"ls -d {overlay}/merged/etc/a/file"]
    done = subprocess.run([*program, *points, *shown], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/etc/a/file")
    assert not outside.exists(), "made outside of the image"
    trees.remove(overlay)


@pytest.fixture
def shown(monkeypatch) -> Iterator[Path]:
    """A file that may be bound."""
    place = new_state()
    place.chmod(0o755)
    monkeypatch.setenv("ROLLOUT_SANDBOX_BINDS", f"{place}:ro")
    (place / "names").write_text("127.0.0.1 of-the-request\n")
    yield place / "names"
    shutil.rmtree(place)


def test_the_pack_of_programs_is_shown_and_cannot_be_changed(state, container, monkeypatch):
    home, installed = new_state(), paths.rollout_home()
    home.chmod(0o755)
    for name in ("apptainer", "images"):
        (home / name).symlink_to(installed / name)
    (home / "harnesses" / "agent").mkdir(parents=True)
    (home / "harnesses" / "agent" / "run").write_text("echo runs\n")
    monkeypatch.setenv("ROLLOUT_HOME", str(home))
    monkeypatch.setenv("ROLLOUT_SANDBOX_BINDS", "/nowhere:ro")
    pack, target = str(paths.pack_dir()), "/rollout/harnesses"
    host = SyncHostClient(state)
    try:
        with sandbox_of(host, runtime=container, binds=(BindSpec(pack, target),)) as (_, client):
            assert client.bash(f"bash {target}/agent/run").output == "runs\n"
            assert client.bash(f"echo >{target}/agent/run || echo >{target}/new").exit_code != 0
        with pytest.raises(SandboxRequestError, match="not read-write"):
            host.start(SandboxSpec(runtime=container, binds=(BindSpec(pack, target, read_only=False),)))
        assert (home / "harnesses" / "agent" / "run").read_text() == "echo runs\n"
        with pytest.raises(SandboxRequestError, match="not below a path of ROLLOUT_SANDBOX_BINDS"):
            host.start(SandboxSpec(runtime=container, binds=(BindSpec(str(home), target),)))
    finally:
        shutil.rmtree(home)


def test_what_a_request_binds_covers_a_place_of_our_own(state, shown, container):
    places = ("/etc/hosts", "/etc/resolv.conf")
    binds = (*(BindSpec(str(shown), place) for place in places), BindSpec(str(shown.parent), "/tmp"))
    with sandbox_of(SyncHostClient(state), runtime=container, binds=binds) as (_, client):
        assert client.bash(f"cat {' '.join(places)} /tmp/names").output == 3 * shown.read_text()


@pytest.mark.apptainer
def test_what_an_image_has_in_the_place_of_our_code_neither_covers_it_nor_is_shown(state, shown, images):
    host, linked, full = SyncHostClient(state), images / "linked", images / "full"
    for name in ("sbx-python/lib", "sbx", "run", "etc"):
        (linked / name).mkdir(parents=True)
    for leads_to, target, place in (
        ("sbx-python", "/by/lib", "/sbx-python"),
        ("/", "/by/sbx", "/sbx"),
        ("/", "/by/run", "/run/sbx"),
        ("/", "/by/etc", "/etc/ld.so.preload"),
    ):
        (linked / "by").unlink(missing_ok=True)
        (linked / "by").symlink_to(leads_to)
        bind = BindSpec(str(shown.parent), target)
        with pytest.raises(SandboxError, match=f"a link of the image leads from {target} to .* {place}"):
            host.start(SandboxSpec(runtime="apptainer", image=str(linked), binds=(bind,)))
    for name in ("sbx", "sbx-python"):
        (images / f"file-{name}").mkdir()
        (images / f"file-{name}" / name).write_text("")
        with pytest.raises(SandboxError, match=f"/{name}"):
            host.start(SandboxSpec(runtime="apptainer", image=str(images / f"file-{name}")))
        (full / name).mkdir(parents=True)
        (full / name / "of-the-image").write_text("")
    with sandbox_of(host, runtime="apptainer", image=str(full)) as (_, client):
        assert client.bash("echo /sbx*/of-the-image").output == "/sbx*/of-the-image\n"


@pytest.mark.apptainer
def test_the_machines_network_is_there_on_request_and_is_recorded(shared_state):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        sandbox_of(SyncHostClient(shared_state), runtime="apptainer", network="host") as (info, client),
    ):
        assert "network" in info.isolation_missing
        assert client.bash(f"echo >/dev/tcp/127.0.0.1/{server.getsockname()[1]}").exit_code == 0
