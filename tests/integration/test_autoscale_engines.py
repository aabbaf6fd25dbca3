"""Engines follow what real placements in Redis reserve and lack; the jobs are played by a pool in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from rollout.policy import PolicyRequest, UpdateState
from rollout.schema import BackendStats, RolloutRequest, Stage, State
from services.autoscale.engines import EngineState, LlmLoad, llm_load, name_of
from services.autoscale.policy import STAGES, Bounds, Goal, NodeState, Waiting
from services.autoscale.scaler import SETTLE_S, Autoscaler, Options
from services.dispatch import _expand
from services.gateway.app import create_app
from services.settings import Settings
from services.state.autoscale import AutoscaleStore
from services.state.backends.store import PlacementPolicy
from services.state.policy.store import PolicyStore
from services.state.redis import connect
from services.state.rollouts.store import Finish, RolloutStore
from tests.helpers.heap import Heap, backend
from tests.helpers.keys import keyed

GOAL = Goal(wait_s=10.0, spare=0.0, hold_s=100.0)
ADMIT = PlacementPolicy().admit
CAPACITY = 1000
"""Of which three quarters are given to new rollouts: three of 250 tokens."""


@pytest.fixture
def redis(server):
    server.client.flushall()
    return connect(server.url)


@pytest.fixture
def heap(redis):
    return Heap(redis)


@dataclass
class Engines:
    """Jobs in memory, each with one server in the heap, beside servers of nobody's."""

    heap: Heap
    names: list[str] = field(default_factory=list)
    coming: int = 0
    did: list[int] = field(default_factory=list)

    def start(self, *names, **more):
        for name in names:
            self.heap.put(backend(name, capacity_tokens=CAPACITY, **more))
        self.names += names

    def look(self, policy, llm):
        own = [server for server in llm.backends if server.id in self.names and policy in server.served]
        others = [
            server for server in llm.backends if server.id not in self.names and policy in server.served
        ]
        coming = len(self.names) - len(own) + self.coming
        return EngineState(NodeState(len(own), coming, {"engines": 1}), own, others)

    def set(self, policy, target, held):
        self.did.append(target)


@dataclass
class Nodes:
    did: list[int] = field(default_factory=list)

    def look(self, kind, workers):
        return NodeState(1, 0, {"init": 4, "run": 8, "eval": 4})

    def set(self, kind, target, workers):
        self.did.append(target)


def ready(redis, count):
    """Rollouts that wait for RUN; their ids."""
    store = RolloutStore(redis, Settings())
    new = _expand(RolloutRequest(handler="noop", n=count))
    store.submit(new)
    for _ in new:
        store.finish(store.claim_next("w", node="n"), Finish(State.READY))
    return [rollout.id for rollout in new]


def run(redis, heap, count, tokens=250):
    """Rollouts in RUN that ask for a place once, as far as there is room; ids of those that got one."""
    store = RolloutStore(redis, Settings())
    placed = []
    for rollout_id in ready(redis, count):
        claim = store.claim(rollout_id, 1, Stage.RUN, "w")
        if heap.acquire(rollout_id, tokens=tokens, fence=claim.fence).word == "ok":
            placed.append(rollout_id)
    return placed


def scaler(redis, engines, nodes=None, say=lambda text: None, bounds=(1, 9), **options):
    kinds = {STAGES: Bounds(1, 50)} if nodes else {}
    asked = Options(GOAL, nodes=kinds, engines={"default": Bounds(*bounds)}, **options)
    return Autoscaler(redis, asked, None, nodes, engines, owner="one", say=say)


def test_what_waits_for_room_has_engines_come_and_no_nodes(redis, heap, server):
    engines, nodes, lines = Engines(heap), Nodes(), []
    engines.start("a", "b")
    assert len(run(redis, heap, 20)) == 6
    ready(redis, 40)
    assert llm_load(redis).waiting == {"default": Waiting(14, 14 * 250.0)}
    autoscaler = scaler(redis, engines, nodes, lines.append)
    autoscaler.tick(0.0)
    # Two are full, and the 14 fill another 4.67. The 40 that wait for RUN would only join them.
    assert engines.did == [7]
    assert nodes.did == [3], "for the 20 that are in RUN, with eight slots a node"
    assert "100% of RUN waits for room on LLM servers, no reason for nodes: engines" in lines
    assert "engines: 2 (0 coming) → 7, 14 rollouts with 3500 tokens wait for room, 6 are placed" in lines
    assert lines[1].endswith(", 100% would wait for engines"), lines
    metrics = keyed(create_app(Settings(redis_url=server.url))).get("/metrics").text
    for line in (
        'rollout_autoscale_held_back{reason="engines",stage="run"} 1.0',
        'rollout_autoscale_held_back{reason="engines",stage="eval"} 0.0',
        'rollout_autoscale_nodes{kind="engines",state="target"} 7.0',
        'rollout_autoscale_nodes{kind="nodes",state="up"} 1.0',
        'rollout_autoscale_actions_total{action="engines_added"} 5.0',
    ):
        assert line in metrics, metrics
    engines.coming = 5
    autoscaler.tick(SETTLE_S + 1)
    assert engines.did == [7], "those on their way are enough"


def test_the_same_queue_asks_for_nodes_where_the_engines_have_room(redis, heap):
    engines, nodes = Engines(heap), Nodes()
    engines.start(*"abcdefg")
    assert len(run(redis, heap, 20)) == 20
    ready(redis, 40)
    scaler(redis, engines, nodes).tick(0.0)
    # Slots for 60, eight a node.
    assert (nodes.did, engines.did) == ([8], [])


def test_the_first_engine_comes_for_what_no_server_can_take_and_no_node_does(redis, heap):
    engines, nodes = Engines(heap), Nodes()
    assert run(redis, heap, 3) == []
    ready(redis, 40)
    autoscaler = scaler(redis, engines, nodes, bounds=(0, 9))
    autoscaler.tick(0.0)
    # How many one has room for is not known yet.
    assert (engines.did, nodes.did) == ([1], [])
    engines.coming = 1
    autoscaler.tick(SETTLE_S + 1)
    assert engines.did == [1]


def test_engines_go_after_the_hold_and_never_those_in_use_or_the_last_with_something_waiting(redis, heap):
    engines = Engines(heap)
    engines.start("a", "b", "c")
    placed = run(redis, heap, 5)
    autoscaler = scaler(redis, engines, bounds=(0, 9))
    autoscaler.tick(0.0)
    autoscaler.tick(90.0)
    assert engines.did == [], "it is not long enough that we look"
    autoscaler.tick(101.0)
    assert engines.did == [2], "five rollouts fill more than one"
    engines.names.remove("c")
    heap.remove("c")
    for rollout in placed:
        heap.release(rollout)
    redis.delete("rollouts:counts")
    autoscaler.tick(202.0)
    assert engines.did == [2, 0]
    # Somebody waits although nothing is reserved: the last one stays, whatever the bounds are.
    redis.hset("rollouts:counts", "running", 1)
    redis.set("backends:waited", "1")
    autoscaler = scaler(redis, engines, bounds=(0, 0))
    autoscaler.tick(0.0)
    autoscaler.tick(101.0)
    assert engines.did == [2, 0, 1]


def test_while_weights_are_exchanged_nothing_is_ordered_in_either_direction(redis, heap):
    engines = Engines(heap)
    engines.start("a", "b", "c")
    autoscaler = scaler(redis, engines)
    autoscaler.tick(0.0)
    policies = PolicyStore(redis)
    policies.create(PolicyRequest(version="v1", path="/a"), heap.list())
    run(redis, heap, 30)
    autoscaler.tick(200.0)
    assert engines.did == []
    work = policies.claim("worker", 30)
    work.record.update.state = UpdateState.DONE
    policies.finish(work, None)
    autoscaler.tick(201.0)
    assert engines.did == [10 - 1]


def test_servers_that_are_not_ours_draining_ones_and_those_of_other_policies_are_told_apart(redis, heap):
    engines = Engines(heap)
    engines.start("a")
    engines.start("j", policies={"judge": "m"})
    heap.put(backend("x", capacity_tokens=CAPACITY))
    heap.put(backend("d", capacity_tokens=CAPACITY), drain=True)
    heap.put(backend("sick", capacity_tokens=CAPACITY))
    heap.fail("sick", "it does not answer")
    heap.put_stats("j", BackendStats(at=1.0, running=4, waiting=4, kv_usage=0.5))
    llm = llm_load(redis)
    assert {server.id for server in llm.backends} == {"a", "j", "x"}
    waiting = {"default": Waiting(1, 9000.0), "judge": Waiting(2, 100.0)}
    llm = LlmLoad(llm.backends, waiting)
    needed, in_use, its = engines.look("judge", llm).needed("judge", llm, ADMIT)
    assert (needed, in_use, its[:13]) == (1, 1, "2 rollouts wi")
    needed, in_use, its = engines.look("default", llm).needed("default", llm, ADMIT)
    assert (needed, in_use, its[:13]) == (12, 1, "1 rollouts wi")
    # Where placements count rollouts, tokens say nothing: one more at a time.
    assert engines.look("default", llm).needed("default", llm, 0.0)[0] == 1


def test_one_engine_that_serves_several_policies_counts_what_waits_for_each_of_them(redis, heap):
    engines = Engines(heap)
    engines.start("a", policies={"default": "m", "user": "lora"})
    llm = LlmLoad(llm_load(redis).backends, {"user": Waiting(3, 1500.0)})
    assert engines.look("default", llm).needed("default", llm, ADMIT)[0] == 2
    assert llm.share == 1.0


def test_of_two_policies_the_one_with_room_keeps_its_share_of_what_waits(heap):
    servers = [backend("a", live_rollouts=6), backend("j", live_rollouts=3, policies={"judge": "m"})]
    assert LlmLoad(servers, {"judge": Waiting(3, 1.0)}).share == 0.5
    assert LlmLoad(servers, {}).share == 0.0


def test_the_state_of_engines_is_kept_by_kind(redis, heap):
    engines = Engines(heap)
    engines.start("a")
    scaler(redis, engines).tick(0.0)
    assert AutoscaleStore(redis).get()["nodes"] == {"engines": {"up": 1, "coming": 0, "target": 1}}
    assert json.loads(redis.get("autoscale"))["stages"]["run"]["engines"] == 0.0
    assert name_of("judge") == "engines/judge"


def test_what_waits_and_what_is_exchanged_is_told_by_policy(redis, heap):
    engines = Engines(heap)
    engines.start("a")
    engines.start("j", policies={"judge": "m"})
    words = [heap.acquire(f"r{n}", tokens=250, slot="judge", policy="judge").word for n in range(5)]
    assert words == ["ok"] * 3 + ["full"] * 2
    assert heap.acquire("x", tokens=250).word == "ok"
    PolicyStore(redis).create(PolicyRequest(version="v1", path="/a"), [heap.get("j")], "judge")
    llm = llm_load(redis)
    assert (llm.waiting, llm.updating) == ({"judge": Waiting(2, 500.0)}, {"judge"})
    assert llm.share == 5 / 6
    assert engines.look("judge", llm).needed("judge", llm, ADMIT) is None
    assert engines.look("default", llm).needed("default", llm, ADMIT)[:2] == (1, 1)
