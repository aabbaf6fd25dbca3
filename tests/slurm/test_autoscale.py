"""`rollout autoscale` on the virtual cluster: nodes come for a queue and go when it is empty.

What it decides is tested without a cluster, in tests/unit and tests/integration; `make slurm-test` runs this.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.long_forms import SLURM
from tests.helpers.sandboxes import require_apptainer
from tests.helpers.stack import ROOT
from tests.slurm.cluster import PATIENCE_S
from tests.slurm.service import ENGINE, SlurmService

QUEUED = 40
"""For one node with eight slots of RUN, where INIT may be eight ahead: 24 are left for two more nodes."""
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def service(cluster):
    """A head, one node and an engine."""
    require_apptainer()
    service = SlurmService(cluster, "autoscaled")
    service.env["ROLLOUT_READY_AHEAD"] = "8"
    slots = ["--slots-init", "4", "--slots-run", "8", "--slots-eval", "4"]
    try:
        engine = ["--engine-nodes", "1", "--engine-command", ENGINE]
        service.slurm("up", "--nodes", "1", *slots, *engine, "--no-flower")
        yield service
    finally:
        service.slurm("down", "--delete-data")


def autoscale(service, *options):
    """One decision; what it said."""
    command = [str(Path(sys.executable).with_name("rollout")), "autoscale", "--once", *options]
    ran = {"cwd": ROOT, "env": service.env, "capture_output": True, "text": True, "timeout": 4 * PATIENCE_S}
    done = subprocess.run(command, check=False, **ran)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def node_jobs(cluster):
    """Their names, of those in arrays that wait one by one."""
    names = cluster.run("squeue", "--noheader", "--array", "--format=%j").split()
    return [name for name in names if "-node-" in name]


@SLURM.only
def test_nodes_come_for_a_queue_and_are_drained_when_it_is_empty(service, cluster):
    gates = service.gates()
    ids = service.submit(QUEUED, gates)
    service.wait_arrived(gates, 8)
    assert "nodes: 1 (0 coming) → 3" in autoscale(service, "--nodes", "1:3", "--dry-run")
    assert len(node_jobs(cluster)) == 1
    output = autoscale(service, "--nodes", "1:3")
    assert "submitted 2" in output
    service.wait_for_nodes(3)
    output = autoscale(service, "--nodes", "1:3")
    assert "elected" in output
    assert "submitted" not in output, "three is the most"
    service.wait_arrived(gates, 24)

    # 24 in hand, 16 that wait, three to spare: six nodes. Of the five machines one has the head.
    assert "submitted 3" in autoscale(service, "--nodes", "1:9")
    cluster.wait(lambda: len(node_jobs(cluster)) == 6, "three more jobs")
    output = autoscale(service, "--nodes", "1:9")
    assert "elected" in output
    assert "submitted" not in output, "those that wait count as there"
    (gates / "open").touch()
    service.require_exactly_once(ids)
    output = autoscale(service, "--nodes", "1:9", "--hold-s", "0", "--grace", "30")
    assert "→ 1" in output
    cluster.wait(lambda: len(node_jobs(cluster)) == 1, "one node to be left", 2 * PATIENCE_S)
    service.wait_for_nodes(1)
    service.require_exactly_once(service.submit(4, gates))
