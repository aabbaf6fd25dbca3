"""What a node has left: read from the machine, and held to by the sandbox host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.errors import NodeShort, SandboxError, from_wire, to_wire
from sandbox.processes import memory_available, memory_total
from sandbox.room import (
    DISK,
    DISK_FLOOR,
    MEMORY,
    MEMORY_FLOOR,
    MIB,
    Floors,
    free_disk,
    free_memory,
    shortages,
)
from sandbox.spec import SandboxSpec
from tests.helpers.blocking import SyncHostClient, SyncSandboxClient
from tests.helpers.sandboxes import new_state
from tests.sandbox.conftest import why_not

MORE_THAN_ANY = 1 << 40


def test_each_shortage_says_what_is_left_where_and_how_much_is_needed(tmp_path):
    missing = tmp_path / "not" / "yet"
    by_place = shortages(missing, Floors(disk_mb=MORE_THAN_ANY, memory_mb=MORE_THAN_ANY))
    assert list(by_place) == [DISK, MEMORY]
    assert f"MiB of disk are left at {missing}, fewer than {DISK_FLOOR}={MORE_THAN_ANY}" in by_place[DISK]
    assert f"fewer than {MEMORY_FLOOR}={MORE_THAN_ANY}" in by_place[MEMORY]


def test_a_floor_of_zero_is_not_looked_at_and_one_that_is_met_is_no_shortage(tmp_path):
    assert shortages(tmp_path, Floors(0, 0)) == {}
    assert shortages(tmp_path, Floors(1, 1)) == {}


def test_with_a_margin_more_must_be_free(tmp_path):
    floors = Floors(disk_mb=free_disk(tmp_path) // MIB * 9 // 10, memory_mb=0)
    assert shortages(tmp_path, floors) == {}
    assert list(shortages(tmp_path, floors, margin=1.25)) == [DISK]


def test_a_cgroup_above_may_leave_less_memory_than_the_machine(tmp_path, monkeypatch):
    assert 0 < free_memory() <= memory_total()
    own = tmp_path / "slurm" / "job" / "step"
    own.mkdir(parents=True)
    (own / "memory.max").write_text("max\n")
    job = own.parent
    (job / "memory.max").write_text(f"{500 * MIB}\n")
    (job / "memory.current").write_text(f"{450 * MIB}\n")
    (job / "memory.stat").write_text(f"anon 1\ninactive_file {20 * MIB}\n")
    monkeypatch.setattr("sandbox.room.CGROUPS", tmp_path)
    monkeypatch.setattr("sandbox.room.own_cgroup", lambda: "slurm/job/step")
    assert free_memory() == min(70 * MIB, memory_available())


def test_a_floor_that_is_no_number_is_refused_by_name():
    assert Floors.from_environment({DISK_FLOOR: "5", MEMORY_FLOOR: ""}) == Floors(5, Floors().memory_mb)
    with pytest.raises(SandboxError, match=f"{MEMORY_FLOOR}='1 GB'"):
        Floors.from_environment({MEMORY_FLOOR: "1 GB"})


def test_a_shortage_travels_as_itself():
    assert isinstance(from_wire(to_wire(NodeShort("no room"))), NodeShort)


def test_a_host_below_its_floor_starts_nothing_until_there_is_room(state, monkeypatch):
    spec = SandboxSpec(runtime="local-unsafe", owner="o")
    monkeypatch.setenv(MEMORY_FLOOR, str(MORE_THAN_ANY))
    client = SyncHostClient(state)
    with pytest.raises(NodeShort, match=f"no sandbox is started: .* fewer than {MEMORY_FLOOR}"):
        client.start(spec)
    assert client.list() == []
    assert client.stats()["failed"] == 1
    client.stop()
    monkeypatch.setenv(MEMORY_FLOOR, "1")
    assert client.start(spec).runtime == "local-unsafe"


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of its own with 100 MiB."""
    path = new_state()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", path], check=True)
    yield path
    SyncHostClient(path).stop()
    subprocess.run(["umount", "--lazy", path], check=True)  # ended namespaces may hold it for a moment
    path.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
@pytest.mark.may_skip
def test_a_full_disk_of_the_node_ends_all_whose_files_it_may_have_cut(small_disk, anything):
    if reason := why_not(anything):
        pytest.skip(reason)
    host = SyncHostClient(small_disk)
    greedy, neighbour = (host.start(SandboxSpec(runtime=anything)) for _ in range(2))
    pid = host.stats()["pid"]
    os.kill(pid, signal.SIGSTOP)  # it must not look while the disk fills: the greedy one alone would give way
    try:
        with SyncSandboxClient(greedy.socket) as client, contextlib.suppress(SandboxError):
            client.bash("head -c 200M /dev/zero >large", 30)
    finally:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 120
    while not (host.fate(greedy.id) and host.fate(neighbour.id)):
        assert time.monotonic() < deadline, "nobody was ended"
        time.sleep(0.1)
    for box in (greedy, neighbour):
        fate = host.fate(box.id)
        assert fate.kind == "node" and "disk left" in fate.reason
    assert host.stats()["node"] == 2
