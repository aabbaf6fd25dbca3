"""Other forms of the service: one heterogeneous job, and steps of an allocation. For `make slurm-test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.long_forms import SLURM
from tests.helpers.sandboxes import require_apptainer
from tests.helpers.stack import ROOT
from tests.slurm.service import ENGINE, SlurmService

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def service(cluster, request):
    require_apptainer()
    service = SlurmService(cluster, f"form-{request.node.name.split('_')[1]}")
    yield service
    service.slurm("down")


def require_nothing_left(cluster):
    cluster.wait(lambda: cluster.squeue() == [], "every job has ended")
    for node in cluster.addresses:
        cluster.wait_empty(node)
        assert cluster.left_in_tmp(node) == []


@SLURM.only
def test_one_job_carries_all_and_its_second_component_the_engines(service, cluster):
    service.slurm(
        *("up", "--one-job", "--nodes", "2", "--engine-nodes", "1", "--engine-command", ENGINE, "--no-flower")
    )
    assert sorted(job.id.partition("+")[2] for job in cluster.squeue()) == ["0", "1"]
    members = service.wait_for_nodes(2)
    service.do(20)
    service.slurm("drain", sorted(members)[-1], "--wait")
    assert len(service.members()) == 1
    service.do(10)
    service.slurm("down")
    require_nothing_left(cluster)


@SLURM.only
def test_in_an_allocation_the_service_runs_as_its_steps_and_leaves_it(service, cluster):
    """A real `salloc`; its shell waits for us, so that what `down` leaves of the allocation shows."""
    rollout = str(Path(sys.executable).with_name("rollout"))
    done = service.run_dir.with_name("allocation-done")
    script = (
        f'"{rollout}" slurm up --no-flower && touch "{done}.up"; until [ -e "{done}" ]; do sleep 0.2; done'
    )
    shell = subprocess.Popen(
        ["salloc", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", script], cwd=ROOT, env=service.env
    )
    try:
        cluster.wait(Path(f"{done}.up").exists, "the service is up in the allocation", timeout=600)
        assert len(service.wait_for_nodes(2)) == 2
        service.slurm("down")
        (allocation,) = cluster.squeue()
        assert allocation.state == "RUNNING"
        for node in cluster.addresses:
            cluster.wait_empty(node)
            assert cluster.left_in_tmp(node) == []
    finally:
        done.touch()
        shell.wait(120)
    require_nothing_left(cluster)
