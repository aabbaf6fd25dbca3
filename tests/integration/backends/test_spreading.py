"""Which backend takes a rollout: load, groups, weights, pauses and capacity; a real Redis, no workers."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.state import keys
from services.state.backends.store import BackendStore, PlacementPolicy
from services.state.scripts import commands
from tests.helpers.heap import Heap, home, loads, put

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
    second = {"a": "b", "b": "a"}[first]
    assert [home(heap.acquire(f"short{n}", tokens=1000)) for n in range(5)] == [second] * 5
    heap.extend("short0", 4000)
    assert loads(heap) == {first: (5000.0, 1), second: (8000.0, 5)}
    assert home(heap.acquire("next", tokens=10)) == first


def test_rollouts_can_be_counted_instead_of_their_tokens(client):
    heap = Heap(client, PlacementPolicy(weigh="rollouts"))
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
    heap = Heap(client, PlacementPolicy(group_slack=3.0))
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
    (failed,) = [backend for backend in heap.list() if not backend.healthy]
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
    for version in (None, "step-1"):
        heap.want_version(version)
        placed = heap.extend("under way", 3, policy_version=version and "step-1", exclude=("old",))
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
    states = {name: (backend.healthy, backend.reachable) for name in "ab" if (backend := heap.get(name))}
    assert states == {"a": (False, True), "b": (False, False)}


def test_suspects_are_told_once_with_how_often(heap):
    for name in ("a", "b", "a"):
        heap.suspect(name)
    assert heap.take_suspects() == {"a": 2, "b": 1}
    assert heap.take_suspects() == {}


def test_versions_are_known_that_an_update_brought(heap, client):
    client.zadd(keys.policy_sequence(""), {"v1": 1})
    assert [heap.knows_version(version) for version in ("v1", "v2", None)] == [True, False, False]


def test_an_address_has_one_id_with_and_without_its_slash():
    ids = {BackendStore.id_of(url) for url in ("http://x:1", "http://x:1/")}
    assert len(ids) == 1 and BackendStore.id_of("http://x:2") not in ids


# -- capacity ----------------------------------------------------------------------------------


def messages(channel, count):
    """So many messages of a channel, and those that come at once behind them."""
    received, deadline = [], time.monotonic() + 120
    while time.monotonic() < deadline:
        message = channel.get_message(timeout=0.05)
        if message is not None:
            received.append(message)
        elif len(received) >= count and channel.subscribed:
            break
    return received


def test_new_rollouts_wait_while_the_reservations_fill_the_caches(client):
    heap = Heap(client, PlacementPolicy(admit=1.0))
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
    heap = Heap(client, PlacementPolicy(admit=1.0, spill_to=2.0, spill_gap=0))
    put(heap, "a", capacity_tokens=1000)
    for n in range(2):
        heap.acquire(f"r{n}", tokens=500)
    put(heap, "b", capacity_tokens=1000)
    channel = client.pubsub(ignore_subscribe_messages=True)
    channel.subscribe(keys.BACKEND_ROOM_CHANNEL)
    ROOM["one has other weights"](heap)
    assert messages(channel, 0) == [], "nobody waits"
    with client.pipeline() as at_once:
        for command in commands([BackendStore.acquire(heap, "r2", tokens=2000, policy_version="v9")]):
            at_once.execute_command(*command)
        refused, left, _ = at_once.pttl("backends:waited").persist("backends:waited").execute()
    assert json.loads(refused)["word"] == "none"
    assert 0 < left <= 5000, "who has given up is forgotten"
    ROOM[event](heap)
    told = messages(channel, 1)
    assert {(message["channel"], message["data"]) for message in told} == {(keys.BACKEND_ROOM_CHANNEL, "")}


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
    heap = Heap(client, PlacementPolicy(admit=1.0))
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
    heap = Heap(client, PlacementPolicy(spill_at=1.0, spill_to=0.85, spill_gap=2))
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
