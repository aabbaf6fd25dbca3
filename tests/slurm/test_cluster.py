"""The virtual cluster itself: what the tests of the service on it rely on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.stack import ROOT, wait_until
from tests.slurm.cluster import PATIENCE_S, lives

NOBODY = 65534
COMMAND = ["-m", "tests.slurm.cluster", "--nodes", "2", "--gpu-nodes", "0"]


def test_nodes_differ_in_name_address_processes_and_tmp(cluster):
    script = (
        "echo $(hostname) $(getent hosts $(hostname) | cut -d' ' -f1) $(readlink /proc/self/ns/pid); "
        "echo $SLURMD_NODENAME >> /tmp/mine"
    )
    lines = cluster.run("srun", "--nodes=2", "--nodelist=n1,n2", "bash", "-c", script).split("\n")
    names = {line.split()[0]: line.split()[1:] for line in lines if line}
    for name in ("n1", "n2"):
        mine = cluster.tmp(name) / "mine"
        assert cluster.left_in_tmp(name) == [mine]
        assert mine.read_text() == f"{name}\n"
        mine.unlink()
        assert names[name][0] == cluster.addresses[name]
    numbered = {names["n1"][1], names["n2"][1], str(Path("/proc/self/ns/pid").readlink())}
    assert len(numbered) == 3  # namespaces of process ids


def test_a_heterogeneous_job_gets_nodes_of_both_partitions(cluster):
    output = cluster.run(
        *("salloc", "--nodes=2", "--partition=cpu", ":", "--partition=gpu", "--gres=gpu:1"),
        *("srun", "--het-group=0,1", "bash", "-c", "echo $SLURMD_NODENAME:$CUDA_VISIBLE_DEVICES"),
    )
    places = sorted(output.split())
    assert places[0] == "g1:0"
    assert len(places) == 3 and {place[0] for place in places[1:]} == {"n"}


def test_a_power_cut_takes_all_of_a_node_and_its_job_begins_again(cluster):
    notes = cluster.directory / "notes"
    # The second process leaves its session and its parent, as a daemon does.
    script = f"echo $SLURM_RESTART_COUNT >> {notes}; touch /dev/shm/lost; setsid sleep 900 & sleep 900"
    job = cluster.run(
        *("sbatch", "--parsable", "--requeue", "--nodelist=n3", "--output=/dev/null", "--wrap", script)
    ).strip()
    try:
        cluster.wait(lambda: len(_named(cluster, "n3", "sleep")) == 2, "the job has begun")
        before = cluster.processes("n3")
        cluster.kill_node("n3")
        assert not any(map(lives, before))
        cluster.report_down("n3")
        cluster.start_node("n3")
        cluster.wait_up("n3")

        def begun_again():
            cluster.hurry()  # Slurm says only after a while that it waits
            return notes.read_text().split() == ["1"]

        cluster.wait(begun_again, "the job has begun again")
    finally:
        cluster.run("scancel", job)
        cluster.wait_idle()
    cluster.wait_empty("n3")


def _named(cluster, node, name):
    return [process for process in cluster.job_processes(node) if _name(process) == name]


def _name(process):
    """Its name; None when it has just ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return None


def _begin(
    directory: Path, python: str = sys.executable, **how: Any
) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A cluster by hand, and its processes once it is up."""
    begun = subprocess.Popen(
        [python, *COMMAND, "--directory", str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True, **how
    )
    assert begun.stdout is not None
    lines = [begun.stdout.readline() for _ in range(3)]
    if "Ctrl-C" not in lines[-1]:
        pytest.fail(f"the cluster did not begin: {lines}")
    return begun, psutil.Process(begun.pid).children(recursive=True)


def _gone(processes: list[psutil.Process]) -> bool:
    return not any(map(lives, processes))


def test_a_cluster_ends_with_its_maker_even_when_that_is_killed():
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        begun, processes = _begin(directory)
        assert len({process.name() for process in processes} & {"munged", "slurmctld", "slurmd"}) == 3
        begun.kill()
        begun.communicate()
        wait_until(lambda: _gone(processes), PATIENCE_S, "every daemon to end")
    finally:
        shutil.rmtree(directory)


def _python_for(how: dict[str, Any]) -> str | None:
    """An interpreter that the user may run; ours may lie in somebody's home. The packages are ours anyway."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            done = subprocess.run([python, "-c", "import psutil"], cwd=ROOT, capture_output=True, **how)
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return None


@pytest.mark.may_skip
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; everybody else is one")
def test_a_plain_user_can_have_a_cluster():
    packages = Path(psutil.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"}
    how = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "env": environment}
    if (python := _python_for(how)) is None:
        pytest.skip("this interpreter is out of reach for other users")
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    os.chown(directory, NOBODY, NOBODY)
    try:
        begun, processes = _begin(directory, python, **how)
        assert {process.uids().effective for process in processes} == {NOBODY}
        begun.send_signal(signal.SIGINT)
        begun.communicate(timeout=PATIENCE_S)
        assert begun.returncode == 0 and _gone(processes)
    finally:
        shutil.rmtree(directory)
