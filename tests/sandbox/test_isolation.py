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

from sandbox import trees
from sandbox.connection import Address
from sandbox.errors import SandboxError
from sandbox.runtimes import writable_root
from sandbox.spec import BindSpec, SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient, sandbox_of
from tests.helpers.sandboxes import new_state
from tests.sandbox.conftest import why_not


@pytest.fixture(scope="module", params=["apptainer", "bubblewrap"])
def pair(request, shared_state):
    """Two sandboxes of one host: (host state, [info, info], [client, client])."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    os.environ["ROLLOUT_SANDBOX_TEST_SECRET"] = os.environ["TEST_SECRET"] = "s3cret"
    try:
        host = SyncHostClient(shared_state)
        infos = [host.start(SandboxSpec(runtime=request.param)) for _ in range(2)]
    finally:
        del os.environ["ROLLOUT_SANDBOX_TEST_SECRET"], os.environ["TEST_SECRET"]
    clients = [SyncSandboxClient(info.socket) for info in infos]
    yield shared_state, infos, clients
    for info, client in zip(infos, clients, strict=True):
        client.close()
        host.release(info.id)


def test_files_of_the_machine_are_not_there(pair, tmp_path):
    state, _, (client, _) = pair
    (tmp_path / "secret").write_text("x")
    for path in (tmp_path, state, Path(__file__).parent):
        assert client.bash(f"ls -a {path}").exit_code != 0, path


def test_the_other_sandbox_is_out_of_reach(pair):
    state, infos, (one, two) = pair
    two.bash("echo mine >/workspace/x; echo mine >/tmp/x; sleep 60 &")
    assert "x" not in one.bash("ls /workspace /tmp").output.splitlines()
    assert one.bash("find / -type s 2>/dev/null").output == ""
    assert one.bash(f"ls {Address.parse(infos[1].socket)} {state}").exit_code != 0
    assert "sleep 60" not in one.bash("ps ax").output


def test_processes_of_the_machine_are_not_there(pair):
    client = pair[2][0]
    pids = client.bash("ls /proc | grep -c '^[0-9]'").output
    assert int(pids) < 10
    assert client.bash(f"kill -0 {os.getpid()}").exit_code != 0


def test_there_is_no_network_but_loopback(pair):
    client = pair[2][0]
    names = client.bash("tail -n +3 /proc/net/dev | cut -d: -f1").output.split()
    assert names == ["lo"]
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    assert client.bash(f"echo >/dev/tcp/127.0.0.1/{port}").exit_code != 0
    server.close()


def test_the_environment_is_clean(pair):
    output = pair[2][0].bash("env; cat /proc/*/environ | tr '\\0' '\\n'").output
    assert "s3cret" not in output
    assert "APPTAINERENV" not in output


def test_there_are_no_capabilities_and_no_way_to_the_kernels_switches(pair):
    client = pair[2][0]
    assert "CapEff:\t0000000000000000" in client.bash("cat /proc/self/status").output
    for path in ("/proc/sys/kernel/core_pattern", "/sys/kernel/uevent_helper", "/proc/sysrq-trigger"):
        assert client.bash(f": >>{path}").exit_code != 0, path


def test_all_processes_inside_are_under_the_filter_of_system_calls(pair):
    client = pair[2][0]
    client.bash("sleep 60 &")
    cell = client.ipython("print(*[l for l in open('/proc/self/status') if l.startswith('Seccomp:')])", 60)
    assert cell.output.split() == ["Seccomp:", "2"]
    found = client.bash("grep -h '^Seccomp:' /proc/[0-9]*/status | sort | uniq -c").output.split()
    assert found[1:] == ["Seccomp:", "2"]
    assert int(found[0]) >= 6  # server, shell, sleep, the kernel's two, grep


def test_the_servers_code_is_read_only(pair):
    client = pair[2][0]
    place = "/sbx"
    assert client.bash(f"ls {place}/ptyprocess").exit_code == 0
    assert client.bash(f"touch {place}/x").exit_code != 0


@pytest.fixture
def images(monkeypatch) -> Iterator[Path]:
    """A place below which images have paths."""
    place = new_state()
    place.chmod(0o711)
    monkeypatch.setenv("ROLLOUT_SANDBOX_IMAGE_ROOTS", str(place))
    yield place
    shutil.rmtree(place)


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


@pytest.mark.parametrize("name", ["apptainer", "bubblewrap"])
def test_an_image_has_no_library_loaded_into_the_server(images, state, name):
    if reason := why_not(name):
        pytest.skip(reason)
    image = images / f"preload-{name}"
    (image / "etc").mkdir(parents=True)
    (image / "etc" / "ld.so.preload").write_text("/workspace/hostile.so\n")
    image.chmod(0o755)
    with sandbox_of(SyncHostClient(state), runtime=name, image=str(image)) as (_, client):
        # The loader says so for each program when it cannot load what is named there.
        assert client.bash('read -r line </etc/ld.so.preload; echo "<$line>"').output == "<>\n"


@pytest.mark.apptainer
def test_system_directories_may_be_changed_and_are_private(shared_state):
    host = SyncHostClient(shared_state)
    with (
        sandbox_of(host, runtime="apptainer") as (_, changed),
        sandbox_of(host, runtime="apptainer") as (_, other),
    ):
        assert changed.bash("touch /usr/bin/mine").exit_code == 0
        assert other.bash("ls /usr/bin/mine").exit_code != 0


@pytest.mark.apptainer
def test_directories_of_the_image_may_be_removed_renamed_and_made_anew(shared_state):
    """As `git checkout` and `pip uninstall` do; without userxattr each of these ended with EIO."""
    anew = "rm -r /usr/share/git-core && mkdir /usr/share/git-core && ls -A /usr/share/git-core"
    move = "mv /usr/share/perl /usr/share/elsewhere && ls -d /usr/share/perl; ls /usr/share/elsewhere"
    with sandbox_of(SyncHostClient(shared_state), runtime="apptainer") as (_, client):
        gone = client.bash(anew)
        assert (gone.exit_code, gone.output) == (0, "")
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


@pytest.mark.parametrize("target", ["/etc/hosts", "/etc/resolv.conf"])
@pytest.mark.parametrize("name", ["apptainer", "bubblewrap"])
def test_what_a_request_binds_covers_a_place_of_our_own(state, shown, name, target):
    if reason := why_not(name):
        pytest.skip(reason)
    host = SyncHostClient(state)
    info = host.start(
        SandboxSpec(runtime=name, binds=(BindSpec(str(shown), target), BindSpec(str(shown.parent), "/tmp")))
    )
    with SyncSandboxClient(info.socket) as client:
        assert client.bash(f"cat {target} /tmp/names").output == 2 * shown.read_text()
    host.release(info.id)


@pytest.mark.parametrize(
    ("leads_to", "target", "place"),
    [
        ("sbx-python", "/by/lib", "/sbx-python"),
        ("/", "/by/sbx", "/sbx"),
        ("/", "/by/run", "/run/sbx"),
        ("/", "/by/etc", "/etc/ld.so.preload"),
    ],
)
@pytest.mark.apptainer
def test_what_a_request_binds_does_not_cover_our_code_by_a_link_of_the_image(
    state, shown, images, leads_to, target, place
):
    image = images / "linked"
    for name in ("sbx-python/lib", "sbx", "run", "etc"):
        (image / name).mkdir(parents=True)
    (image / "by").symlink_to(leads_to)
    bind = BindSpec(str(shown.parent), target)
    with pytest.raises(SandboxError, match=f"a link of the image leads from {target} to .* {place}"):
        SyncHostClient(state).start(SandboxSpec(runtime="apptainer", image=str(image), binds=(bind,)))


@pytest.mark.parametrize("place", ["sbx", "sbx-python"])
@pytest.mark.apptainer
def test_a_file_of_the_image_in_the_place_of_our_code_keeps_it_from_starting(state, images, place):
    image = images / "file"
    image.mkdir()
    (image / place).write_text("")
    with pytest.raises(SandboxError, match=f"/{place}"):
        SyncHostClient(state).start(SandboxSpec(runtime="apptainer", image=str(image)))


@pytest.mark.apptainer
def test_a_directory_of_the_image_in_the_place_of_our_code_is_covered(state, images):
    image = images / "full"
    for name in ("sbx", "sbx-python"):
        (image / name).mkdir(parents=True)
        (image / name / "of-the-image").write_text("")
    with sandbox_of(SyncHostClient(state), runtime="apptainer", image=str(image)) as (_, client):
        assert client.bash("echo /sbx*/of-the-image").output == "/sbx*/of-the-image\n"


@pytest.mark.apptainer
def test_the_machines_network_is_there_on_request_and_is_recorded(shared_state):
    server = socket.create_server(("127.0.0.1", 0))
    with sandbox_of(SyncHostClient(shared_state), runtime="apptainer", network="host") as (info, client):
        assert "network" in info.isolation_missing
        port = server.getsockname()[1]
        assert client.bash(f"echo >/dev/tcp/127.0.0.1/{port}").exit_code == 0
    server.close()
