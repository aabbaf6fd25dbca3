"""What the watchdog sees of memory that resident sizes do not show, and whom it blames."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from sandbox import memory, processes
from sandbox.container import Container
from sandbox.watchdog import MOST_TICK_S
from tests.helpers.sandboxes import never_begun
from tests.sandbox.conftest import Watching

MIB = 1 << 20
FAR = 1 << 40
"""A limit that is no matter here."""
NOBODY = 65534
LARGE = f"x = bytes({40 * MIB}).replace(bytes(1), b'x')"
SOCKETS = """
import socket
pairs = [socket.socketpair() for _ in range(400)]
for one, _ in pairs:
    one.setblocking(False)
    try:
        while True: one.send(bytes(65536))
    except BlockingIOError: pass
"""
UNNAMED = f"import os; fd = os.memfd_create('x'); [os.write(fd, b'x' * {MIB}) for _ in range(120)]"
DROPPED = (
    f"import mmap; m = mmap.mmap(-1, {120 * MIB}); m.write(b'x' * {120 * MIB}); m.madvise(mmap.MADV_DONTNEED)"
)
CLOSED = f"import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n{LARGE}"


@contextlib.contextmanager
def running(code: str, user: int | None = None) -> Iterator[int]:
    """The pid of a Python that has run `code` and waits."""
    options = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    python = sys.executable if user is None else "/usr/bin/python3"
    process = subprocess.Popen(
        [python, "-c", f"{code}\nprint('ready', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        **options,
    )
    with process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


def watched(name: str, pid: int, directory: Path, memory_mb: int = 10**6) -> Container:
    """As the watchdog knows a sandbox."""
    return never_begun(name, directory, pid, memory_mb=memory_mb, disk_mb=10**6, files=10**6)


@pytest.mark.parametrize("code", [UNNAMED, DROPPED], ids=["memfd", "mapped no more"])
def test_shared_memory_counts_whoever_maps_it(code):
    if code == DROPPED and os.geteuid() != 0:
        pytest.skip("only root may look at what a process has mapped")
    with running(code) as pid:
        count = memory.Survey().held(processes.usages(pid), None, FAR)
        assert count.shares[pid] < 30 * MIB
        assert 120 * MIB <= count.total < 170 * MIB


def test_what_is_shared_and_mapped_counts_once():
    code = f"import mmap, os; m = mmap.mmap(-1, {60 * MIB}); m.write(b'x' * {60 * MIB}); os.fork() or input()"
    with running(code) as pid:
        assert 60 * MIB <= memory.Survey().held(processes.usages(pid), None, FAR).total < 100 * MIB


def test_a_file_system_in_memory_counts_with_its_empty_files():
    with os.scandir("/dev/shm"):
        directory = os.open("/dev/shm", os.O_RDONLY)
    try:
        before = memory.Survey().held([], directory, FAR).total
        name = Path(f"/dev/shm/rollout-test-{os.getpid()}")
        name.write_bytes(bytes(8 * MIB))
        assert memory.Survey().held([], directory, FAR).total - before >= 7 * MIB  # others use it, too
        name.unlink()
    finally:
        os.close(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user, to whom a process can be closed")
def test_a_process_that_closes_itself_counts_by_its_resident_size():
    with running(CLOSED, NOBODY) as pid:
        code = (
            "from sandbox import memory, processes; "
            f"print(memory.Survey().held(processes.usages({pid}), None, 1 << 40).total)"
        )
        root = Path(__file__).resolve().parents[2]
        options = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        done = subprocess.run(
            ["/usr/bin/python3", "-c", code], capture_output=True, text=True, cwd=root, check=True, **options
        )
    assert int(done.stdout) >= 40 * MIB


@pytest.mark.parametrize("code", [UNNAMED, SOCKETS], ids=["memfd", "sockets"])
def test_who_hides_memory_gives_way_and_not_the_largest(code, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "memory_available", lambda: 0)
    with running(LARGE) as large, running(code) as hiding:
        containers = [watched(name, pid, tmp_path) for name, pid in (("large", large), ("hiding", hiding))]
        usages = {name: processes.usages(pid) for name, pid in (("large", large), ("hiding", hiding))}
        resident = {name: sum(usage.rss_bytes for usage in used) for name, used in usages.items()}
        assert resident["hiding"] < resident["large"]

        watchdog = Watching(tmp_path, *containers)
        watchdog.look_until_ended()
    assert [name for name, _, _ in watchdog.ended] == ["hiding"]


# -- a sandbox that has very much to look at ----------------------------------------------

MANY, SIZE = 100, 8 * MIB
COSTLY = f"""
import os
fd = os.memfd_create("x")
os.write(fd, b"x" * {SIZE})
fds = [os.dup(fd) for _ in range(900)]
if not all(os.fork() for _ in range({MANY - 1})):
    import time; time.sleep(600)
"""


@contextlib.contextmanager
def costly() -> Iterator[int]:
    """Many processes that have very much open."""
    with running(COSTLY) as pid:
        try:
            yield pid
        finally:
            processes.send(processes.children(pid))


def test_what_one_look_does_not_reach_is_seen_by_the_next_ones(monkeypatch):
    with costly() as pid:
        used = processes.usages(pid)
        assert len(used) == MANY
        whole, part = memory.Survey(), memory.Survey()
        monkeypatch.setattr(memory, "BUDGET_S", 60.0)
        all_at_once = whole.held(used, None, FAR)
        monkeypatch.setattr(memory, "BUDGET_S", 0.02)
        monkeypatch.setattr(memory, "MOST_CALLS", 10_000)
        calls = 0
        while (count := part.held(used, None, FAR)) is None:
            calls += 1
            assert part.unfinished
    assert calls >= 3
    assert not part.unfinished
    assert all_at_once and count.shares.keys() == all_at_once.shares.keys() == {usage.pid for usage in used}
    assert SIZE <= count.total == pytest.approx(all_at_once.total, rel=0.2)


def test_who_is_never_seen_to_the_end_counts_by_what_is_resident(monkeypatch):
    monkeypatch.setattr(memory, "BUDGET_S", -1.0)
    with running(LARGE) as pid:
        used, survey = processes.usages(pid), memory.Survey()
        counts = [survey.held(used, None, FAR) for _ in range(memory.MOST_CALLS)]
    assert set(counts[:-1]) == {None}
    assert counts[-1].total == sum(usage.rss_bytes for usage in used) >= 40 * MIB


def test_who_grows_while_it_is_being_looked_at_is_caught(monkeypatch):
    monkeypatch.setattr(memory.random, "shuffle", lambda keys: None)
    with running("pass") as first, running("pass") as second:
        used = processes.usages(first) + processes.usages(second)
        clock = iter([0, 0, 1, 0, 0, 1])  # each call gets one process seen
        monkeypatch.setattr(memory.time, "thread_time", lambda: next(clock))
        survey = memory.Survey()
        assert survey.held(used, None, FAR) is None
        used[0] = dataclasses.replace(used[0], rss_bytes=used[0].rss_bytes + 100 * MIB)
        count = survey.held(used, None, FAR)
    assert count and count.whole and count.total >= 100 * MIB <= count.shares[first]


def test_who_is_far_over_is_looked_at_without_a_pause_up_to_the_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "BUDGET_S", -1.0)
    with running(LARGE) as large:
        watchdog = Watching(tmp_path, watched("large", large, tmp_path, memory_mb=15))

        async def scenario():
            for _ in range(memory.MOST_CALLS):
                await watchdog.look()

        asyncio.run(scenario())
        assert watchdog.breaches["memory"] == 1


def test_who_was_small_when_last_counted_gives_way_by_what_it_holds_now(tmp_path, monkeypatch):
    neighbour = f"x = bytes({20 * MIB}).replace(bytes(1), b'x')"
    with running("pass") as small, running(LARGE) as large, running(neighbour) as process:
        grown = watched("grown", small, tmp_path)
        watchdog = Watching(tmp_path, grown, watched("neighbour", process, tmp_path))
        asyncio.run(watchdog.look())
        grown.pid = large
        monkeypatch.setattr(memory, "BUDGET_S", -1.0)  # as with very many descriptors in decoys
        monkeypatch.setattr(processes, "memory_available", lambda: 0)
        asyncio.run(watchdog.look())
    assert [name for name, _, _ in watchdog.ended] == ["grown"]


def test_a_process_far_over_the_limit_is_not_walked_page_by_page():
    code = (
        f"import mmap, os; fd = os.memfd_create('x'); os.truncate(fd, {20 * MIB}); "
        f"maps = [mmap.mmap(fd, {20 * MIB}, mmap.MAP_SHARED | mmap.MAP_POPULATE) for _ in range(20)]"
    )
    with running(code) as pid:
        used = processes.usages(pid)
        assert memory.Survey().held(used, None, FAR).total < 100 * MIB
        assert memory.Survey().held(used, None, 90 * MIB).total >= 400 * MIB


def test_who_has_very_much_open_does_not_delay_what_its_neighbour_is_held_to(tmp_path):
    with costly() as pid, running("pass") as idle:
        containers = [watched("costly", pid, tmp_path), watched("neighbour", idle, tmp_path, memory_mb=30)]

        async def scenario() -> float:
            watchdog = Watching(tmp_path, *containers)
            running_on = asyncio.create_task(watchdog.run())
            await asyncio.sleep(1.5)  # both were looked at, and the one at length
            assert watchdog._watched["neighbour"].due < time.monotonic() + MOST_TICK_S / 2
            with running(LARGE) as large:
                containers[1].pid = large
                # Of processor time, which no other process of the machine takes part in.
                ends, began = time.monotonic() + 60, time.process_time()
                while not watchdog.ended and time.monotonic() < ends:
                    await asyncio.sleep(0.01)
                took = time.process_time() - began
            assert [name for name, _, _ in watchdog.ended] == ["neighbour"]
            running_on.cancel()
            return took

        assert asyncio.run(scenario()) < 1.5


def test_a_look_that_a_busy_machine_draws_out_is_followed_by_the_next_as_soon(tmp_path, monkeypatch):
    looks, usages, starved_s = [], processes.usages, 0.0

    def drawn_out(pid):
        nonlocal starved_s
        looks.append(time.monotonic())
        time.sleep(0.1)
        starved_s += 0.1
        return usages(pid)

    monkeypatch.setattr(processes, "usages", drawn_out)
    monkeypatch.setattr("sandbox.watchdog._starved_s", lambda: starved_s)
    monkeypatch.setattr(Watching, "_alarmed", lambda watchdog: False)
    with running("pass") as idle:

        async def scenario():
            running_on = asyncio.create_task(Watching(tmp_path, watched("idle", idle, tmp_path)).run())
            while len(looks) < 4:
                await asyncio.sleep(0.01)
            running_on.cancel()

        asyncio.run(asyncio.wait_for(scenario(), 60))
    pauses = [later - earlier for earlier, later in pairwise(looks)]
    assert min(pauses) < MOST_TICK_S / 2


@pytest.mark.parametrize("descriptors", [True, False], ids=["as always", "no descriptor left"])
def test_the_next_process_of_a_pid_is_not_ended_in_the_place_of_another(descriptors, monkeypatch):
    def refused(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    if not descriptors:
        monkeypatch.setattr(os, "pidfd_open", refused)
    with running("pass") as pid:
        started = processes.start_time(pid)
        processes.send_to(pid, started - 1)
        assert processes.is_alive(pid, started)
        processes.send_to(pid, started)
        while processes.is_alive(pid, started):
            time.sleep(0.01)


def test_page_tables_count_at_every_look():
    code = (
        f"import mmap; m = mmap.mmap(-1, 64 << 30, prot=mmap.PROT_READ, flags=0x4022); "
        f"m.madvise(15); [m[at] for at in range(0, 64 << 30, {2 * MIB})]"
    )
    with running(code) as pid:
        (usage,) = processes.usages(pid)
        assert 128 * MIB <= usage.table_bytes <= usage.rss_bytes < 170 * MIB
        assert 128 * MIB <= memory.Survey().held([usage], None, FAR).total < 170 * MIB
