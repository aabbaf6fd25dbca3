"""What a sandbox may use, and the parts that see to it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from sandbox import binds, processes, trees
from sandbox.config import AllowedBind, HostConfig, Range
from sandbox.containers import Containers
from sandbox.errors import SandboxError, SandboxRequestError
from sandbox.server import writable_root
from sandbox.spec import BindSpec, Limits
from tests.helpers.sandboxes import never_begun
from tests.sandbox.conftest import Watching, run

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
MANY = 10**9
NOBODY = 65534


def test_a_limit_is_the_nodes_default_or_what_was_asked_for_up_to_the_most():
    config = HostConfig.from_environment(
        {"ROLLOUT_SANDBOX_MEMORY_MB": "100:200", "ROLLOUT_SANDBOX_FILES": "7"}
    )
    assert config.limits(Limits()).memory_mb == 100
    assert config.limits(Limits(memory_mb=200)).memory_mb == 200
    assert config.files == Range(7, 7)
    for wrong in (-1, 0, 201):
        message = rf"limits.memory_mb={wrong} .*200.*ROLLOUT_SANDBOX_MEMORY_MB"
        with pytest.raises(SandboxRequestError, match=message):
            config.limits(Limits(memory_mb=wrong))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MEMORY_MB", "much"),
        ("MEMORY_MB", "200:100"),
        ("DISK_MB", "0"),
        ("BINDS", "data:ro"),
        ("BINDS", "/data"),
        ("NETWORKS", "none,wifi"),
        ("WARM", "-1"),
        ("RUNTIMES", "apptainer,docker"),
        ("IMAGE_ROOTS", "/"),
        ("IMAGE_ROOTS", "images"),
        ("CLOSED", "run"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(name, value):
    with pytest.raises(SandboxError, match=f"ROLLOUT_SANDBOX_{name}='{value}'"):
        HostConfig.from_environment({f"ROLLOUT_SANDBOX_{name}": value})


@pytest.mark.parametrize("binds", ["", "/data:rw", "/data:ro,/scratch:rw"])
def test_the_pack_of_programs_may_always_be_shown_read_only(binds, monkeypatch, tmp_path):
    (tmp_path / "home").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("ROLLOUT_HOME", str(tmp_path / "home"))
    config = HostConfig.from_environment({"ROLLOUT_SANDBOX_BINDS": binds})
    *others, pack = config.binds
    assert pack == AllowedBind(tmp_path / "elsewhere" / "harnesses", writable=False)
    assert ",".join(f"{it.path}:{'rw' if it.writable else 'ro'}" for it in others) == binds


def test_every_setting_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text()
    names = {f"ROLLOUT_SANDBOX_{field.upper()}" for field in HostConfig.__dataclass_fields__}
    names -= {"ROLLOUT_SANDBOX_FLOORS"}  # shared with the workers, under names of their own
    for name in names | {"ROLLOUT_NODE_MIN_FREE_DISK_MB", "ROLLOUT_NODE_MIN_FREE_MEMORY_MB"}:
        assert f"`{name}`" in text


# -- binds ----------------------------------------------


@pytest.fixture
def allowed(tmp_path):
    """A place that may be bound read-only, one that may be written to, and one that is nobody's business."""
    for name in ("shared", "results", "secret"):
        (tmp_path / name).mkdir()
    return [AllowedBind(tmp_path / "shared", False), AllowedBind(tmp_path / "results", True)]


def check(allowed, source, target="/data", read_only=True):
    return binds.check([BindSpec(str(source), target, read_only)], allowed)[0]


def test_allowed_places_are_bound_as_asked(allowed, tmp_path):
    assert check(allowed, tmp_path / "shared").read_only
    assert not check(allowed, tmp_path / "results", read_only=False).read_only


def test_other_places_and_more_rights_than_given_are_refused(allowed, tmp_path):
    (tmp_path / "results" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "results" / "inner").mkdir()
    (tmp_path / "results" / "good").symlink_to("inner")
    for source in ("secret", ".", "/", "/etc", "shared/../secret", "results/link"):
        with pytest.raises(SandboxRequestError, match="ROLLOUT_SANDBOX_BINDS"):
            check(allowed, tmp_path / source)
    with pytest.raises(SandboxRequestError, match="not read-write"):
        check(allowed, tmp_path / "shared", read_only=False)
    with pytest.raises(SandboxRequestError, match="cannot be used"):
        check(allowed, tmp_path / "shared" / "absent")
    assert check(allowed, tmp_path / "results" / "good").source == tmp_path / "results" / "inner"


COVERING = [
    "/",
    "/proc",
    "/proc/sys",
    "/dev/shm",
    "/run/sbx",
    "/sbx",
    "/tmp/../sbx-python",
    "/sys/x",
    "/run",
    "/etc",
]
CHANGING = ["data", "/a:rw", "/a,/b", "/a\\b", "/a\nb", "/a\0b"]


def test_what_the_sandbox_needs_is_not_covered_nor_the_runtimes_command_line_changed(allowed, tmp_path):
    for message, targets in (("would cover", COVERING), ("absolute path", CHANGING)):
        for target in targets:
            with pytest.raises(SandboxRequestError, match=message):
                check(allowed, tmp_path / "shared", target)
    assert set(writable_root.OURS) < set(binds.RESERVED)  # it reads none of our modules


@pytest.mark.parametrize("later", ["/data", "/data/sub"])
def test_a_bind_that_a_later_one_would_cover_is_refused(allowed, tmp_path, later):
    asked = [BindSpec(str(tmp_path / "shared"), target) for target in ("/data/sub", "/database", later)]
    with pytest.raises(SandboxRequestError, match=f"'{later}' would cover"):
        binds.check(asked, allowed)
    if later == "/data":
        assert [bind.target for bind in binds.check(asked[::-1], allowed)] == [
            "/data",
            "/database",
            "/data/sub",
        ]


def test_a_bind_inside_of_one_that_agents_write_to_is_refused(allowed, tmp_path):
    """What is there may be a link that an earlier agent left, and lead anywhere in the sandbox."""
    results, shared = str(tmp_path / "results"), str(tmp_path / "shared")
    asked = [BindSpec(results, "/data", read_only=False), BindSpec(shared, "/data/sub")]
    with pytest.raises(SandboxRequestError, match="'/data/sub' lies in '/data', which is bound read-write"):
        binds.check(asked, allowed)


def test_a_directory_to_bind_is_opened_as_one(allowed, tmp_path, monkeypatch):
    """So that the kernel mounts what autofs mounts on demand, before the place is judged."""
    asked, really = [], os.open
    monkeypatch.setattr(os, "open", lambda path, flags: asked.append(flags) or really(path, flags))
    check(allowed, tmp_path / "shared")
    assert all(flags & os.O_DIRECTORY for flags in asked)
    (tmp_path / "shared" / "file").write_text("")
    assert check(allowed, tmp_path / "shared" / "file").source == tmp_path / "shared" / "file"


# -- trees ----------------------------------------------


@pytest.fixture
def as_plain_user():
    """Runs code as somebody to whom permissions apply: root is let in everywhere."""

    def run_code(directory: Path, code: str) -> None:
        if os.geteuid() == 0:
            code = f"import os; os.setgid({NOBODY}); os.setuid({NOBODY})\n" + code
            code = "import sandbox.trees\n" + code  # while it may still read what lies in somebody's home
            os.chown(directory, NOBODY, NOBODY)
            for parent in directory.parents:
                if parent.stat().st_uid == 0 and parent.name.startswith(("pytest-", "popen-")):
                    parent.chmod(0o711)
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

    return run_code


def fill(directory: Path, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        (directory / str(number)).write_bytes(os.urandom(size))


def test_usage_counts_blocks_and_entries_and_hard_links_once(tmp_path):
    fill(tmp_path, [1 << 20, 1 << 20])
    (tmp_path / "link").hardlink_to(tmp_path / "0")
    (tmp_path / "away").symlink_to("/")
    size, entries = trees.usage(tmp_path, MANY, MANY)
    assert 2 << 20 <= size < 3 << 20
    assert entries == 4


def test_usage_stops_when_enough_is_known(tmp_path):
    fill(tmp_path, [0] * 100)
    assert trees.usage(tmp_path, MANY, 10)[1] == 11


def test_a_tree_deeper_than_a_path_counts_as_too_much_and_is_removed(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    for _ in range(1500):  # beyond PATH_MAX, and deeper than Python recurses
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        assert trees.usage(root, MANY, MANY)[1] == MANY + 1
        trees.remove(root)
        assert not root.exists()
    finally:
        subprocess.run(["rm", "-rf", root], check=False)  # pytest cannot remove such a tree either


def test_removing_a_tree_opens_closed_directories_and_follows_no_link(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    victim.chmod(0o500)
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_text("x")
    (root / "a" / "link").symlink_to(victim)
    for name in ("a/b", "a"):
        (root / name).chmod(0)
    trees.remove(root)
    assert not root.exists()
    assert (victim / "file").read_text() == "mine"
    assert victim.stat().st_mode & 0o777 == 0o500


def test_usage_looks_into_closed_directories_and_closes_them_again(tmp_path, as_plain_user):
    code = f"""
import os, pathlib
from sandbox import trees
root = pathlib.Path({str(tmp_path)!r}) / "of-the-user"
(root / "a").mkdir(parents=True)
(root / "a" / "b").mkdir()
(root / "a" / "b" / "file").write_bytes(os.urandom(1 << 20))
for name in ("a/b", "a"): (root / name).chmod(0)
assert trees.usage(root, 10**9, 10**9)[0] >= 1 << 20
assert (root / "a").stat().st_mode & 0o777 == 0
trees.remove(root)
assert not root.exists()
"""
    as_plain_user(tmp_path, code)


def test_a_closed_directory_is_open_only_while_it_is_looked_at(tmp_path, as_plain_user):
    """And a mode that the agent sets while the count goes on stays."""
    code = f"""
import os, pathlib
from sandbox import trees
trees.STEP = 1
root = pathlib.Path({str(tmp_path)!r}) / "of-the-user"
(root / "a" / "b").mkdir(parents=True)
for place in ("a", "a/b"):
    (root / place / "file").write_bytes(os.urandom(1 << 20))
for place in ("a/b", "a"): (root / place).chmod(0)
mode = lambda: (root / "a").stat().st_mode & 0o777
counting, steps = trees.counting(root, 10**9, 10**9), 0
while not (found := next(counting))[2]:
    steps += 1
    assert mode() == 0, oct(mode())
assert steps >= 3 and found[0] >= 2 << 20, (steps, found)
counting = trees.counting(root, 10**9, 10**9)
while next(counting)[1] < 2: pass
(root / "a").chmod(0o755)
list(counting)
assert mode() == 0o755, oct(mode())
(root / "a").chmod(0)
with trees.open_for_now((str(root / "a"),)): (root / "a").chmod(0o711)
assert mode() == 0o711, oct(mode())
(root / "a").chmod(0o400)  # names may be read, sizes not
assert trees.usage(root, 10**9, 10**9)[0] >= 2 << 20
assert mode() == 0o400, oct(mode())
"""
    as_plain_user(tmp_path, code)


def test_a_sandbox_that_cannot_be_looked_at_leaves_the_others_watched(tmp_path, monkeypatch):
    real = trees.counting
    containers = [never_begun(name, tmp_path, os.getpid(), disk_mb=1) for name in ("broken", "greedy")]
    fill(containers[-1].launch.scratch, [2 << 20])

    def counting(root, *most):
        if root.name == "broken":
            raise RuntimeError("no way to look at it")
        return real(root, *most)

    monkeypatch.setattr(trees, "counting", counting)
    name, reason, kind = Watching(tmp_path, *containers).look_until_ended()
    assert (name, kind) == ("greedy", "limited")
    assert "2 MiB" in reason


def test_a_disk_that_one_look_does_not_get_through_is_counted_by_the_next_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("sandbox.watchdog.DISK_BUDGET_S", -1.0)  # one step of the count a look
    container = never_begun("many", tmp_path, os.getpid(), files=trees.STEP)
    fill(container.launch.scratch, [1] * 3 * trees.STEP)
    watchdog = Watching(tmp_path, container)
    for _ in range(2):
        run(watchdog.look())
    assert not watchdog.breaches["disk"]
    _, reason, kind = watchdog.look_until_ended()
    assert kind == "limited" and f"in {3 * trees.STEP} files" in reason


@pytest.fixture
def looks(tmp_path, monkeypatch):
    """Looks thoroughly at one sandbox as often as asked; gives the watchdog."""
    monkeypatch.setattr("sandbox.watchdog.MOST_TICK_S", 0.0)
    monkeypatch.setattr("sandbox.watchdog.MOST_THOROUGH_PERIOD_S", 0.0)
    monkeypatch.setattr("sandbox.watchdog.DISK_BUDGET_S", 60.0)  # on a busy machine, too

    def look(
        *before: Callable[[], object], protected: tuple[int, ...] = (), pid: int | None = None, **limits
    ):
        container = never_begun("x", tmp_path, pid, **limits)
        container.protected = [*protected]
        watchdog = Watching(tmp_path, container)

        async def scenario():
            for prepare in before:
                prepare()
                await watchdog.look()
                await asyncio.sleep(0.01)  # for the server to be told, or found away

        run(scenario())
        return watchdog

    return look


@pytest.mark.parametrize(("pattern", "breaches"), [("FFF.FFF.", 0), ("FFFF", 1), ("FFFFFFF", 1)])
def test_only_a_sandbox_that_stays_full_of_processes_is_set_free(looks, monkeypatch, pattern, breaches):
    def see(threads: int) -> Callable[[], object]:
        used = [processes.Usage(os.getpid(), 0, 0, threads, 0)]
        return lambda: monkeypatch.setattr(processes, "usages", lambda pid: used)

    watchdog = looks(*(see(100 if look == "F" else 10) for look in pattern), pid=os.getpid(), processes=100)
    assert watchdog.breaches["processes"] == breaches


@pytest.mark.parametrize("protected", [True, False])
def test_over_its_memory_a_sandbox_is_told_once_and_its_largest_process_ended_unless_protected(
    looks, tmp_path, protected
):
    code = "import time; held = b'x' * (30 << 20); print(flush=True); time.sleep(60)"
    with (
        socket.socket(socket.AF_UNIX) as silent,
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process,
    ):
        (tmp_path / "x").mkdir()
        silent.bind(str(tmp_path / "x" / "s"))
        silent.listen()
        process.stdout.readline()
        spared = (process.pid,) if protected else ()
        watchdog = looks(*[lambda: None] * 3, pid=process.pid, memory_mb=20, protected=spared)
        assert (watchdog.breaches["memory"], watchdog.ended) == (1, [])
        if protected:
            assert process.poll() is None
            process.kill()
        assert process.wait(10) == -signal.SIGKILL


def test_who_was_told_of_its_disk_is_not_told_again_of_the_same_files_and_ended_for_more(looks, tmp_path):
    scratch = tmp_path / "scratch" / "x"
    scratch.mkdir(parents=True)
    fill(scratch, [1] * 5)
    more = partial(fill, scratch, [20 * MIB])
    watchdog = looks(lambda: None, lambda: None, more, files=3, disk_mb=1)
    assert watchdog.breaches["disk"] == 1
    assert [kind for _, why, kind in watchdog.ended if "over its disk limit again" in why] == ["limited"]


# -- threads ----------------------------------------------


MANY_ENDS = 100
"""More than a pool of threads has."""


def test_clean_ups_that_take_long_leave_threads_to_everybody_else(tmp_path, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(trees, "remove", lambda path: go_on.wait(60))
    containers = Containers(tmp_path, HostConfig.from_environment())
    ended = [never_begun(str(number), tmp_path) for number in range(MANY_ENDS)]

    async def scenario():
        ends = [containers._end_soon(box) for box in ended]
        await asyncio.sleep(0.2)
        try:
            await asyncio.wait_for(asyncio.to_thread(int), 10)
        finally:
            go_on.set()
        await asyncio.gather(*ends)

    asyncio.run(scenario())
    assert containers.counts["released"] == MANY_ENDS


def test_the_watchdog_waits_for_no_thread_of_others(tmp_path):
    container = never_begun("x", tmp_path, os.getpid())
    go_on = threading.Event()

    async def scenario():
        others = [asyncio.create_task(asyncio.to_thread(go_on.wait, 60)) for _ in range(MANY_ENDS)]
        await asyncio.sleep(0.2)
        try:
            await asyncio.wait_for(Watching(tmp_path, container).look(), 10)
        finally:
            go_on.set()
        await asyncio.gather(*others)

    asyncio.run(scenario())


# -- the node runs short ----------------------------------------------


@pytest.fixture
def watched(tmp_path):
    """Looks once at two sandboxes, with files of so many MiB on disk; who was ended, why and as what."""

    def look(files: dict[str, list[float]] | None = None) -> list[tuple[str, str, str]]:
        containers = []
        for name, sizes in (files or {"small": [1], "large": [3]}).items():
            pid = os.getpid() if name == "large" else None  # one of them uses memory
            containers.append(never_begun(name, tmp_path, pid))
            fill(containers[-1].launch.scratch, [int(size * MIB) for size in sizes])
        watchdog = Watching(tmp_path, *containers)
        run(watchdog.look())
        return watchdog.ended

    return look


def disk(monkeypatch, total: int, free: int) -> None:
    usage = SimpleNamespace(total=total, used=total - free, free=free)
    monkeypatch.setattr("sandbox.watchdog.shutil.disk_usage", lambda path: usage)


@pytest.mark.parametrize(
    ("free_mib", "memory_mib", "shortage"),
    [(300, None, None), (50 << 10, 5, "5 MiB of memory left"), (200, None, "200 MiB of disk left")],
)
def test_on_a_node_that_is_short_the_largest_is_ended_and_the_node_is_to_blame(
    watched, monkeypatch, free_mib, memory_mib, shortage
):
    disk(monkeypatch, 100 << 30, free_mib << 20)
    if memory_mib:
        monkeypatch.setattr(processes, "memory_available", lambda: memory_mib << 20)
    ended = watched()
    assert [(name, kind) for name, _, kind in ended] == ([("large", "node")] if shortage else [])
    assert all(shortage in reason for _, reason, _ in ended)


def test_who_gives_way_on_the_disk_is_counted_to_the_end_first(watched, monkeypatch):
    monkeypatch.setattr("sandbox.watchdog.DISK_BUDGET_S", -1.0)
    monkeypatch.setattr(trees, "STEP", 1)  # a look counts one file
    disk(monkeypatch, 100 << 30, 200 << 20)
    ((name, _, _),) = watched({"small": [1.0], "large": [0.5] * 6})
    assert name == "large"


def test_on_a_full_disk_all_are_ended_for_any_may_have_met_its_end(watched, monkeypatch):
    disk(monkeypatch, 100 << 30, 1 << 20)
    assert {(name, kind) for name, _, kind in watched()} == {("small", "node"), ("large", "node")}
