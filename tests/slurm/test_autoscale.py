"""`rollout autoscale` on the virtual cluster: nodes come for a queue and go when it is empty,
engines for what waits for room on them.

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
from tests.slurm.service import ENGINE, SITE, SlurmService

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


def node_jobs(cluster, role="node"):
    """Their names, of those in arrays that wait one by one."""
    names = cluster.run("squeue", "--noheader", "--array", "--format=%j").split()
    return [name for name in names if f"-{role}-" in name]


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


@pytest.fixture
def talkers(cluster):
    """A head, one node, and an engine with room for two rollouts of a thousand tokens."""
    service = SlurmService(cluster, "talkers")
    site = cluster.directory / "talkers.toml"
    site.write_text("\n".join(line for line in SITE.splitlines() if "gpu" not in line))
    service.env["ROLLOUT_SLURM_SITE"] = str(site)
    engine = [
        "--engine-nodes",
        "1",
        "--engine-command",
        f"{ENGINE} --capacity-tokens 3000 --max-model-len 2000",
    ]
    try:
        service.slurm("up", "--nodes", "1", "--slots-run", "6", *engine, "--no-flower")
        yield service
    finally:
        service.slurm("down", "--delete-data")


def reserved(service):
    """Rollouts on each server that takes some."""
    with service.client as client:
        return {server.id: server.live_rollouts for server in client.backends() if not server.draining}


@SLURM.only
def test_engines_come_for_what_waits_for_room_and_drain_before_they_go(talkers, cluster):
    service, scaled = talkers, ["--engines", "1:2"]
    cluster.wait(lambda: reserved(service), "an engine")
    gates = [service.gates() for _ in range(6)]
    ids = [service.submit(1, gate, "spoken", filler="x" * 4000)[0] for gate in gates]

    def arrived():
        return [gate for gate in gates if list(gate.glob("*.*"))]

    cluster.wait(lambda: len(arrived()) == 2, "two to be placed")
    with service.client as client:
        cluster.wait(lambda: client.status()["states"]["running"] == 6, "the others to wait for room")
        waiting = service.submit(20, gates[0], "spoken")
        cluster.wait(lambda: client.status()["states"]["ready"] >= 10, "more to wait for RUN")
    output = autoscale(service, *scaled, "--nodes", "1:3", "--dry-run")
    assert "100% of RUN waits for room on LLM servers, no reason for nodes: engines" in output
    assert "engines: 1 (0 coming) → 2, 4 rollouts with " in output and "nodes: 1" not in output
    assert len(node_jobs(cluster, "engine")) == 1
    output = autoscale(service, *scaled, "--nodes", "1:3")
    assert "submitted engine job" in output and "nodes: 1" not in output
    cluster.wait(lambda: len(arrived()) == 4, "two more to be placed on the second engine")
    assert sorted(reserved(service).values()) == [2, 2]
    assert "submitted" not in autoscale(service, *scaled), "two is the most"

    # One stays on each of them.
    homes = {item.id: item.backend for item in service.get(ids)}
    kept = {homes[name]: name for name in ids if homes[name]}
    assert len(kept) == 2
    for name, gate in zip(ids, gates, strict=True):
        if name not in kept.values():
            service.open(gate)
    service.require_exactly_once([name for name in ids if name not in kept.values()] + waiting)
    assert sorted(reserved(service).values()) == [1, 1]
    output = autoscale(service, *scaled, "--hold-s", "0", "--grace", "600")
    assert "engines: 2 (0 coming) → 1" in output
    cluster.wait(lambda: len(reserved(service)) == 1, "one of them to take no more")
    assert len(node_jobs(cluster, "engine")) == 2, "its rollout stands at the gate"
    assert "→" not in autoscale(service, *scaled, "--hold-s", "0")
    for gate in gates:
        service.open(gate)
    service.require_exactly_once(list(kept.values()))
    cluster.wait(lambda: len(node_jobs(cluster, "engine")) == 1, "the drained engine to end", 2 * PATIENCE_S)
    service.require_exactly_once(service.submit(4, gates[0], "spoken"))
    assert all(item.attempt == 1 for item in service.get(ids)), "nothing was begun anew"
