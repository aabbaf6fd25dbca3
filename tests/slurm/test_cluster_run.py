"""The service on the virtual cluster: its life from `rollout slurm up` to `down`, in the order of the tests.

`make slurm-test` runs the long form: more rollouts, more lost nodes, a signal that Slurm itself sends.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from redis import RedisError

from rollout.schema import State
from services.launch import redis
from services.launch.slurm.rundir import UP, RunDir
from services.state.redis import connect
from tests.helpers.checkpoints import canary
from tests.helpers.llm_servers import DEMO_MODEL
from tests.helpers.long_forms import SLURM
from tests.helpers.sandboxes import require_apptainer
from tests.helpers.stack import ROOT
from tests.slurm.cluster import PATIENCE_S
from tests.slurm.service import EMBEDDED, SlurmService, places

ROLLOUTS = SLURM("rollouts", short=24, long=1000)
KILLS = SLURM("kills of a node", short=1, long=5)
HELD = SLURM("rollouts that stand at a gate", short=10, long=24)
"""Enough for every node to have some, mostly; `spread` adds as many where one has none."""
LOSSES = SLURM("losses of the head", short=["was cancelled"], long=["was cancelled", "lost its node"])
BUSY_S = 12
"""At most for the command that a Redis is busy with when its end comes; less than the head gives it."""
WAITS_S = 3.0
"""The next head waits for so long, with the start of its program, before that command is ended."""
COUNT = "for _ = 1, {:.0f} do end"
LEAKS = ("SLURM", "SBATCH", "SRUN", "PMI", "OMPI", "ROLLOUT")
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def service(cluster):
    """Two nodes, a head on one more, and an engine in the partition of GPUs."""
    require_apptainer()
    service = SlurmService(cluster)
    begun = time.monotonic()
    try:
        service.up(2, "--engine-model", str(DEMO_MODEL), command=EMBEDDED)
        service.do(1)
        print(f"first rollout {time.monotonic() - begun:.1f} s after `rollout slurm up`", flush=True)
        service.wait_for_nodes(2)
        yield service
    finally:
        service.slurm("down")


def ran_on(rollout):
    """The member whose RUN worker had it last."""
    return places(rollout, State.RUNNING)[-1]


def spread(service, gates, members):
    """Rollouts that stand at a shut gate, each with its sandbox, some on each of the members; id → member."""
    ids: list[str] = []
    for _ in range(20):
        ids += service.submit(HELD, gates)
        service.wait_arrived(gates, len(ids))
        where = {item.id: ran_on(item) for item in service.get(ids)}
        if set(members) <= set(where.values()):
            return where
    pytest.fail(f"{Counter(where.values())} hold the rollouts, not all of {members}")


def the_job_on(cluster, node):
    return next(job.id for job in cluster.squeue() if job.nodes == node and "node" in job.name)


def wait_for_end(cluster, job):
    cluster.wait(lambda: job not in {row.id for row in cluster.squeue()}, f"job {job} ends", 3 * PATIENCE_S)


def redis_servers(cluster):
    servers = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):  # it ended since
            servers += [process] if process.name() in redis.SERVERS and cluster.has(process) else []
    return servers


def require_nothing_on(cluster, node):
    cluster.wait_empty(node)
    assert cluster.left_in_tmp(node) == []


def test_rollouts_run_on_both_nodes_and_see_nothing_of_slurm(service):
    gates = service.gates()
    # While the gate is shut no node is through so soon that it takes the part of a slower one.
    where = spread(service, gates, service.members().values())
    service.open(gates)
    records = service.require_exactly_once([*where, *service.submit(max(0, ROLLOUTS - len(where)), gates)])
    did = Counter(map(ran_on, records))
    assert set(did) == set(service.members().values()), did
    for item in records:
        environment = (gates / f"{item.id}.{item.attempt}").read_text()
        names = [line.partition("=")[0] for line in environment.splitlines()]
        assert "PATH" in names
        assert not [name for name in names if name.startswith(LEAKS)]


def test_its_engine_takes_new_weights_and_nothing_from_whoever_has_no_token(service, tmp_path):
    with service.client as client:

        def engines():
            return [backend for backend in client.backends() if backend.healthy]

        service.cluster.wait(engines, "the engine is registered", 2 * PATIENCE_S)
        (backend,) = engines()
        assert backend.key == "slurm-engines" and "127.0.0.1" not in backend.url
        for method, route in (("POST", "/pause"), ("POST", "/collective_rpc"), ("GET", "/v1/models")):
            assert httpx.request(method, backend.url + route).status_code == 401
        # Nothing was set beyond the model, by trainer or operator.
        told = tmp_path / "canary.json"
        told.write_text(json.dumps(canary(DEMO_MODEL)))
        command = ("policy", "update", "step-1", str(DEMO_MODEL), "--canary", str(told))
        done = service.rollout(*command)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{service.logs()}"
        assert client.backend(backend.id).policy_version == "step-1"
        (done,) = service.require_exactly_once(service.submit(1, service.open_gates()))
        rollout = client.get(done.id)
        versions = [
            segment.policy_version for chain in rollout.trajectory.chains for segment in chain.segments
        ]
        assert "step-1" in versions
    token = (RunDir(service.run_dir).engine_keys / "slurm-engines").read_text().strip()
    shown = [path for path in (service.run_dir / "logs").rglob("*.log") if token in path.read_text()]
    assert shown == []


def test_workers_on_nodes_and_the_gateway_know_where_the_head_s_capture_listens(service, cluster):
    run = RunDir(service.run_dir)
    head, url = run.head(), run.capture_url()
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert urlsplit(url).hostname == head.address
    told = {}
    for node in cluster.addresses:
        for process in cluster.job_processes(node):
            with suppress(psutil.Error):
                words = set(process.cmdline())
                if words & {"worker", "gunicorn"}:
                    told.setdefault(node, set()).add(process.environ().get("ROLLOUT_CAPTURE_URL"))
    assert set(told) == {head.node, *service.members()}
    assert set().union(*told.values()) == {url}


def test_scaled_to_four_nodes_all_four_run_rollouts(service):
    service.slurm("scale", "--nodes", "4")
    members = service.wait_for_nodes(4)
    assert len(members) == 4
    gates = service.gates()
    where = spread(service, gates, members.values())
    service.open(gates)
    service.require_exactly_once(list(where))


def test_a_drained_node_ends_its_rollouts_and_one_near_its_end_hands_them_back(service, cluster):
    members = service.members()
    *_, ending, drained = sorted(members)
    jobs = {node: the_job_on(cluster, node) for node in (ending, drained)}
    gates = service.gates()
    where = spread(service, gates, [members[ending], members[drained]])
    # First, for else it may get some of what the other one hands back.
    service.slurm("drain", drained)
    if SLURM:  # Slurm itself sends the signal that the scripts ask for
        cluster.run("scontrol", "update", f"JobId={jobs[ending]}", "EndTime=now+110seconds")
    else:
        cluster.run("scancel", "--batch", "--signal=USR1", jobs[ending])
    leaving = {f"init@{members[node]}" for node in jobs}
    cluster.wait(lambda: not leaving & service.workers(), f"{leaving} take nothing new")
    later = service.submit(HELD, gates)
    cancelled = next(id_ for id_, on in where.items() if on == members[drained])
    del where[cancelled]
    service.submitted.remove(cancelled)
    with service.client as client:
        client.cancel(cancelled)
    wait_for_end(cluster, jobs[ending])
    require_nothing_on(cluster, ending)
    service.open(gates)
    records = {item.id: item for item in service.require_exactly_once([*where, *later])}
    for id_, on in where.items():
        if on == members[drained]:
            assert ran_on(records[id_]) == on
        elif on == members[ending]:
            assert ran_on(records[id_]) != on
            assert records[id_].attempt == 1  # it was no failure
    leavers = {members[node] for node in jobs}
    assert not leavers & {ran_on(records[id_]) for id_ in later}
    wait_for_end(cluster, jobs[drained])
    require_nothing_on(cluster, drained)
    count, status = Counter(where.values()), service.slurm("status")
    print(status, flush=True)
    finished, back = count[members[drained]], count[members[ending]]
    ends = rf"{ending} \(job \d+\) drained at [\d:]+: 0 rollouts finished, {back} handed back"
    drains = (
        rf"{drained} \(job \d+\) drained at [\d:]+: {finished} rollouts finished, 0 handed back, 1 failed"
    )
    assert back and re.search(ends, status) and re.search(drains, status), (count, status)
    for node in jobs:
        assert members[node] not in status and f"run.{node}" not in status


@pytest.mark.parametrize("number", range(KILLS))
def test_rollouts_of_a_lost_node_begin_again_elsewhere_and_its_return_is_clean(service, cluster, number):
    members = service.members()
    node = sorted(members)[number % len(members)]
    gates = service.gates()
    where = spread(service, gates, [members[node]])
    before = [path for path in cluster.tmp(node).rglob("*") if path.parent.name in ("records", "scratch")]
    assert before
    cluster.kill_node(node)
    cluster.report_down(node)
    service.open(gates)
    for item in service.require_exactly_once(list(where)):
        if where[item.id] == members[node]:
            assert item.attempt > 1
            assert ran_on(item) != members[node]
    # A requeued job has its old name, under which the workers that were killed are on the list for a while.
    killed = {f"{stage}@{members[node]}" for stage in ("init", "run", "eval")}
    cluster.wait(lambda: not killed & service.workers(), f"{killed} are known to be gone")
    with service.client as client:
        queues = client.status()["queues"]
    assert f"run.{members[node]}" not in queues and {f"run.{other}" for other in set(members.values())} & set(
        queues
    )
    cluster.start_node(node)
    cluster.wait_up(node)
    cluster.hurry()
    assert node in service.wait_for_nodes(len(members))
    cluster.wait(lambda: not [path for path in before if path.exists()], f"{node} swept what was left")


@pytest.mark.parametrize("how", LOSSES)
def test_a_service_without_its_head_gets_it_back_by_up_and_keeps_its_nodes_and_rollouts(
    service, cluster, how
):
    members, gates = service.members(), service.gates()
    where = spread(service, gates, members.values())
    (head,) = [job for job in cluster.squeue() if "head" in job.name]
    if how == "was cancelled":
        cluster.run("scancel", head.id)
    else:
        cluster.run("scontrol", "update", f"JobId={head.id}", "Requeue=0")
        time.sleep(2.0)  # what Redis answered for in its last second may be lost
        cluster.kill_node(head.nodes)
        cluster.report_down(head.nodes)
    wait_for_end(cluster, head.id)
    status = service.try_slurm("status")
    nodes = ", ".join(sorted(members))
    gone = rf"The head is gone: job {head.id} {how} .*, last heard of at \d\d:\d\d:\d\d, \d:\d\d:\d\d ago"
    assert status.returncode == 1 and re.search(gone, status.stdout), status.stdout
    assert f"Up without it: g1, {nodes}." in status.stdout
    assert status.stdout.splitlines()[-1].strip() == "rollout slurm up"
    jobs = cluster.squeue()
    scale = service.try_slurm("scale", "--nodes", str(len(members) + 2))
    assert scale.returncode == 1 and re.search(gone, scale.stderr), scale.stderr
    assert scale.stderr.splitlines()[-1].strip() == "rollout slurm up"
    lost = service.rollout("status")
    assert lost.returncode == 1 and "`rollout slurm status` shows" in lost.stderr, lost.stderr
    assert cluster.squeue() == jobs
    service.open(gates)  # their workers wait with what they reached
    said = service.slurm("up", "--timeout", str(3 * PATIENCE_S))
    found = service.rollout("status")
    assert found.returncode == 0 and f"the Slurm service of {service.run_dir}" in found.stderr, found.stderr
    assert not any(name in found.stdout for name in members.values()), found.stdout
    keys = service.rollout("keys", "list")
    assert keys.returncode == 0 and " admin " in keys.stdout, keys.stderr
    assert f": the Slurm service of {service.run_dir}" in keys.stderr, keys.stderr
    print(status.stdout, scale.stderr, said, found.stderr, found.stdout, sep="\n", flush=True)
    new = [job for job in cluster.squeue() if job.id not in {job.id for job in jobs}]
    assert ["head" in job.name for job in new] == [True]
    service.require_exactly_once(list(where))
    assert service.wait_for_nodes(len(members)) == members
    service.do(HELD)
    if how != "was cancelled":
        cluster.start_node(head.nodes)
        cluster.wait_up(head.nodes)


def test_a_head_asked_for_while_the_last_one_ends_begins_after_the_end_of_its_redis(service, cluster):
    gates, counts, others = service.gates(), [], []
    where = spread(service, gates, service.members().values())
    (head,) = [job for job in cluster.squeue() if "head" in job.name]
    (first,) = redis_servers(cluster)
    run = RunDir(service.run_dir)
    with (
        ThreadPoolExecutor() as pool,
        connect(run.redis_url(run.head()), max_connections=2, retries=0) as client,
    ):
        client.config_set("busy-reply-threshold", 100)  # from then on a command can be ended
        begun = time.monotonic()
        client.eval(COUNT.format(2e7), 0)
        pool.submit(client.eval, COUNT.format(2e7 * BUSY_S / (time.monotonic() - begun)), 0)
        time.sleep(1.0)  # it is busy, and ends late
        cluster.run("scancel", head.id)
        up = pool.submit(service.slurm, "up", "--timeout", str(3 * PATIENCE_S))
        while not up.done():
            counts.append(len(redis_servers(cluster)))
            heads = {job.id for job in cluster.squeue() if "head" in job.name and job.state == "RUNNING"}
            others += [time.monotonic()] if heads - {head.id} else []
            if others and others[-1] - others[0] > WAITS_S:
                with suppress(RedisError):  # it has ended by itself
                    client.script_kill()
            time.sleep(0.25)
    print(up.result(), flush=True)
    assert max(counts) == 1 and not first.is_running(), counts
    service.open(gates)
    service.require_exactly_once(list(where))


@SLURM.only
@pytest.mark.parametrize("how", ["requeued", "lost"])
def test_a_head_comes_back_with_what_it_knew(service, cluster, how):
    before = list(service.submitted)
    nodes = len(service.members())
    (head,) = [job for job in cluster.squeue() if "head" in job.name]
    if how == "requeued":
        cluster.run("scontrol", "requeue", head.id)
        cluster.wait(lambda: head not in cluster.squeue(), "the head ends")
    else:  # and comes back elsewhere
        time.sleep(2.0)  # what Redis answered for in its last second may be lost
        cluster.kill_node(head.nodes)
        cluster.report_down(head.nodes)

    def back():
        cluster.hurry()
        return service.workers()

    cluster.wait(back, "the head is back", 2 * PATIENCE_S)
    assert {item.state for item in service.get(before)} == {State.COMPLETED}
    service.wait_for_nodes(nodes)
    service.do(HELD)
    if how == "lost":
        cluster.start_node(head.nodes)
        cluster.wait_up(head.nodes)


@SLURM.only
def test_a_preempted_node_hands_its_rollouts_back_and_returns(service, cluster):
    members = service.members()
    node = sorted(members)[0]
    gates = service.gates()
    where = spread(service, gates, [members[node]])
    urgent = ("--partition=urgent", "--exclusive", f"--nodelist={node}", "--output=/dev/null")
    job = cluster.run("sbatch", "--parsable", *urgent, "--wrap", "sleep 900").strip()
    cluster.wait(
        lambda: (job, "RUNNING") in {(row.id, row.state) for row in cluster.squeue()},
        "it is preempted",
        300.0,
    )
    service.open(gates)
    for item in service.require_exactly_once(list(where)):
        if where[item.id] == members[node]:
            assert ran_on(item) != members[node]
            assert item.attempt == 1
    cluster.run("scancel", job)
    wait_for_end(cluster, job)
    cluster.hurry()
    service.wait_for_nodes(len(members))


def test_down_leaves_nothing_but_the_data(service, cluster):
    service.slurm("down")
    assert cluster.squeue() == []
    for node in cluster.addresses:
        require_nothing_on(cluster, node)
    assert list((service.run_dir / "redis").rglob("*.aof"))


def test_up_says_why_the_head_ends_at_once_and_does_not_wait_for_it(cluster):
    service = SlurmService(cluster, "broken")
    site = cluster.directory / "broken.toml"
    site.write_text('modules = ["nonsuch/1"]\n')
    begun = time.monotonic()
    done = service.try_slurm("up", "--nodes", "2", "--site", str(site))
    print(f"`up` gave up after {time.monotonic() - begun:.1f} s", flush=True)
    try:
        assert done.returncode == 1
        assert "the head's job has ended, as said above" in done.stderr
        match = re.search(
            r"(?:head|node) job \S+ failed on (\w+) \(exit code 1\)\. The end of (\S+):", done.stdout
        )
        assert match and match[1] in cluster.nodes, done.stdout
        assert Path(match[2]).read_text().splitlines()[-1] == "module load nonsuch/1 failed"
        assert "module load nonsuch/1 failed" in done.stdout
    finally:
        service.slurm("down")
    assert cluster.squeue() == []


def test_of_two_heads_submitted_by_hand_in_the_same_second_one_serves_and_the_other_says_so(cluster):
    run = RunDir(cluster.directory / "by-hand")
    run.make()
    script = ROOT / "deploy" / "slurm" / "head.sbatch"
    variables = f"ALL,ROLLOUT_PYTHON={sys.executable},PYTHONPATH={ROOT},ROLLOUT_SLURM_FLOWER=0"
    command = ("sbatch", "--parsable", f"--export={variables}", f"--output={run.logs}/head-%j.log")
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(cluster.run, *command, str(script), str(run.path)) for _ in range(2)]
        ids = [call.result().strip() for call in calls]
    try:
        cluster.wait(lambda: len(cluster.squeue()) == 1, "one of them ends")
        cluster.wait(lambda: (head := run.head()) and head.state == UP, "the other one is up")
        head = run.head()
        (loser,) = set(ids) - {head.job}
        said = (run.logs / f"head-{loser}.log").read_text()
        assert f"job {head.job} is the head of {run.path} already" in said
        assert len(redis_servers(cluster)) == 1 and run.data_holder() == (1, head.job)
    finally:
        cluster.run("scancel", *ids)
        cluster.wait(lambda: cluster.squeue() == [], "both end")
    assert run.data_holder() == (1, "")
