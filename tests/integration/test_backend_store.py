"""Placement of rollouts on LLM backends: the heap in a real Redis, without workers."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.schema import Backend, BackendStats, RolloutRequest, Stage
from services.dispatch import _expand
from services.settings import Settings
from services.state import keys
from services.state.backends.store import BackendStore, PlacementPolicy
from services.state.redis import connect
from services.state.rollouts.store import Finish, RolloutStore
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


def test_a_rollout_under_way_goes_on_with_other_weights_where_there_are_no_others(heap):
    put(heap, "old", policy_version="step-1")
    heap.acquire("under way", tokens=3, policy_version="step-1")
    put(heap, "new", policy_version="step-2")
    for wanted in (None, "step-1"):
        heap.want_version(wanted)
        placed = heap.extend("under way", 3, policy_version=wanted and "step-1", exclude=("old",))
        assert (home(placed), placed.why) == ("new", "failover")
        assert home(heap.extend("under way", 3, exclude=("new",))) == "old"
    heap.fail("old", "away", by="health")
    assert heap.acquire("begins", policy_version="step-1").word == "none", "one that starts waits for them"


def test_all_that_are_excluded_are_passed_over_and_no_namesake(heap):
    put(heap, "b", "b1", "b10")
    assert home(heap.acquire("x", exclude=("b", "b1"))) == "b10"
    assert home(heap.extend("x", 1, exclude=("b1", "b10"))) == "b"
    assert heap.acquire("y", exclude=("b", "b1", "b10")).word == "none"


def test_a_failed_backend_is_told_of_and_says_whether_it_answers(heap, client):
    put(heap, "a", "b")
    channel = client.pubsub(ignore_subscribe_messages=True)
    channel.subscribe(keys.BACKEND_DOWN_CHANNEL)
    assert not heap.fail("nobody", "x")
    assert heap.fail("a", "canary failed", by="weights") and heap.fail("b", "no answer", by="health")
    assert [message["data"] for message in messages(channel, 2)] == ["a", "b"]
    told = {name: (one.healthy, one.reachable) for name in "ab" if (one := heap.get(name))}
    assert told == {"a": (False, True), "b": (False, False)}


def test_suspects_are_told_once_with_how_often(heap):
    for name in ("a", "b", "a"):
        heap.suspect(name)
    assert heap.take_suspects() == {"a": 2, "b": 1}
    assert heap.take_suspects() == {}


def test_versions_are_known_that_an_update_brought(heap, client):
    client.zadd(keys.POLICY_SEQUENCE, {"v1": 1})
    assert [heap.knows_version(one) for one in ("v1", "v2", None)] == [True, False, False]


def test_an_address_has_one_id_with_and_without_its_slash():
    ids = {BackendStore.id_of(url) for url in ("http://x:1", "http://x:1/")}
    assert len(ids) == 1 and BackendStore.id_of("http://x:2") not in ids


# -- capacity ----------------------------------------------------------------------------------


def messages(channel, count):
    """So many messages of a channel, and those that come at once behind them."""
    found, deadline = [], time.monotonic() + 30
    while time.monotonic() < deadline:
        message = channel.get_message(timeout=0.05)
        if message is not None:
            found.append(message)
        elif len(found) >= count and channel.subscribed:
            break
    return found


def test_new_rollouts_wait_while_the_reservations_fill_the_caches(client):
    heap = BackendStore(client, PlacementPolicy(admit=1.0))
    put(heap, "a", "b", capacity_tokens=1000)
    for n in range(4):
        assert heap.acquire(f"r{n}", tokens=500).word == "ok"
    refused = heap.acquire("r4", tokens=500)
    assert (refused.word, refused.why) == ("full", "2 full")
    heap.release("r0")
    assert heap.acquire("r4", tokens=500).word == "ok"


def test_the_defaults_leave_a_quarter_of_a_cache_for_what_live_rollouts_grow_by(heap):
    put(heap, "a", capacity_tokens=1000)
    assert [heap.acquire(f"r{n}", tokens=250).word for n in range(4)] == ["ok", "ok", "ok", "full"]
    assert home(heap.extend("r0", 500)) == "a"


ROOM = {
    "one ends": lambda heap: heap.release("r0"),
    "one moves away": lambda heap: heap.extend("r1", 900),
    "a backend comes": lambda heap: put(heap, "c", capacity_tokens=1000),
    "one is taken out of its pause": lambda heap: heap.resume("b"),
    "one recovers": lambda heap: heap.recover("b"),
    "one has other weights": lambda heap: heap.set_version("b", "v2"),
}


@pytest.mark.parametrize("event", ROOM)
def test_those_who_wait_are_told_of_room_and_nobody_else_is(client, event):
    heap = BackendStore(client, PlacementPolicy(admit=1.0, spill_to=2.0, spill_gap=0))
    put(heap, "a", capacity_tokens=1000)
    for n in range(2):
        heap.acquire(f"r{n}", tokens=500)
    put(heap, "b", capacity_tokens=1000)
    channel = client.pubsub(ignore_subscribe_messages=True)
    channel.subscribe(keys.BACKEND_ROOM_CHANNEL)
    ROOM["one has other weights"](heap)
    assert messages(channel, 0) == [], "nobody waits"
    assert heap.acquire("r2", tokens=2000, exclude=("b",)).word == "full"
    assert 0 < client.pttl("backends:waited") <= 5000, "who has given up is forgotten"
    ROOM[event](heap)
    assert [message["channel"] for message in messages(channel, 1)] == [keys.BACKEND_ROOM_CHANNEL]


def test_nothing_is_reserved_as_one_token(heap):
    put(heap, "a")
    heap.acquire("x", tokens=0)
    assert loads(heap) == {"a": (1.0, 1)}


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


@pytest.mark.parametrize(
    ("fewer", "paused", "moves"), [(2, False, False), (3, False, True), (3, True, False)]
)
def test_a_rollout_leaves_a_full_backend_for_one_with_more_than_the_gap_of_rollouts_fewer(
    client, fewer, paused, moves
):
    heap = BackendStore(client, PlacementPolicy(spill_at=1.0, spill_to=0.85, spill_gap=2))
    put(heap, "a", capacity_tokens=1000)
    for n in range(4):
        heap.acquire(f"r{n}", tokens=100)
    put(heap, "b", capacity_tokens=1000)
    for n in range(4 - fewer):
        heap.acquire(f"other{n}", tokens=1, exclude=("a",))
    if paused:
        heap.pause("a")
    assert heap.extend("r0", 800).moved == moves


def test_a_rollout_under_way_is_never_refused_for_want_of_room(heap):
    put(heap, "a", capacity_tokens=1000)
    for n in range(2):
        heap.acquire(f"r{n}", tokens=500)
    put(heap, "b", capacity_tokens=100)
    heap.acquire("other", tokens=100)
    assert home(heap.extend("r0", 5000, exclude=("a",))) == "b", "a backend failed: better full than none"


@pytest.mark.parametrize("way", ["new", "drained", "failed"])
def test_a_backend_that_comes_catches_up_without_taking_all_new_rollouts(heap, way):
    put(heap, "a", "b", "c")
    if way != "new":
        put(heap, "back")
        if way == "drained":
            heap.drain("back")
        else:
            heap.fail("back", "away", by="health")
    for n in range(30):
        heap.acquire(f"old{n}", tokens=100)
    if way == "new":
        put(heap, "back")
    elif way == "drained":
        heap.drain("back", False)
    else:
        heap.recover("back", by="health")
    chosen = [home(heap.acquire(f"r{n}", tokens=100)) for n in range(40)]
    until = next(n for n in range(40) if chosen[: n + 1].count("back") >= 10)
    assert chosen[: until + 1].count("back") / (until + 1) <= 0.6, "about every second one"
    share = loads(heap)["back"][1] / 70
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


def test_reservations_of_nobody_are_reclaimed(heap, rollouts, client):
    put(heap, "a")
    heap.acquire("ghost", tokens=10)
    left, claim = running(rollouts)
    heap.acquire(left, tokens=10, fence=claim.fence)
    client.hdel(keys.record(left), "owner")
    client.zincrby(keys.BACKEND_LOAD, 5, "a")
    found = heap.reconcile()
    assert (found.reclaimed, found.corrected) == (2, 1)
    assert loads(heap) == {"a": (0.0, 0)}


@pytest.mark.parametrize(("load", "live"), [(0, 0), (5, 0), (0, 3), (0, -1)])
def test_each_counter_that_is_wrong_is_corrected(heap, rollouts, client, load, live):
    put(heap, "a", "b")
    rollout_id, claim = running(rollouts)
    chosen = home(heap.acquire(rollout_id, tokens=10, fence=claim.fence))
    client.zincrby(keys.BACKEND_LOAD, load, chosen)
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
    other = {"a": "b", "b": "a"}[chosen]
    client.hset(keys.BACKEND_GROUPS, "g", f"{other} 7")
    heap.reconcile()
    assert client.hgetall(keys.BACKEND_GROUPS) == {"g": f"{other} 3"}
    for left, (rollout_id, _) in zip((2, 1, 0), held, strict=True):
        heap.release(rollout_id)
        assert client.hgetall(keys.BACKEND_GROUPS) == ({"g": f"{other} {left}"} if left else {})


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
