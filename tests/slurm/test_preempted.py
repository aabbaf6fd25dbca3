"""Nodes that Slurm takes away: their rollouts go on elsewhere, with the files of their sandboxes."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from rollout.schema import RolloutRequest, State, new_id
from services.launch.slurm.rundir import RunDir
from tests.helpers.llm_servers import DEMO_MODEL
from tests.helpers.long_forms import SLURM
from tests.helpers.sandboxes import require_apptainer
from tests.slurm.cluster import PATIENCE_S, SlurmCluster
from tests.slurm.service import SlurmService, places

ROLLOUTS = SLURM("rollouts while nodes are preempted", short=24, long=200)
NODES = SLURM("nodes", short=2, long=4)
PREEMPTIONS = SLURM("nodes that are preempted, one after the other", short=1, long=4)
STEPS = SLURM("turns with a tool", short=4, long=6)
PAUSE_S = SLURM("seconds of each", short=4.0, long=8.0)
CROWD = SLURM("small files in one sandbox of so many", short=(2000, 8), long=(20_000, 40))
AT_ONCE = 16
"""Rollouts of a node that are in RUN."""
ENOUGH = SLURM("of them before the node is taken", short=6, long=8)
ENGINE = (
    f"{sys.executable} -m tests.helpers.fake_engine --host {{host}} --port {{port}} --tokenizer {DEMO_MODEL} "
    "--script tests.slurm.handlers:build"
)
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def cluster():
    """One of its own: elsewhere nodes are not taken away."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as directory,
        SlurmCluster(Path(directory), nodes=NODES + 1) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def service(cluster):
    require_apptainer()
    service = SlurmService(cluster, "preempted")
    service.env["ROLLOUT_READY_AHEAD"] = "4"
    try:
        slots = ("--slots-run", str(AT_ONCE), "--slots-init", "8")
        service.up(NODES, "--engine-model", str(DEMO_MODEL), *slots, command=ENGINE)
        service.wait_for_nodes(NODES)
        yield service
    finally:
        service.slurm("down", "--grace", "0")


def submit(service, count):
    """Travellers, some with a crowd of small files; their ids."""
    files, of = CROWD
    tasks = [
        {"seed": seed, "steps": STEPS, "pause_s": PAUSE_S, "crowd": files if seed % of == 1 else 0}
        for seed in range(1, count + 1)
    ]
    limits = {"max_turns": STEPS + 20, "max_attempts": 5}
    requests = [RolloutRequest(handler="traveller", id=new_id(), task=task, limits=limits) for task in tasks]
    with service.client as client:
        client.submit(requests)
    return [request.id for request in requests]


def preempt(cluster, node):
    """Begin a job that wants the node more; its number."""
    urgent = ("--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null")
    return cluster.run("sbatch", "--parsable", *urgent, "--wrap", "sleep 900").strip()


def took(cluster, job):
    return (job, "RUNNING") in {(row.id, row.state) for row in cluster.squeue()}


def of_sandboxes(cluster, node):
    """What there is of sandboxes on a node."""
    kept = ("records", "scratch")
    return [path for path in cluster.tmp(node).glob("sbx-*/*/*") if path.parent.name in kept]


def at_work(service, member):
    """How many a member's RUN worker has in hand."""
    with service.client as client:
        running = client.list(state="running", limit=500).rollouts
    return sum(places(rollout, State.RUNNING)[-1:] == [member] for rollout in running)


def began_anew(rollout):
    """Whether it was in INIT again after that had ended."""
    states = [event.state for event in rollout.timeline]
    return State.INITIALIZING in states[states.index(State.READY) :] if State.READY in states else False


def take_away(service, cluster, node, member):
    """Preempt a node whose rollouts are at their turns; the job that wants it. Its member ends in time."""
    cluster.wait(lambda: at_work(service, member) >= ENOUGH, f"{member} is at work", 4 * PATIENCE_S)
    time.sleep(PAUSE_S)
    begun = time.monotonic()
    job = preempt(cluster, node)

    def ended():
        return member not in {other.name for other in RunDir(service.run_dir).members()}

    cluster.wait(ended, f"{member} ends")
    print(f"{member} had ended {time.monotonic() - begun:.1f} s after its preemption", flush=True)
    assert of_sandboxes(cluster, node) == []
    return job


def come_back(service, cluster, job):
    """The node is free again, and its job, which was queued again, does what it did before."""
    cluster.wait(lambda: took(cluster, job), "Slurm takes the node")
    cluster.run("scancel", job)

    def back():
        cluster.hurry()
        return len(service.members()) == NODES

    cluster.wait(back, "the node is back", 3 * PATIENCE_S)


def test_rollouts_of_preempted_nodes_go_on_elsewhere_with_their_files(service, cluster):
    members, ids = service.members(), submit(service, ROLLOUTS)
    order = sorted(members)
    for number in range(PREEMPTIONS):
        taken = order[number % NODES]
        job = take_away(service, cluster, taken, members[taken])
        if number + 1 < PREEMPTIONS:
            come_back(service, cluster, job)
            assert service.members() == members
    begun = time.monotonic()
    records = service.require_exactly_once(ids)
    moves, attempts = Counter(item.moved for item in records), Counter(item.attempt for item in records)
    print(f"{ROLLOUTS} rollouts had ended {time.monotonic() - begun:.1f} s after", flush=True)
    print(f"moves of one: {dict(moves)}, attempts: {dict(attempts)}", flush=True)
    assert attempts == {1: ROLLOUTS} and not [item.id for item in records if began_anew(item)]
    assert ROLLOUTS - moves[0] >= ENOUGH
    where = {item.id: places(item, State.RUNNING)[-1] for item in records if item.moved}
    assert PREEMPTIONS > 1 or members[taken] not in where.values(), where
    for node in order:
        cluster.wait(lambda node=node: not of_sandboxes(cluster, node), f"no sandbox is left on {node}")
    assert list(RunDir(service.run_dir).snapshots.iterdir()) == []
