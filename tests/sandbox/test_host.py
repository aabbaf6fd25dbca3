"""The host: start and failure to start, every way a sandbox ends, and what a killed host leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from sandbox import paths, processes
from sandbox.client import SandboxClient
from sandbox.config import HostConfig
from sandbox.connection import Address
from sandbox.container import Container
from sandbox.containers import MOST_ENDING, Containers
from sandbox.errors import (
    ImageError,
    RuntimeUnavailable,
    SandboxError,
    SandboxGone,
    SandboxRequestError,
    SandboxStartError,
    from_wire,
)
from sandbox.host import Host, take_lock
from sandbox.host_client import HostClient, ensure_host
from sandbox.images.locks import Lease
from sandbox.records import Record, boot_id, now
from sandbox.runtimes import RUNTIMES, Launch
from sandbox.server import wire
from sandbox.spec import Fate, Limits, SandboxInfo, SandboxSpec
from tests.helpers.blocking import SyncSandboxClient, loop
from tests.helpers.sandboxes import kill_from_outside
from tests.sandbox.conftest import run, why_not

# Processes that ignore polite signals, leave their session and hold on.
STUBBORN = """
for i in 1 2 3; do setsid bash -c 'trap "" TERM HUP INT; while :; do sleep 1000; done' & done
sleep 0.2
"""


def processes_of(pid: int) -> list[int]:
    """The runtime's process and everything below it."""
    return [pid, *processes.descendants(pid)]


def inside(info: SandboxInfo, command: str) -> list[int]:
    """Processes of the sandbox with that command line."""
    command_line = command.replace(" ", "\0") + "\0"
    return [pid for pid in processes_of(info.pid) if _command_line(pid) == command_line]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def assert_gone(state: Path, info: SandboxInfo, pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while alive := [pid for pid in pids if processes.start_time(pid) is not None]:
        assert time.monotonic() < deadline, f"processes {alive} are left"
        time.sleep(0.01)
    assert not processes.with_variable("ROLLOUT_SANDBOX_ID", info.id)
    assert processes.start_time(info.pid) is None
    assert not [path for path in state.rglob("*") if info.id in path.name]
    assert not Path(Address.parse(info.socket).path).exists()


def test_release_leaves_no_process_socket_or_file(state, host, runtime):
    info = host.start(SandboxSpec(runtime=runtime, owner="me"))
    assert [entry["id"] for entry in host.list()] == [info.id]
    with SyncSandboxClient(info.socket) as client:
        client.bash(STUBBORN)
        client.bash("mkdir -p closed/in && touch closed/in/f && chmod 000 closed/in closed")
        pids = until(lambda: processes_of(info.pid), lambda pids: len(pids) >= 8)
        assert host.release(info.id)
        assert_gone(state, info, pids)
        with pytest.raises(SandboxGone):
            client.bash("echo dead")
    assert not host.release(info.id)
    assert host.list() == []


def test_release_without_waiting_ends_as_much_a_little_later(state, host, anything):
    info = host.start(SandboxSpec(runtime=anything, owner="me"))
    pids = processes_of(info.pid)
    assert host.release(info.id, wait=False)
    assert host.list() == []
    until(host.stats, lambda stats: stats["released"] == 1)
    assert_gone(state, info, pids)
    assert not host.release(info.id)


def test_stopping_the_host_ends_everything(state, host, runtime):
    infos = [host.start(SandboxSpec(runtime=runtime)) for _ in range(3)]
    pids = [pid for info in infos for pid in processes_of(info.pid)]
    daemon = host.stats()["pid"]
    host.stop()
    for info in infos:
        assert_gone(state, info, [*pids, daemon])
    assert {path.name for path in state.iterdir()} == {"host.lock", "host.log", "start.lock"}


def test_sigterm_ends_everything(state, host, anything):
    info = host.start(SandboxSpec(runtime=anything))
    pids = processes_of(info.pid)
    daemon = host.stats()["pid"]
    os.kill(daemon, signal.SIGTERM)
    assert_gone(state, info, [*pids, daemon])


def kill_host(host, daemon: int = 0) -> None:
    """SIGKILL, and wait until the lock it held is free. `daemon`: its pid, where it cannot say it."""
    daemon = daemon or host.stats()["pid"]
    os.kill(daemon, signal.SIGKILL)
    while processes.start_time(daemon) is not None:
        time.sleep(0.01)


def test_a_sandbox_outlives_its_host_and_the_next_host_adopts_it(state, host, runtime):
    spec = SandboxSpec(runtime=runtime, owner="me", max_lifetime_s=1000, limits=Limits(memory_mb=1000))
    info = host.start(spec)
    with SyncSandboxClient(info.socket) as client:
        client.bash(f"x=kept; {STUBBORN}")
        pids = processes_of(info.pid)
        kill_host(host)
        assert client.bash("echo $x").output == "kept\n"
        (listed,) = host.list()  # asks a new host
        seconds = listed.pop("seconds_left")
        assert SandboxInfo.from_json(listed) == info
        assert 900 < seconds < 1000
        assert client.bash("echo $x").output == "kept\n"
    stats = host.stats()
    assert (stats["adopted"], stats["swept"]) == (1, 0)
    assert host.release_owner("me") == 1
    assert_gone(state, info, pids)


def test_who_asked_a_killed_host_for_a_sandbox_is_given_one_by_the_next(state, host, anything):
    before = host.start(SandboxSpec(runtime=anything))
    asked = asyncio.run_coroutine_threadsafe(HostClient(state).start(SandboxSpec(runtime=anything)), loop())
    while len(list((state / "records").iterdir())) < 2:
        time.sleep(0.001)
    kill_host(host)
    info = asked.result()
    assert {box["id"] for box in host.list()} >= {before.id, info.id}
    with SyncSandboxClient(info.socket) as client:
        assert client.bash("echo here").output == "here\n"


def test_so_is_who_asked_one_that_had_begun_nothing(state, host, anything):
    ensure_host(state)
    daemon = host.stats()["pid"]
    os.kill(daemon, signal.SIGSTOP)
    asked = asyncio.run_coroutine_threadsafe(HostClient(state).start(SandboxSpec(runtime=anything)), loop())
    time.sleep(0.3)  # for the request to lie there
    kill_host(host, daemon)
    assert asked.result().id in {box["id"] for box in host.list()}


def test_release_after_a_killed_host_starts_one_that_ends_the_sandbox(state, host, anything):
    info = host.start(SandboxSpec(runtime=anything))
    pids = processes_of(info.pid)
    kill_host(host)
    assert host.release(info.id)
    assert_gone(state, info, pids)


def test_stop_after_a_killed_host_leaves_nothing(state, host, anything):
    info = host.start(SandboxSpec(runtime=anything))
    pids = processes_of(info.pid)
    kill_host(host)
    host.stop()
    assert_gone(state, info, pids)


def test_an_adopted_sandbox_that_ends_is_noticed_and_its_lifetime_still_counts(state, host, anything):
    # Not over before the next host has begun, however long that takes: it would be swept, not adopted.
    first, second = [host.start(SandboxSpec(runtime=anything, max_lifetime_s=s)) for s in (1000, 10)]
    pids = [pid for info in (first, second) for pid in processes_of(info.pid)]
    kill_host(host)
    ensure_host(state)
    kill_from_outside(first.pid)
    until(host.stats, lambda stats: stats["known"] == 0, 60)
    for info in (first, second):
        assert_gone(state, info, pids)
    assert host.fate(first.id).kind == "died"
    assert host.fate(second.id) == Fate("expired", "outlived its 10 s")


def test_what_a_killed_host_had_not_finished_is_swept(state, host, anything):
    info = host.start(SandboxSpec(runtime=anything))
    pids = processes_of(info.pid)
    record = state / "records" / f"{info.id}.json"
    unfinished = json.loads(record.read_text()) | {"info": None, "deadline": None}
    kill_host(host)
    record.write_text(json.dumps(unfinished))
    (state / "records" / "0badc0de.json").write_text("{")
    (state / "scratch" / "0badc0de").mkdir()
    ensure_host(state)
    assert_gone(state, info, pids)
    assert not (state / "scratch" / "0badc0de").exists()
    stats = host.stats()
    assert (stats["adopted"], stats["swept"]) == (0, 2)


def test_what_has_no_record_is_swept_at_the_start_and_what_others_keep_there_is_not(state):
    ours = [state / "0badc0de", state / "scratch" / "0badc0df"]
    others = [state / "notes", state / "0badc0de0", state / "scratch" / "notes"]
    for path in ours + others:
        path.mkdir(parents=True)
    run(Containers(state, HostConfig.from_environment()).take_over())
    assert [path.exists() for path in ours] == [False, False]
    assert all(path.exists() for path in others)


def test_a_host_that_stops_starts_nothing_more(state):
    async def scenario():
        host = Host(state, HostConfig.from_environment())
        try:
            assert (await host._answer({"op": "stop"}))["ok"]
            return await host._answer({"op": "start", "spec": SandboxSpec(runtime="local-unsafe").to_json()})
        finally:
            await host.containers.close()

    error = from_wire(run(scenario())["error"])
    assert isinstance(error, SandboxGone) and "ask again" in str(error)


@pytest.fixture
def ended(state):
    """Ends sandboxes that never began, by a host's rules and in this process; gives its containers."""

    def end(*boxes: Container, kind: str = "died", times: int = 1) -> Containers:
        containers = Containers(state, HostConfig.from_environment())

        async def scenario():
            containers._all = {box.id: box for box in boxes}
            for box in boxes * times:
                containers.end_for(box, "ended by itself", kind)
            await asyncio.gather(*(box.ending for box in boxes))

        run(scenario())
        assert containers.stats()["known"] == 0
        return containers

    return end


def never_begun(name: str) -> Container:
    launch = Launch(name, Path("w"))
    return Container(name, RUNTIMES["apptainer"](), SandboxSpec(), launch, Limits())


def test_who_ends_sandboxes_faster_than_they_go_waits_for_them(state, monkeypatch):
    boxes = [never_begun(str(number)) for number in range(MOST_ENDING + 1)]
    containers = Containers(state, HostConfig.from_environment())
    containers._all = {box.id: box for box in boxes}

    async def scenario():
        disk = asyncio.Event()

        async def remove(*args):
            await disk.wait()

        monkeypatch.setattr(containers, "_remove", remove)
        for box in boxes[:-1]:
            assert await asyncio.wait_for(containers.release(box.id, wait=False), 10)
        last = asyncio.create_task(containers.release(boxes[-1].id, wait=False))
        await asyncio.sleep(0.05)
        assert not last.done()
        disk.set()
        assert await last
        await asyncio.gather(*(box.ending for box in boxes))

    run(scenario())
    assert containers.stats()["known"] == 0


def test_the_end_of_a_sandbox_counts_once_and_lets_go_of_all_that_was_held_for_it(ended):
    box, released = never_begun("x"), []
    box.leases = [Lease()]
    box.leases[0].callback(released.append, box.id)
    box.file_system = held = os.open("/", os.O_RDONLY)
    counts = ended(box, kind="expired", times=2).counts
    assert (counts["expired"], counts["released"], released) == (1, 1, ["x"])
    assert box.file_system is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)


def test_of_how_sandboxes_ended_the_latest_are_known(ended, monkeypatch):
    monkeypatch.setattr("sandbox.containers.FATES_KEPT", 2)
    containers = ended(*map(never_begun, "abc"))
    assert [containers.fate(name) is not None for name in "abc"] == [False, True, True]


@pytest.mark.parametrize(
    ("change", "adopted"),
    [
        ({}, True),
        ({"deadline": 0.0}, False),
        ({"deadline": None}, False),
        ({"info": None}, False),
        ({"boot_id": "of another boot"}, False),
        ({"start_time": 1}, False),
        ({"pid": None}, False),
    ],
)
def test_only_what_somebody_has_that_runs_on_and_whose_time_is_not_over_is_adopted(change, adopted):
    here = {"pid": os.getpid(), "start_time": processes.start_time(os.getpid()), "boot_id": boot_id()}
    record = Record("x", "apptainer", None, **{**here, "deadline": now() + 60, "info": {}, **change})
    assert record.may_be_adopted() == adopted


def until(ask, holds, limit_s=30.0):
    """Ask until the answer is right; returns it."""
    deadline = time.monotonic() + limit_s
    while not holds(answer := ask()):
        assert time.monotonic() < deadline, f"still {answer!r} after {limit_s} s"
        time.sleep(0.02)
    return answer


def test_lifetime_ends_a_forgotten_sandbox(state, host, anything):
    info = host.start(SandboxSpec(runtime=anything, max_lifetime_s=1.0))
    pids = processes_of(info.pid)
    stats = until(host.stats, lambda stats: stats["released"])
    assert_gone(state, info, pids)
    assert stats["expired"] == 1


def test_owner_release_takes_only_the_owners(host, anything):
    infos = [host.start(SandboxSpec(runtime=anything, owner=owner)) for owner in ("a", "b", "a")]
    assert host.release_owner("a") == 2
    assert [entry["id"] for entry in host.list()] == [infos[1].id]
    assert host.release_owner("nobody of that name") == 0


def test_a_sandbox_that_dies_is_cleaned_up(state, host, anything):
    info = host.start(SandboxSpec(runtime=anything))
    kill_from_outside(info.pid)
    until(host.stats, lambda stats: stats["died"])
    host.release(info.id)  # waits for the end that the host has begun itself
    assert_gone(state, info, [info.pid])
    assert host.stats()["died"] == 1


def test_cancelling_a_start_releases_it(state, host, anything):
    host.release(host.start(SandboxSpec(runtime=anything)).id)
    spec = SandboxSpec(runtime=anything, owner="me")
    for begun in range(2, 22):
        start = asyncio.run_coroutine_threadsafe(HostClient(state).start(spec), loop())
        until(host.stats, lambda stats: stats["known"] == 1)
        start.cancel()
        stats = until(host.stats, lambda stats: stats["started"] + stats["failed"] == begun)  # noqa: B023
        if stats["failed"]:
            break
        # On a busy machine one may be ready before; then another is cancelled.
        host.release_owner("me")
    assert until(host.stats, lambda stats: stats["known"] == 0)["failed"] == 1
    assert not list((state / "scratch").iterdir())


def test_a_sandbox_is_ended_whose_owner_does_not_hear_of_it_any_more(state, host):
    ensure_host(state)
    with socket.socket(socket.AF_UNIX) as owner:
        owner.connect(str(state / "host.sock"))
        owner.shutdown(socket.SHUT_RD)  # the host finds that out when it answers, and not before
        spec = SandboxSpec(runtime="local-unsafe", owner="me")
        owner.sendall(wire.encode({"op": "start", "spec": spec.to_json()}))
        stats = until(host.stats, lambda stats: stats["started"] and not stats["known"])
    assert (stats["started"], stats["released"], stats["failed"]) == (1, 1, 0)


def test_cancelling_a_command_interrupts_it_inside(host, anything):
    info = host.start(SandboxSpec(runtime=anything))

    async def scenario():
        async with SandboxClient(info.socket) as client:
            task = asyncio.create_task(client.bash("sleep 600", timeout=600))
            await asyncio.to_thread(until, lambda: inside(info, "sleep 600"), bool)
            task.cancel()
            assert (await client.bash("pgrep -c sleep; echo next")).output == "0\nnext\n"

    run(scenario())


@pytest.mark.apptainer
def test_a_failed_start_says_what_the_runtime_said(state, host, images):
    image = images / "broken"
    (image / "usr").mkdir(parents=True)
    (image / "workspace").write_text("where a directory has to be")
    image.chmod(0o755)
    with pytest.raises(SandboxStartError, match=r"(?s)broken.*it said: .*workspace"):
        host.start(SandboxSpec(runtime="apptainer", image=str(image)))
    assert not list((state / "scratch").iterdir())
    assert host.stats()["failed"] == 1


@pytest.mark.apptainer
def test_an_image_without_python_shell_or_c_library_serves(host, images, container):
    """The server brings its own; what the image lacks is missing to the agent only."""
    image = images / "empty"
    (image / "usr" / "bin").mkdir(parents=True)
    (image / "bin").symlink_to("usr/bin")
    image.chmod(0o755)
    info = host.start(SandboxSpec(runtime=container, image=str(image), env={"A": "b"}))
    with SyncSandboxClient(info.socket) as client:
        result = client.bash("echo $A >x; read line <x; echo $line; python3 -V; f() { echo f; }; f")
        assert result.output.splitlines()[0] == "b"
        assert "command not found" in result.output
        assert result.output.splitlines()[-1] == "f"


@pytest.mark.apptainer
def test_the_agent_s_shell_has_what_a_docker_image_declares(host, images, container):
    environment = images / "image" / ".singularity.d" / "env"
    environment.mkdir(parents=True)
    (images / "image" / "usr" / "bin").mkdir(parents=True)
    lines = ['export PATH="/opt/conda/bin:/usr/bin"']
    lines += [f'export {name}="${{{name}:-"of the image"}}"' for name in ("COLOUR", "PAGER")]
    (environment / "10-docker2singularity.sh").write_text("\n".join(lines))
    info = host.start(SandboxSpec(runtime=container, image=str(images / "image")))
    with SyncSandboxClient(info.socket) as client:
        result = client.bash("echo $PATH $COLOUR $PAGER")
        assert result.output == "/opt/conda/bin:/usr/bin of the image cat\n"


def test_what_bounds_the_image_cache_reaches_a_host_that_starts_by_itself(state, host, monkeypatch):
    if reason := why_not("apptainer"):
        pytest.skip(reason)
    monkeypatch.setenv("ROLLOUT_IMAGE_CACHE", str(state / "cache"))
    monkeypatch.setenv("ROLLOUT_IMAGE_CACHE_GB", "0.001")
    with pytest.raises(ImageError, match=r"ROLLOUT_IMAGE_CACHE_GB|1\.0 MB"):
        host.start(SandboxSpec())


def test_impossible_requests_name_the_remedy(host):
    with pytest.raises(RuntimeUnavailable, match=r"'docker'.*choose auto, apptainer"):
        host.start(SandboxSpec(runtime="docker"))
    with pytest.raises(SandboxRequestError, match="choose none or host"):
        host.start(SandboxSpec(runtime="local-unsafe", network="some"))
    with pytest.raises(SandboxRequestError, match=r"limits.memory_mb=0 .*ROLLOUT_SANDBOX_MEMORY_MB"):
        host.start(SandboxSpec(runtime="local-unsafe", limits=Limits(memory_mb=0)))
    with pytest.raises(SandboxRequestError, match="max_lifetime_s=0"):
        host.start(SandboxSpec(runtime="local-unsafe", max_lifetime_s=0))
    with pytest.raises(SandboxRequestError, match="outside the workspace"):
        host.start(SandboxSpec(runtime="local-unsafe", files={"../x": ""}))


@pytest.mark.apptainer
def test_an_absent_image_is_named(host):
    with pytest.raises(ImageError, match="no-such-image"):
        host.start(SandboxSpec(image="no-such-image"))


def test_many_callers_start_one_host_and_many_sandboxes(state, anything):
    async def scenario():
        clients = [HostClient(state) for _ in range(6)]
        infos = await asyncio.gather(*(client.start(SandboxSpec(runtime=anything)) for client in clients))
        assert len({info.id for info in infos}) == 6
        assert len(await clients[0].list()) == 6

    run(scenario())
    assert (state / "host.log").read_text().count(" serves ") == 1


def test_two_hosts_cannot_share_a_state_directory(state):
    lock = take_lock(state)
    with pytest.raises(SandboxError, match="another sandbox host"):
        take_lock(state)
    os.close(lock)


def test_without_apptainer_and_image_bubblewrap_serves_and_says_what_is_missing(state, host, monkeypatch):
    if reason := why_not("bubblewrap"):
        pytest.skip(reason)
    # What is missing is the image; bwrap itself may be one that the set-up unpacked.
    monkeypatch.setenv("PATH", paths.tool_path())
    monkeypatch.setenv("ROLLOUT_APPTAINER", "/absent/apptainer")
    monkeypatch.setenv("ROLLOUT_HOME", str(state / "empty"))
    info = host.start(SandboxSpec())
    assert info.runtime == "bubblewrap"
    assert any("no image here" in text for text in info.isolation_missing)
    with SyncSandboxClient(info.socket) as client:
        assert client.bash(f"ls /root {Path(__file__).parent} {state} /var/lib").output.count("cannot") == 4
        assert client.bash("touch /usr/x").exit_code != 0
        assert client.bash("touch /workspace/x /tmp/x ~/x && git --version").exit_code in (0, 127)
    assert (state / "host.log").read_text().count("IS USED because of apptainer: ROLLOUT_APPTAINER") == 1
