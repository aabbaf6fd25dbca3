"""The autoscaler on a real Redis and real workers; Slurm's part is played by a pool of nodes in memory."""

from __future__ import annotations

import math
import re
import threading
import time
from dataclasses import dataclass, field

import pytest
from click.testing import CliRunner

from rollout.cli import main
from rollout.schema import RolloutRequest, Stage, State
from services.autoscale.policy import STAGES, Bounds, Goal, NodeState
from services.autoscale.scaler import BACK_OFF_S, SETTLE_S, Autoscaler, Observer, Options
from services.dispatch import _expand
from services.launch import SlurmError
from services.queues import make_celery
from services.settings import Settings
from services.state.autoscale import AutoscaleStore
from services.state.fleet import FleetStore, NodeAdmission
from services.state.redis import connect
from services.state.rollouts.store import Finish, RolloutStore
from tests.helpers.keys import http
from tests.helpers.stack import NODE, wait_until

PATIENCE_S = 120
GOAL = Goal(wait_s=10.0, spare=0.0, hold_s=100.0)
PER_NODE = {"init": 4, "run": 8, "eval": 4}


@pytest.fixture
def redis(server):
    server.client.flushall()
    return connect(server.url)


@pytest.fixture
def store(redis):
    return RolloutStore(redis, Settings())


@dataclass
class Pool:
    """Nodes in memory."""

    up: int = 1
    coming: int = 0
    refuses: bool = False
    did: list[int] = field(default_factory=list)

    def look(self, kind, workers):
        if self.refuses:
            raise SlurmError("sbatch: error: Batch job submission failed")
        return NodeState(self.up, self.coming, {stage: PER_NODE[stage] for stage in kind})

    def set(self, kind, target, workers):
        self.did.append(target)
        self.coming = max(0, target - self.up)
        self.up = min(self.up, target)


def submit(store, count):
    new = _expand(RolloutRequest(handler="noop", n=count))
    store.submit(new)
    return [rollout.id for rollout in new]


def scaler(redis, pool=None, bounds="0:100", owner="one", **options):
    least, most = map(int, bounds.split(":"))
    nodes = {STAGES: Bounds(least, most)} if pool else {}
    return Autoscaler(redis, Options(GOAL, nodes=nodes, **options), pool=pool, owner=owner)


def test_load_is_seen_as_redis_has_it(redis, store):
    FleetStore(redis).announce("init@n", ["init"], "n", 4)
    FleetStore(redis).announce("run@n", ["run"], "n", 8)
    ids = submit(store, 10)
    observer = Observer(redis)
    claims = [store.claim_next("w", node="n") for _ in range(4)]
    for claim in claims[:3]:
        store.finish(claim, Finish(State.READY))
    run = store.claim(claims[0].rollout_id, 1, Stage.RUN, "w")
    redis.hset(f"rollout:{{{ids[9]}}}", "since", int(redis.time()[0]) * 1000 - 42_000)

    loads, workers = observer.look()
    assert {name: (load.waiting, load.busy) for name, load in loads.items()} == {
        "init": (6, 1),
        "run": (2, 1),
        "eval": (0, 0),
    }
    assert 41 <= loads["init"].oldest_s < 60
    assert (loads["init"].slots, loads["run"].slots, loads["eval"].slots) == (4, 8, 0)
    assert loads["init"].service_s is not None, "three have ended INIT"
    assert loads["run"].service_s is None
    assert {worker.name for worker in workers} == {"init@n", "run@n"}

    store.finish(run, Finish(State.EVALUATING))
    assert (observer.look()[0]["eval"].waiting, observer.look()[0]["eval"].busy) == (1, 0)
    store.claim(run.rollout_id, 1, Stage.EVAL, "w")
    assert (observer.look()[0]["eval"].waiting, observer.look()[0]["eval"].busy) == (0, 1)


def test_init_that_waits_for_run_is_seen_and_a_node_short_of_disk_brings_no_slots(redis, store):
    fleet = FleetStore(redis)
    for node in ("n", "m"):
        fleet.announce(f"init@{node}", ["init"], node, 4)
        fleet.put_admission(node, NodeAdmission({}, True, 64, 64, 1 << 30, 1 << 30))
    assert Observer(redis).look()[0]["init"].blocked
    fleet.put_admission("m", NodeAdmission({"disk": "little is left"}, False, 0, 64, 1 << 30, 1 << 30))
    load = Observer(redis).look()[0]["init"]
    assert (load.slots, load.blocked) == (4, True)
    fleet.put_admission("n", NodeAdmission({}, False, 3, 64, 1 << 30, 1 << 30))
    assert not Observer(redis).look()[0]["init"].blocked


def test_nodes_are_ordered_for_a_queue_and_given_up_when_it_has_been_empty_for_long(redis, store):
    pool = Pool()
    ids = submit(store, 40)
    autoscaler = scaler(redis, pool)
    autoscaler.tick(0.0)
    # Nothing has ended yet: a slot for each of the 40 that wait for INIT, with four a node.
    assert pool.did == [9] and pool.coming == 8
    autoscaler.tick(1.0)
    assert pool.did == [9], "what was submitted may not be listed yet"
    autoscaler.tick(SETTLE_S + 1)
    assert pool.did == [9, 10]
    pool.up, pool.coming = 10, 0
    for rollout_id in ids:
        store.cancel(rollout_id)
    for now in (40.0, 90.0, 131.0):
        autoscaler.tick(now)
    assert pool.did == [9, 10], "it was needed less than 100 s ago"
    autoscaler.tick(132.0)
    assert pool.did == [9, 10, 0]
    assert AutoscaleStore(redis).totals()["nodes_added"] == 9
    assert AutoscaleStore(redis).totals()["nodes_drained"] == 10


def test_a_refusal_of_slurm_is_counted_and_waited_out_longer_each_time(redis, store):
    pool = Pool(refuses=True)
    submit(store, 40)
    autoscaler = scaler(redis, pool)
    for now in (0.0, 1.0, BACK_OFF_S + 1, BACK_OFF_S + 2, 2 * BACK_OFF_S + 2):
        autoscaler.tick(now)
    assert AutoscaleStore(redis).totals()["failures"] == 2
    pool.refuses = False
    autoscaler.tick(3 * BACK_OFF_S + 3)
    assert pool.did == [9]


def test_of_two_autoscalers_one_acts_and_hands_over_when_it_stops(redis, store):
    submit(store, 40)
    pools = Pool(), Pool()
    first, second = (
        scaler(redis, pool, owner=name) for pool, name in zip(pools, ("one", "two"), strict=True)
    )
    redis.set("autoscale:lock", "three")
    first.run(threading.Event(), once=True)
    assert not pools[0].did, "another one holds the lock, and keeps it"
    assert redis.get("autoscale:lock") == "three"
    redis.delete("autoscale:lock")
    stopping = threading.Event()
    acting = threading.Thread(target=first.run, args=(stopping,))
    acting.start()
    try:
        wait_until(lambda: pools[0].did, PATIENCE_S, "the first to act")
        second.run(threading.Event(), once=True)
        assert not pools[1].did
    finally:
        stopping.set()
        acting.join()
    second.run(threading.Event(), once=True)
    assert pools[1].did, "one that stops hands over at once"


def test_a_dry_run_says_what_it_would_do_and_does_nothing(redis, store):
    began = time.monotonic()
    submit(store, 40)
    pool, lines = Pool(), []
    options = Options(GOAL, nodes={STAGES: Bounds(0, 100)}, dry_run=True)
    Autoscaler(redis, options, pool=pool, owner="dry", say=lines.append).run(threading.Event(), once=True)
    assert pool.did == []
    (line,) = lines
    pattern = r"nodes: 1 \(0 coming\) → 9, init: 40 wait, the longest for (\d+) s, 0 of 0 slots in use"
    longest = re.fullmatch(pattern, line)
    assert longest and int(longest[1]) <= math.ceil(time.monotonic() - began), line
    assert AutoscaleStore(redis).get() is None
    assert not redis.exists("autoscale:lock")


def test_slots_of_a_real_worker_follow_the_queue_and_the_metrics_say_so(stack):
    redis = connect(stack.redis.url)
    app = make_celery(Settings(redis_url=stack.redis.url))

    def slots():
        return next(worker.slots for worker in FleetStore(redis).workers() if worker.name == f"run@{NODE}")

    # A worker of another test that ends meanwhile is an action more.
    own = {f"{stage}@{NODE}" for stage in ("init", "run", "eval")}
    wait_until(
        lambda: {worker.name for worker in FleetStore(redis).workers()} == own,
        PATIENCE_S,
        "other tests' workers to end",
    )
    options = Options(Goal(wait_s=10.0, spare=0.0, hold_s=0.0), live=Bounds(2, 50))
    autoscaler = Autoscaler(redis, options, app, owner="live")
    most = slots()
    made = []
    try:
        autoscaler.tick(0.0)
        wait_until(lambda: (autoscaler.tick(1.0), slots() == 2)[1], PATIENCE_S, "two slots, for nothing runs")
        made = stack.client.submit([RolloutRequest(handler="noop", task={"run_s": 600}, n=7)])

        def five_wait() -> bool:
            states = stack.client.status()["states"]
            return states["running"] >= 2 and states["ready"] == 5

        # Not the messages: those that wait for long are sent again.
        wait_until(five_wait, PATIENCE_S, "five that wait for RUN")
        wait_until(lambda: (autoscaler.tick(2.0), slots() >= 7)[1], PATIENCE_S, "slots for all")
        wait_until(lambda: stack.client.status()["states"]["running"] >= 7, PATIENCE_S, "all to run")
        metrics = http.get(f"{stack.url}/metrics").text
        assert 'rollout_autoscale_need_slots{stage="run"}' in metrics
        assert 'rollout_autoscale_actions_total{action="slots_raised"} 5.0' in metrics
    finally:
        for worker in ("init", "run", "eval"):
            app.control.broadcast(
                "set_slots", {"slots": most}, [f"{worker}@{NODE}"], reply=True, timeout=PATIENCE_S, limit=1
            )
        if made:
            stack.client.cancel_many(group_id=made[0].group_id)


def command(*options):
    return CliRunner().invoke(main, ["autoscale", *options])


def test_the_command_says_what_is_missing_or_does_not_fit(tmp_path):
    assert "give --nodes, --stage, --engines or --live-slots" in command().output
    assert "--nodes 9: write LEAST:MOST" in command("--nodes", "9").output
    assert "0 <= least <= most must hold" in command("--nodes", "9:3").output
    assert "--stage boil=0:3: write init, run, eval" in command("--stage", "boil=0:3").output
    assert "--engines 9: write LEAST:MOST" in command("--engines", "9").output
    for wrong in (("A b=1:3",), ("0:1", "default=1:2")):
        options = [word for text in wrong for word in ("--engines", text)]
        assert "write LEAST:MOST or POLICY=LEAST:MOST, once a policy" in command(*options).output
    refused = command("--nodes", "0:3", "--run-dir", str(tmp_path))
    assert f"no service runs from {tmp_path}; `rollout slurm up` starts one" in refused.output
    assert refused.exit_code == 1


def test_the_command_decides_once_and_says_it(server, redis, store, monkeypatch):
    FleetStore(redis).announce("run@n", ["run"], "n", 4, most_slots=16)
    submit(store, 3)
    monkeypatch.setenv("ROLLOUT_REDIS_URL", server.url)
    result = command("--live-slots", "8:16", "--once", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "run: 4 → 8 slots of 16: 0 wait" in result.output
