"""/sys and the cgroups in it, which are those of the machine's other processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import paths
from tests.attacks import attack
from tests.attacks.calls import scripted, succeeds

ONE_SANDBOX = True
NO_SYS = "no /sys but its processors, read-only"


@pytest.fixture
def delegated(target) -> Iterator[tuple[str, subprocess.Popen]]:
    """The path of a cgroup delegated to the sandboxes' user, as systemd does it, and a process in it."""
    place = next(
        (p for p in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if Path(p, "cgroup.procs").exists()), None
    )
    if place is None or os.geteuid() != 0:
        pytest.skip("no cgroups of version 2 that could be delegated")
    group = Path(place, f"attacked-{target.info.id}")
    group.mkdir()
    process = subprocess.Popen(["sleep", "600"])
    (group / "cgroup.procs").write_text(str(process.pid))
    uid = paths.sandbox_user() or 0
    for path in (group, *group.iterdir()):
        os.chown(path, uid, uid)
        path.chmod(0o777 if path.is_dir() else 0o666)
    yield str(group), process
    process.kill()
    process.wait()
    for pid in (group / "cgroup.procs").read_text().split():
        Path(place, "cgroup.procs").write_text(pid)
    group.rmdir()


@attack(stopped_by=NO_SYS)
def test_kill_a_process_of_the_machine_through_its_cgroup(target, delegated):
    group, process = delegated
    succeeds(
        target,
        f"""
try: open("{group}/cgroup.kill", "w").write("1"); won(True)
except OSError: won(False)
""",
    )
    try:
        return process.wait(1) < 0
    except subprocess.TimeoutExpired:
        return False


@attack(stopped_by=NO_SYS)
def test_leave_the_cgroup_whose_limits_hold(target, delegated):
    return succeeds(
        target,
        f"""
def leave():
    try: return open("{delegated[0]}/cgroup.procs", "w").write(str(os.getpid())) > 0
    except OSError: return False
won(in_child(leave))
""",
    )


# CVE-2022-0492: release_agent, run as the machine's root. Only opened here.
test_have_the_kernel_run_a_program_when_a_cgroup_is_empty = scripted(
    NO_SYS,
    """
import glob
opened = 0
for path in glob.glob("/sys/fs/cgroup/*/release_agent") + glob.glob("/sys/fs/cgroup/cgroup.procs"):
    try: os.close(os.open(path, os.O_WRONLY)); opened += 1
    except OSError: pass
won(opened)
""",
)


# Offline processors, rebind drivers, reload firmware. Only opened here.
test_write_anywhere_below_sys = scripted(
    NO_SYS,
    """
import itertools
opened = 0
for parent, directories, files in itertools.islice(os.walk("/sys"), 3000):
    for name in files:
        if name == "uevent" or "online" in name or "helper" in name:
            try: os.close(os.open(os.path.join(parent, name), os.O_WRONLY)); opened += 1
            except OSError: pass
won(opened)
""",
)

test_list_the_machines_devices_and_network = scripted(
    NO_SYS, 'won(any(map(os.path.isdir, ("/sys/class", "/sys/block", "/sys/firmware"))))'
)
