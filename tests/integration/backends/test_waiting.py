"""Room is granted in one fair order: nobody starves, no backend is over-committed, counters are exact."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.schema import Backend
from services.state import keys
from services.state.backends.store import BackendStore, placed
from services.state.backends.waits import Waits, waits
from services.state.redis import connect
from tests.helpers.heap import Heap, backend, home, put
from tests.helpers.room_world import World, set_clock
from tests.integration.backends.test_keeping import running

CAPACITY = 200
ADMITTED = 150


@pytest.fixture
def world(client):
    with set_clock():
        yield World(client, seed=1)


def reserved_by_pins(client):
    """What the pins say of each tenant and backend."""
    tenants, backends = {}, {}
    for pin in client.hvals(keys.BACKEND_PINS):
        name, tokens, label = pin.split(" ")
        tenant = label.split(";")[2] if ";" in label else "default"
        tenants[tenant] = tenants.get(tenant, 0) + int(tokens)
        backends.setdefault(name, []).append(int(tokens))
    return tenants, backends


SIZES = st.integers(1, 100)
ASKS = st.lists(st.tuples(st.sampled_from("abc"), SIZES, st.integers(0, 9)), min_size=1, max_size=40)


@given(
    asks=ASKS,
    weights=st.tuples(*[st.sampled_from([0.5, 1, 2, 4])] * 3),
    fleet=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_whoever_waits_is_placed_in_time_and_no_backend_is_over_committed(server, asks, weights, fleet, data):
    with set_clock():
        world = World(connect(server.url), seed=1)
        for name, weight in zip("abc", weights, strict=True):
            world.tenant(name, weight)
        world.add(*(f"b{n}" for n in range(fleet)), capacity=CAPACITY)
        for tenant, tokens, priority in asks:
            world.ask(tenant, tokens, priority=priority)
            if world.running and data.draw(st.integers(0, 3)) == 0:
                world.crash(data.draw(st.sampled_from(sorted({*world.running, *world.waiting}))))
        passed = 0
        while world.waiting:
            before = len(world.waiting)
            tenants, backends = reserved_by_pins(world.client)
            assert {
                k: int(v) for k, v in world.client.hgetall(keys.backends_reserved("")).items() if v != "0"
            } == tenants
            for tokens in backends.values():
                assert sum(tokens) <= ADMITTED or len(tokens) == 1
            scores = dict(world.client.zrange(keys.backends_load(""), 0, -1, withscores=True))
            assert {name: sum(tokens) for name, tokens in backends.items()} == {
                k: v for k, v in scores.items() if v
            }
            if world.running:
                world.end(data.draw(st.sampled_from(sorted(world.running))))
            else:
                # Only those of dead workers hold anything.
                world.store.reconcile()
            world.granted()
            passed = passed + 1 if len(world.waiting) == before else 0
            # Each that ends makes room; a giant needs the end of those on one backend.
            assert passed <= 2 * len(asks), f"{world.waiting} wait for ever"


def test_small_ones_pass_a_giant_for_as_much_as_it_asks_for_and_it_is_placed_after_one_drain(world):
    world.add("a", "b", capacity=CAPACITY)
    for _ in range(30):
        world.ask("t", 10)
    giant = world.ask("t", 140)
    for _ in range(60):
        world.ask("t", 10)
    passed, kept = 0, None
    for ended in range(60):  # noqa: B007
        world.end(next(iter(world.running)))
        granted = world.granted()
        kept = kept or (world.client.get(keys.backends_line("")) or "-").partition(" ")[0].strip("-")
        passed += 0 if kept else sum(asked.tokens for asked in granted)
        if giant in granted:
            break
    assert giant.id in world.running and kept
    assert passed <= 140, "as much as it asks for"
    assert ended < 14 + 2 * 15, "and the end of those on one backend of two"


def test_no_rollout_enters_a_backend_that_is_kept_and_it_is_let_go_when_the_giant_leaves(world):
    world.add("a", capacity=CAPACITY)
    held = [world.ask("t", 10) for _ in range(15)]
    giant = world.ask("t", 140)
    for _ in range(40):
        world.ask("t", 10)
    for rollout in held[:14]:
        world.end(rollout.id)
    assert len(world.granted()) == 14, "as much as the giant asks for"
    world.end(held[14].id)
    assert world.granted() == [] and world.client.hget(keys.backend("a"), "kept") == giant.id
    world.end(giant.id)
    assert world.client.hget(keys.backend("a"), "kept") is None and world.granted()


def test_the_tenant_that_has_least_by_its_weight_is_next_and_within_one_the_rank(world):
    world.tenant("heavy", 2)
    world.add("a", capacity=CAPACITY)
    first = world.ask("x", 150)
    lines = [world.ask(tenant, 10) for tenant in ("light", "light", "light", "heavy", "heavy", "heavy")]
    urgent = world.ask("heavy", 10, priority=1)
    heap = world.store
    heap.put(Backend(id="b", url="http://b", model="m", tokenizer="t", max_model_len=9, capacity_tokens=40))
    granted = {asked.id for asked in world.granted()}
    assert granted == {lines[0].id, urgent.id, lines[3].id}, "30 of 40: one for weight 1, two for weight 2"
    assert first.id in world.running


def test_whoever_was_cancelled_or_lost_gets_nothing(world):
    world.add("a", capacity=CAPACITY)
    held = world.ask("t", 150)
    lost, cancelled, third = (world.ask("t", 100) for _ in range(3))
    world.crash(lost.id)
    world.end(cancelled.id)
    world.end(held.id)
    assert [asked.id for asked in world.granted()] == [third.id]
    assert world.client.hkeys(keys.BACKEND_ASKS) == []


def test_waits_are_told_by_policy_and_tenant(world):
    world.add("a", capacity=CAPACITY)
    held = world.ask("t", 150)
    world.ask("u", 10)
    world._move(3.0)
    assert waits(world.client)["default", "u"].waiting == 1
    world.end(held.id)
    assert waits(world.client) == {("default", "u"): Waits(seconds=3.0, ended=1)}


# -- policies ----------------------------------------------------------------------------------


def adapters(name, **fields):
    return backend(name, policies={"default": "base", "judge": "lora"}, **fields)


def test_each_policy_has_its_heap_and_a_backend_of_several_the_same_load_in_each(client):
    heap = Heap(client)
    put(heap, "alone")
    heap.put(adapters("both"))
    assert home(heap.acquire("j", policy="judge", tokens=7)) == "both"
    assert heap.acquire("x", policy="nobody").why == ""
    assert (
        client.zscore(keys.backends_load(""), "both")
        == client.zscore(keys.backends_load("/judge"), "both")
        == 7
    )
    assert home(heap.acquire("d", tokens=5)) == "alone"
    assert [each.id for each in heap.list()] == ["alone", "both"] and [
        each.id for each in heap.list("judge")
    ] == ["both"]
    heap.extend("j", 9, policy="judge")
    heap.release("j")
    assert client.zscore(keys.backends_load(""), "both") == 0


def test_versions_and_rejections_are_the_policy_s(client):
    heap = Heap(client)
    heap.put(adapters("both"))
    heap.set_version("both", "v3", "judge")
    heap.want_version("v3", "judge")
    placement = heap.acquire("j", policy="judge")
    assert (placement.backend.model, placement.backend.policy, placement.backend.policy_version) == (
        "lora",
        "judge",
        "v3",
    )
    assert heap.wanted_version() is None and heap.wanted_version("judge") == "v3"
    channel = client.pubsub(ignore_subscribe_messages=True)
    channel.subscribe(keys.BACKEND_DOWN_CHANNEL)
    heap.fail("both", "canary", policy="judge")
    messages = [channel.get_message(timeout=5) for _ in range(2)]
    assert [message["data"] for message in messages if message] == ["both judge"]
    assert heap.acquire("k", policy="judge").word == "none" and heap.acquire("d").word == "ok"
    assert heap.get("both").healthy and not heap.get("both", "judge").healthy
    heap.recover("both", policy="judge")
    assert heap.acquire("k", policy="judge").word == "ok"


def test_a_slot_is_a_reservation_beside_the_rollout_s_own_and_ends_with_it(client, rollouts):
    heap = Heap(client)
    heap.put(adapters("both"))
    rollout_id, claim = running(rollouts)
    heap.acquire(rollout_id, tokens=10, fence=claim.fence)
    heap.acquire(rollout_id, tokens=5, fence=claim.fence, policy="judge", slot="judge")
    assert heap.get("both").load == 15
    assert heap.release(rollout_id) and heap.get("both").load == 5
    client.hset(keys.record(rollout_id), "state", "evaluating")
    assert heap.reconcile().reclaimed == 0
    assert placed(
        *heap.many(
            [BackendStore.extend(heap, rollout_id, 6, policy="judge", slot="judge", fence=claim.fence)]
        )
    )
    client.hdel(keys.record(rollout_id), "owner")
    assert heap.reconcile().reclaimed == 1 and heap.get("both").load == 0
