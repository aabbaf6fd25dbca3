"""Reservations end with their rollouts, counters are repaired, and they stay exact under any operations."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.schema import BackendStats, RolloutRequest, Stage
from services.dispatch import _expand
from services.state import keys
from services.state.backends.store import BackendStore
from services.state.redis import connect
from services.state.rollouts.store import Finish
from tests.helpers.heap import Heap, home, loads, put
from tests.helpers.stack import RedisServer


def running(rollouts, **fields):
    """A rollout that a RUN worker has just claimed: its id and fence."""
    (new,) = _expand(RolloutRequest(handler="noop", **fields))
    rollouts.submit([new])
    claim = rollouts.claim(new.id, 1, Stage.INIT, "w")
    rollouts.finish(claim, Finish("ready"))
    claim = rollouts.claim(new.id, 1, Stage.RUN, "w")
    return new.id, claim


def test_a_reservation_ends_with_its_rollout_and_with_its_lease(heap, rollouts, client):
    put(heap, "a")
    first, claim = running(rollouts)
    second, _ = running(rollouts)
    for rollout_id in (first, second):
        assert heap.acquire(rollout_id, tokens=10, fence=2).word == "ok"
    assert rollouts.get(first).backend == "a", "known while the rollout runs"
    rollouts.finish(claim, Finish("failed"))
    assert loads(heap) == {"a": (10.0, 1)}
    client.hset(keys.record(second), "lease", 1)
    client.zadd(keys.DUE, {second: 1})
    assert [item.action for item in rollouts.overdue()] == ["restart"]
    assert loads(heap) == {"a": (0.0, 0)}


def test_a_worker_that_lost_its_rollout_reserves_nothing(heap, rollouts):
    put(heap, "a")
    rollout_id, claim = running(rollouts)
    assert heap.acquire(rollout_id, tokens=10, fence=claim.fence - 1).word == "lost"
    assert heap.acquire(rollout_id, tokens=10, fence=claim.fence).word == "ok"
    assert heap.extend(rollout_id, 99, fence=claim.fence - 1).word == "lost"
    rollouts.finish(claim, Finish("failed"))
    assert heap.extend(rollout_id, 99, fence=claim.fence).word == "lost"
    assert loads(heap) == {"a": (0.0, 0)}


def test_counters_that_redis_lost_are_made_again_from_the_live_rollouts(heap, rollouts, client):
    put(heap, "a", "b")
    for n in range(6):
        rollout_id, claim = running(rollouts, group_id="g")
        heap.acquire(rollout_id, tokens=10 + n, fence=claim.fence, group="g")
    before, groups = loads(heap), client.hgetall(keys.BACKEND_GROUPS)
    client.delete(
        keys.backends_load(""),
        keys.BACKEND_PINS,
        keys.BACKEND_GROUPS,
        keys.backends_chosen(""),
        keys.backend("a"),
    )
    assert heap.reconcile().restored == 6
    assert loads(heap) == before and list(client.hgetall(keys.BACKEND_GROUPS)) == list(groups)
    again = heap.reconcile()
    assert (again.reclaimed, again.restored, again.corrected) == (0, 0, 0)


def test_reservations_of_nobody_are_reclaimed(heap, rollouts, client):
    put(heap, "a")
    heap.acquire("ghost", tokens=10)
    abandoned, claim = running(rollouts)
    heap.acquire(abandoned, tokens=10, fence=claim.fence)
    client.hdel(keys.record(abandoned), "owner")
    client.zincrby(keys.backends_load(""), 5, "a")
    counts = heap.reconcile()
    assert (counts.reclaimed, counts.corrected) == (2, 1)
    assert loads(heap) == {"a": (0.0, 0)}


@pytest.mark.parametrize(("load", "live"), [(0, 0), (5, 0), (0, 3), (0, -1)])
def test_each_counter_that_is_wrong_is_corrected(heap, rollouts, client, load, live):
    put(heap, "a", "b")
    rollout_id, claim = running(rollouts)
    chosen = home(heap.acquire(rollout_id, tokens=10, fence=claim.fence))
    client.zincrby(keys.backends_load(""), load, chosen)
    client.hincrby(keys.backend(chosen), "live", live)
    assert heap.reconcile().corrected == bool(load or live)
    assert loads(heap)[chosen] == (10.0, 1)


def test_what_was_given_back_is_not_restored_while_its_rollout_still_runs(heap, rollouts, client):
    put(heap, "a")
    rollout_id, claim = running(rollouts)
    heap.acquire(rollout_id, tokens=10, fence=claim.fence)
    heap.extend(rollout_id, 99, fence=claim.fence)
    client.delete(keys.BACKEND_PINS)
    assert heap.reconcile().restored == 1 and loads(heap) == {"a": (99.0, 1)}
    assert heap.release(rollout_id)
    assert heap.reconcile().restored == 0 and loads(heap) == {"a": (0.0, 0)}


def test_a_group_has_a_home_while_it_has_members_and_the_same_after_a_repair(heap, rollouts, client):
    put(heap, "a", "b")
    held = [running(rollouts, group_id="g") for _ in range(3)]
    for rollout_id, claim in held:
        chosen = home(heap.acquire(rollout_id, tokens=1, fence=claim.fence, group="g"))
    client.hset(keys.BACKEND_GROUPS, "ghost", "a 2")
    second = {"a": "b", "b": "a"}[chosen]
    client.hset(keys.BACKEND_GROUPS, "g", f"{second} 7")
    heap.reconcile()
    assert client.hgetall(keys.BACKEND_GROUPS) == {"g": f"{second} 3"}
    for members, (rollout_id, _) in zip((2, 1, 0), held, strict=True):
        heap.release(rollout_id)
        assert client.hgetall(keys.BACKEND_GROUPS) == ({"g": f"{second} {members}"} if members else {})


def test_how_much_backends_hold_that_an_earlier_release_registered_is_noted(heap, client):
    put(heap, "a", "b", capacity_tokens=100)
    size = client.hget(keys.backends_grants(""), "size")
    client.delete(keys.backends_grants(""))
    heap.reconcile()
    assert float(client.hget(keys.backends_grants(""), "size")) == float(size) > 0


def test_who_waits_with_another_policy_hears_of_a_rollout_that_ended(heap, rollouts, client):
    put(heap, "a", max_rollouts=1, policies={"red": "m", "blue": "n"})
    rollout_id, claim = running(rollouts, policy="red")
    waiting, other = running(rollouts, policy="blue")
    assert heap.acquire(rollout_id, tokens=1, fence=claim.fence, policy="red").word == "ok"
    assert heap.acquire(waiting, tokens=1, fence=other.fence, policy="blue").word == "full"
    with client.pubsub() as heard:
        heard.subscribe(keys.BACKEND_ROOM_CHANNEL)
        assert heard.get_message(timeout=60)["type"] == "subscribe"
        rollouts.finish(claim, Finish("failed"))
        assert heard.get_message(timeout=60)["type"] == "message"
    assert heap.acquire(waiting, tokens=1, fence=other.fence, policy="blue").word == "ok"


def test_a_removed_backend_does_not_come_back_with_a_negative_load(heap):
    put(heap, "a")
    heap.acquire("x")
    assert heap.remove("a") and not heap.remove("a")
    heap.release("x")
    assert heap.list() == [] and heap.get("a") is None
    put(heap, "a")
    assert loads(heap) == {"a": (0.0, 0)}


def test_a_backend_added_again_counts_its_new_rollouts_only(heap):
    put(heap, "a")
    for n in range(5):
        heap.acquire(f"old{n}")
    heap.remove("a")
    put(heap, "a")
    for n in range(3):
        heap.acquire(f"new{n}")
    assert [heap.release(f"old{n}") for n in range(5)] == [False] * 5
    assert loads(heap) == {"a": (3.0, 3)}


def test_a_rollout_of_a_removed_backend_goes_on_elsewhere(heap):
    put(heap, "a")
    heap.acquire("x", tokens=5)
    put(heap, "b")
    heap.remove("a")
    placed = heap.extend("x", 6)
    assert home(placed) == "b" and placed.why == "failover" and loads(heap) == {"b": (6.0, 1)}


def test_a_description_put_again_keeps_load_and_drain_and_forgets_the_error(heap):
    put(heap, "a", policy_version="v1")
    heap.acquire("x", tokens=5)
    heap.drain("a")
    heap.fail("a", "away", by="health")
    heap.put_stats("a", BackendStats(at=1.0, running=2, prompt_tokens=10, cached_tokens=5))
    put(heap, "a", policy_version="v2", capacity_tokens=7)
    backend = heap.get("a")
    assert (backend.load, backend.live_rollouts, backend.draining, backend.healthy) == (5.0, 1, True, True)
    assert (backend.policy_version, backend.capacity_tokens, backend.stats.cached_ratio) == ("v2", 7, 0.5)


def test_calls_that_share_a_round_trip_survive_a_redis_that_forgot_the_script(heap, client):
    put(heap, "a")
    client.script_flush()
    replies = heap.many([BackendStore.acquire(heap, f"r{n}") for n in range(3)])
    assert [reply["word"] for reply in replies] == ["ok"] * 3 and loads(heap) == {"a": (3.0, 3)}


# -- against a model ---------------------------------------------------------------------------


class HeapMachine(RuleBasedStateMachine):
    """Random operations; after each the counters must be what a plain Python model says."""

    server: RedisServer
    names = st.sampled_from([f"b{n}" for n in range(4)])
    ids = st.sampled_from([f"r{n}" for n in range(12)])
    sizes = st.integers(1, 400)

    def __init__(self):
        super().__init__()
        client = connect(self.server.url)
        client.flushall()
        self.heap = Heap(client)
        self.pins: dict[str, tuple[str, int]] = {}
        self.known: set[str] = set()
        self.closed: set[str] = set()

    @rule(name=names, capacity=st.sampled_from([None, 1000]))
    def put(self, name, capacity):
        put(self.heap, name, capacity_tokens=capacity)
        self.known.add(name)
        self.closed.discard(name)

    @rule(name=names)
    def remove(self, name):
        assert self.heap.remove(name) == (name in self.known)
        self.known.discard(name)
        self.closed.discard(name)
        self.pins = {r: (b, w) for r, (b, w) in self.pins.items() if b != name}

    @rule(name=names)
    def fail(self, name):
        if self.heap.fail(name, "x", by="health"):
            self.closed.add(name)

    @rule(name=names)
    def recover(self, name):
        self.heap.recover(name, by="health")
        self.closed.discard(name)

    @rule(rollout=ids, tokens=sizes, group=st.sampled_from([None, "g", "h"]))
    def acquire(self, rollout, tokens, group):
        placed = self.heap.acquire(rollout, tokens=tokens, group=group)
        pinned = self.pins.get(rollout)
        if pinned and pinned[0] not in self.closed:
            assert home(placed) == pinned[0]
            return
        self.pins.pop(rollout, None)
        if placed.word == "ok":
            assert placed.backend.id in self.known - self.closed
            self.pins[rollout] = (placed.backend.id, tokens)
        else:
            assert placed.word == ("full" if self.known - self.closed else "none")
            assert not self.heap.release(rollout), "it waits no more, and has nothing"

    @rule(rollout=ids, tokens=sizes, exclude=st.one_of(st.none(), names))
    def extend(self, rollout, tokens, exclude):
        placed = self.heap.extend(rollout, tokens, exclude=(exclude,) if exclude else ())
        usable = self.known - self.closed - {exclude}
        pinned = self.pins.get(rollout)
        if not usable:
            assert placed.word == "none"
            return
        if pinned and pinned[0] in usable and not placed.moved:
            assert home(placed) == pinned[0]
        assert home(placed) in usable
        self.pins[rollout] = (placed.backend.id, tokens)

    @precondition(lambda self: self.pins)
    @rule(rollout=ids)
    def release(self, rollout):
        assert self.heap.release(rollout) == (rollout in self.pins)
        self.pins.pop(rollout, None)

    @invariant()
    def counters_are_exact(self):
        expected = dict.fromkeys(self.known, (0.0, 0))
        for name, weight in self.pins.values():
            load, live = expected[name]
            expected[name] = (load + weight, live + 1)
        assert loads(self.heap) == expected
        members = [int(home.split()[1]) for home in self.heap._redis.hvals(keys.BACKEND_GROUPS)]
        assert sum(members) <= len(self.pins)


def test_counters_stay_exact_under_any_sequence_of_operations(server):
    HeapMachine.server = server
    case = HeapMachine.TestCase
    case.settings = settings(
        max_examples=40,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()
