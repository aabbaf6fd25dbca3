"""Placement of rollouts on LLM backends: the heap in a real Redis, without workers."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.schema import Backend, BackendStats, RolloutRequest, Stage
from services.dispatch import _expand
from services.settings import Settings
from services.state import keys
from services.state.backends import BackendStore, PlacementPolicy
from services.state.redis import connect
from services.state.rollouts import Finish, RolloutStore
from tests.helpers.stack import RedisServer


@pytest.fixture
def client(server):
    client = connect(server.url)
    client.flushall()
    return client


@pytest.fixture
def heap(client):
    return BackendStore(client)


@pytest.fixture
def rollouts(client, server):
    return RolloutStore(client, Settings(redis_url=server.url, lease_s=30))


def backend(name, **fields):
    return Backend(id=name, url=f"http://{name}", model="m", tokenizer="t", max_model_len=100, **fields)


def put(heap, *names, **fields):
    for name in names:
        heap.put(backend(name, **fields))


def home(placed):
    assert placed.word == "ok", placed
    return placed.backend.id


def loads(heap):
    return {one.id: (one.load, one.live_rollouts) for one in heap.list()}


def running(rollouts, **fields):
    """A rollout that a RUN worker has just claimed: its id and fence."""
    (new,) = _expand(RolloutRequest(handler="noop", **fields))
    rollouts.submit([new])
    claim = rollouts.claim(new.id, 1, Stage.INIT, "w")
    rollouts.finish(claim, Finish("ready"))
    claim = rollouts.claim(new.id, 1, Stage.RUN, "w")
    return new.id, claim


# -- spreading ---------------------------------------------------------------------------------


def test_rollouts_spread_evenly_and_stay_where_they_are(heap):
    put(heap, "a", "b", "c")
    with ThreadPoolExecutor(16) as pool:
        chosen = list(pool.map(lambda n: home(heap.acquire(f"r{n}")), range(99)))
    assert sorted(chosen.count(name) for name in "abc") == [33, 33, 33]
    assert [home(heap.acquire(f"r{n}")) for n in range(99)] == chosen, "the pin holds"
    assert loads(heap) == dict.fromkeys("abc", (33.0, 33))
    with ThreadPoolExecutor(16) as pool:
        released = list(pool.map(lambda n: heap.release(f"r{n % 99}"), range(198)))
    assert released.count(True) == 99, "a release is idempotent"
    assert loads(heap) == dict.fromkeys("abc", (0.0, 0))


def test_the_score_is_the_reserved_context_and_the_least_loaded_backend_is_chosen(heap):
    put(heap, "a", "b")
    first = home(heap.acquire("long", tokens=5000))
    other = {"a": "b", "b": "a"}[first]
    assert [home(heap.acquire(f"short{n}", tokens=1000)) for n in range(5)] == [other] * 5
    heap.extend("short0", 4000)
    assert loads(heap) == {first: (5000.0, 1), other: (8000.0, 5)}
    assert home(heap.acquire("next", tokens=10)) == first


def test_rollouts_can_be_counted_instead_of_their_tokens(client):
    heap = BackendStore(client, PlacementPolicy(weigh="rollouts"))
    put(heap, "a", "b", capacity_tokens=10)
    chosen = [home(heap.acquire(f"r{n}", tokens=random.randrange(1, 10**6))) for n in range(10)]
    heap.extend("r0", 10**6)
    assert chosen.count("a") == 5 and loads(heap) == {"a": (5.0, 5), "b": (5.0, 5)}


@pytest.mark.parametrize("count", [3, 40])
def test_among_equals_the_least_recently_chosen_is_taken(heap, count):
    put(heap, *(f"b{n:02}" for n in range(count)))
    for _ in range(3):
        chosen = []
        for n in range(count):
            chosen.append(home(heap.acquire(f"r{n}")))
            heap.release(f"r{n}")
        assert len(set(chosen)) == count, "each once, though all were idle every time"


def test_group_mates_share_a_backend_until_it_is_loaded(client):
    heap = BackendStore(client, PlacementPolicy(group_slack=3.0))
    put(heap, "a", "b")
    chosen = [home(heap.acquire(f"r{n}", tokens=100, group="g")) for n in range(8)]
    assert chosen[:4] == [chosen[0]] * 4, "while it is at most three such rollouts above the other"
    assert chosen[4:] == [{"a": "b", "b": "a"}[chosen[0]]] * 4, "then the next ones share another"


# -- who may take a rollout --------------------------------------------------------------------


def test_draining_excluded_and_unfit_backends_are_passed_over(heap):
    put(heap, "a", policy_version="v1")
    put(heap, "b", policy_version="v2")
    assert home(heap.acquire("x", policy_version="v2")) == "b"
    refused = heap.acquire("y", policy_version="v3")
    assert (refused.word, refused.why) == ("none", "2 version")
    assert home(heap.acquire("x", exclude=("b",))) == "a", "a failed home is left"
    assert heap.drain("a")
    assert home(heap.acquire("x")) == "a", "draining takes no new rollouts and keeps its own"
    assert home(heap.acquire("z")) == "b"
    assert heap.drain("a", False) and home(heap.acquire("zz")) == "a"
    assert not heap.drain("nobody")


def test_only_backends_with_the_wanted_weights_take_new_rollouts(heap):
    put(heap, "old", policy_version="step-1")
    put(heap, "new", policy_version="step-2")
    heap.acquire("under way", policy_version="step-1")
    heap.want_version("step-2")
    assert [home(heap.acquire(f"r{n}")) for n in range(3)] == ["new"] * 3
    assert home(heap.extend("under way", 5)) == "old", "a rollout under way goes on"
    assert home(heap.extend("under way", 5, exclude=("old",))) == "new"
    heap.set_version("old", "step-2")
    assert home(heap.acquire("r3")) == "old"
    heap.want_version(None)
    assert heap.wanted_version() is None


def test_paused_and_failed_backends_take_no_new_rollouts(heap):
    put(heap, "a", "b")
    for n in range(2):
        heap.acquire(f"r{n}")
    heap.pause("a")
    assert home(heap.acquire("new")) == "b"
    assert home(heap.extend(next(n for n in ("r0", "r1") if home(heap.acquire(n)) == "a"), 5)) == "a"
    heap.fail("b", "no answer", by="health")
    refused = heap.acquire("other")
    assert (refused.word, refused.why) == ("none", "1 paused, 1 unhealthy")
    heap.resume("a")
    assert home(heap.extend("new", 5)) == "a", "rollouts leave an unhealthy backend"
    (failed,) = [one for one in heap.list() if not one.healthy]
    assert (failed.id, failed.error) == ("b", "no answer")


def test_a_health_probe_does_not_undo_the_verdict_of_a_weight_update(heap):
    put(heap, "a")
    heap.fail("a", "canary off by 4.7", by="weights")
    heap.fail("a", "no answer", by="health")
    heap.recover("a", by="health")
    assert heap.acquire("x").word == "none" and heap.get("a").error == "canary off by 4.7"
    heap.recover("a", by="weights")
    assert home(heap.acquire("x")) == "a"


def test_without_another_backend_the_reservation_stays_and_the_answer_says_so(heap):
    put(heap, "only")
    heap.acquire("x", tokens=7)
    placed = heap.extend("x", 9, exclude=("only",))
    assert (placed.word, placed.backend, placed.why) == ("none", None, "")
    assert home(heap.extend("x", 9)) == "only" and loads(heap) == {"only": (9.0, 1)}


# -- capacity ----------------------------------------------------------------------------------


def test_new_rollouts_wait_while_the_reservations_fill_the_caches(client):
    heap = BackendStore(client, PlacementPolicy(admit=1.0))
    put(heap, "a", "b", capacity_tokens=1000)
    for n in range(4):
        assert heap.acquire(f"r{n}", tokens=500).word == "ok"
    channel = client.pubsub(ignore_subscribe_messages=True)
    channel.subscribe(keys.BACKEND_ROOM_CHANNEL)
    assert channel.get_message(timeout=1) is None
    refused = heap.acquire("r4", tokens=500)
    assert (refused.word, refused.why) == ("full", "2 full")
    heap.release("r0")
    message = None
    for _ in range(50):
        message = message or channel.get_message(timeout=0.1)
    assert message["channel"] == keys.BACKEND_ROOM_CHANNEL, "those who wait are told"
    assert heap.acquire("r4", tokens=500).word == "ok"


def test_a_rollout_larger_than_any_cache_runs_on_an_empty_backend(heap):
    put(heap, "a", capacity_tokens=100)
    assert home(heap.acquire("huge", tokens=5000)) == "a"
    assert heap.acquire("small", tokens=1).word == "full"


def test_a_cap_on_rollouts_holds_whatever_they_weigh(heap):
    put(heap, "a", max_rollouts=3)
    assert [heap.acquire(f"r{n}").word for n in range(5)] == ["ok"] * 3 + ["full"] * 2


def test_a_rollout_moves_from_a_full_backend_to_one_with_room(client):
    heap = BackendStore(client, PlacementPolicy(admit=1.0))
    put(heap, "a", capacity_tokens=1000)
    for n in range(4):
        heap.acquire(f"r{n}", tokens=200)
    put(heap, "b", capacity_tokens=1000)
    assert not heap.extend("r0", 300).moved, "900 of 1000: it stays, for its prefix is cached there"
    moved = heap.extend("r0", 500)
    assert moved.moved and home(moved) == "b" and moved.why == "spill"
    assert loads(heap) == {"a": (600.0, 3), "b": (500.0, 1)}
    assert not heap.extend("r1", 900).moved, "no other has room for 900 tokens below 0.85 of its cache"
    assert heap.totals()["moved_spill"] == 1


def test_a_rollout_under_way_is_never_refused_for_want_of_room(heap):
    put(heap, "a", capacity_tokens=1000)
    for n in range(2):
        heap.acquire(f"r{n}", tokens=500)
    put(heap, "b", capacity_tokens=100)
    heap.acquire("other", tokens=100)
    assert home(heap.extend("r0", 5000, exclude=("a",))) == "b", "a backend failed: better full than none"


def test_a_new_backend_catches_up_without_taking_all_new_rollouts(heap):
    put(heap, "a", "b", "c")
    for n in range(30):
        heap.acquire(f"old{n}", tokens=100)
    put(heap, "new")
    chosen = [home(heap.acquire(f"r{n}", tokens=100)) for n in range(40)]
    until = next(n for n in range(40) if chosen[: n + 1].count("new") >= 10)
    assert chosen[: until + 1].count("new") / (until + 1) <= 0.6, "about every second one"
    share = loads(heap)["new"][1] / 70
    assert 0.2 <= share <= 0.3, "its fair share, a quarter"


# -- leases and repair -------------------------------------------------------------------------


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
        keys.BACKEND_LOAD, keys.BACKEND_PINS, keys.BACKEND_GROUPS, keys.BACKEND_CHOSEN, keys.backend("a")
    )
    assert heap.reconcile().restored == 6
    assert loads(heap) == before and list(client.hgetall(keys.BACKEND_GROUPS)) == list(groups)
    again = heap.reconcile()
    assert (again.reclaimed, again.restored, again.corrected) == (0, 0, 0)


def test_reservations_of_nobody_are_reclaimed(heap, client):
    put(heap, "a")
    heap.acquire("ghost", tokens=10)
    client.zincrby(keys.BACKEND_LOAD, 5, "a")
    found = heap.reconcile()
    assert (found.reclaimed, found.corrected) == (1, 1)
    assert loads(heap) == {"a": (0.0, 0)}


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
    one = heap.get("a")
    assert (one.load, one.live_rollouts, one.draining, one.healthy) == (5.0, 1, True, True)
    assert (one.policy_version, one.capacity_tokens, one.stats.cached_ratio) == ("v2", 7, 0.5)


def test_calls_that_share_a_round_trip_survive_a_redis_that_forgot_the_script(heap, client):
    put(heap, "a")
    client.script_flush()
    replies = heap.many([heap.acquire_args(f"r{n}") for n in range(3)])
    assert [reply[0] for reply in replies] == ["ok"] * 3 and loads(heap) == {"a": (3.0, 3)}


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
        self.heap = BackendStore(client)
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
