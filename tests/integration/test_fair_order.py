"""Whose rollout INIT takes next, and when it takes none: the Lua on a real Redis, without workers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.schema import RolloutRequest, Stage, State
from services.dispatch import _expand
from services.settings import Settings
from services.state import keys
from services.state.redis import connect
from services.state.rollouts.store import Claim, Finish, RolloutStore
from services.state.tenants import Tenant, TenantStore
from tests.helpers.stack import wait_until

NODE = "n1"


class World:
    """The stores on one Redis, and the shortest words for what the tests do."""

    def __init__(self, server, **settings_):
        self.redis = connect(server.url)
        self.redis.flushall()
        self.store = RolloutStore(self.redis, Settings(redis_url=server.url, lease_s=600, **settings_))
        self.tenants = TenantStore(self.redis)

    def weigh(self, **weights):
        for name, weight in weights.items():
            self.tenants.set(Tenant(name=name, weight=weight))

    def submit(self, tenant, count=1, **fields):
        """Rollouts of one call, a request each; their ids."""
        new = [rollout for _ in range(count) for rollout in _expand(RolloutRequest(handler="noop", **fields))]
        for k in range(0, len(new), 1000):
            self.store.submit(new[k : k + 1000], self.tenants.get(tenant))
        return [rollout.id for rollout in new]

    def ring(self, **more):
        return self.store.claim_next("w", node=NODE, **more)

    def served(self, count):
        """The tenants of the next claims."""
        return [self.ring().tenant for _ in range(count)]

    def order(self, count):
        """The ids of the next claims."""
        return [self.ring().rollout_id for _ in range(count)]

    def run(self, claim):
        """RUN takes what INIT made ready."""
        assert self.store.finish(claim, Finish(State.READY)) == State.READY
        return self.store.claim(claim.rollout_id, claim.attempt, Stage.RUN, "w")


@pytest.fixture
def world(server):
    return World(server)


# ------------------------------------------------------------------------------ between tenants


def test_tenants_that_flood_are_served_by_weight_at_every_moment(world):
    weights = {"a": 1, "b": 2, "c": 5}
    world.weigh(**weights)
    for tenant in weights:
        world.submit(tenant, 600)
    counts = Counter()
    for done, tenant in enumerate(world.served(800), 1):
        counts[tenant] += 1
        for name, weight in weights.items():
            assert abs(counts[name] - done * weight / 8) <= 2, (done, counts)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(
    weights=st.lists(st.sampled_from([0.1, 0.5, 1, 2, 5, 10]), min_size=2, max_size=5),
    begins=st.lists(st.integers(0, 30), min_size=5, max_size=5),
)
def test_whoever_waits_gets_its_share_from_the_moment_it_came(server, weights, begins):
    """Start-time fair queueing: between two that wait, the difference of service over weight is bounded."""
    world = World(server)
    names = [f"t{k}" for k in range(len(weights))]
    world.weigh(**dict(zip(names, weights, strict=True)))
    came = dict(zip(names, begins, strict=False))
    came[names[0]] = 0
    history = []
    for step in range(90):
        for name in names:
            if came[name] == step:
                world.submit(name, 100)
        history += world.served(1)
    for tenant, weight in zip(names, weights, strict=True):
        for rival, rival_weight in zip(names, weights, strict=True):
            both = history[max(came[tenant], came[rival]) :]
            apart = both.count(tenant) / weight - both.count(rival) / rival_weight
            assert apart <= 1 / weight + 1 / rival_weight + 1e-6, (tenant, rival, came, history)


def test_a_newcomer_is_served_at_once_and_has_saved_nothing_up(world):
    world.submit("busy", 400)
    world.served(100)
    world.submit("new", 300)
    assert "new" in world.served(2)
    assert abs(world.served(200).count("new") - 100) <= 2


def test_a_tenant_that_submits_one_by_one_gets_no_more_than_its_share(world):
    world.weigh(busy=4)
    world.submit("busy", 400)
    world.submit("single")
    history = []
    for _ in range(200):
        (tenant,) = world.served(1)
        history.append(tenant)
        if tenant == "single":
            world.submit("single")
    assert abs(history.count("single") - 40) <= 2


def test_another_weight_holds_from_the_next_claims_on(world):
    for tenant in ("a", "b"):
        world.submit(tenant, 400)
    assert world.served(100).count("a") in (49, 50, 51)
    world.weigh(a=9)
    assert abs(world.served(200).count("a") - 180) <= 2


# ------------------------------------------------------------------------------ within a tenant


def test_a_higher_priority_goes_first_but_only_within_its_tenant(world):
    low, high = world.submit("a", 3), world.submit("a", 2, priority=9)
    others = world.submit("b", 2)
    order = world.order(7)
    assert [id_ for id_ in order if id_ not in others] == high + low
    assert set(order[:2]) == {high[0], others[0]}, "b has its turn, whatever priority a gives"


def test_waiting_lifts_a_rollout_above_a_higher_priority(server):
    world = World(server, priority_step_s=0.05)
    (old,) = world.submit("a")
    rank = world.redis.zscore(keys.fair_waiting("a"), old)
    wait_until(lambda: world.redis.time()[0] * 1000 > rank + 1500, 120, "the time that nine steps are worth")
    newer = world.submit("a", 2, priority=9)
    (least,) = world.submit("a")
    assert world.order(4) == [old, *newer, least]


def test_members_of_a_group_are_neighbours_in_the_order_of_submission(world):
    new = [rollout for _ in range(20) for rollout in _expand(RolloutRequest(handler="noop", n=8))]
    world.store.submit(new)
    assert world.order(160) == [rollout.id for rollout in new]


def test_another_attempt_keeps_its_place_once_its_delay_is_over(world):
    first, *others = world.submit("a", 4)
    assert world.store.finish(world.ring(), Finish("again", delay_s=60)) == State.QUEUED
    assert world.order(2) == others[:2], "it waits for its delay"
    world.redis.zadd(keys.DUE, {first: 0})
    (item,) = world.store.overdue()
    assert (item.action, item.rollout_id, item.attempt) == ("send", first, 2)
    assert world.order(2) == [first, others[2]]


def test_what_a_worker_hands_back_or_loses_is_next_again(world):
    first, second, third = world.submit("a", 3)
    assert world.store.finish(world.ring(), Finish("handback")) == State.QUEUED
    assert world.order(1) == [first]
    world.redis.hset(keys.record(first), "lease", 0)
    world.redis.zadd(keys.DUE, {first: 0})
    assert [item.action for item in world.store.overdue()] == ["restart"]
    assert world.order(3) == [first, second, third]


# ------------------------------------------------------------------------------ bells


def test_a_bell_serves_whoever_is_next_and_then_nobody(world):
    ids = world.submit("a", 3)
    assert world.order(3) == ids
    assert world.ring() == "nobody"


def test_what_ends_while_it_waits_leaves_the_order(world):
    first, second, late, last = world.submit("a", 4)
    world.store.cancel(first)
    world.redis.hset(keys.record(second), "deadline", 1)
    world.redis.zadd(keys.DUE, {second: 1})
    assert [item.action for item in world.store.overdue()] == ["ended"]
    world.redis.hset(keys.record(late), "deadline", 1)
    assert world.ring().rollout_id == last, "the one past its deadline is left to the reaper"
    assert [item.rollout_id for item in world.store.overdue()] == [late]
    assert world.ring() == "nobody"
    assert world.redis.zcard(keys.FAIR_TENANTS) == 0


def test_a_claim_sent_twice_takes_one_rollout(world):
    ids = world.submit("a", 2)
    first, again = world.ring(token="t"), world.ring(token="t")
    assert (again.rollout_id, again.fence) == (first.rollout_id, first.fence) == (ids[0], 1)
    assert world.store.finish(first, Finish(State.CANCELLED)) == State.CANCELLED
    assert world.ring(token="t") == "stale"
    assert world.ring(token="other").rollout_id == ids[1]


def test_what_a_worker_of_an_older_release_claimed_is_passed_over(world):
    """It takes the rollout that the message names, and knows of no order that it should leave."""
    taken, waiting = world.submit("a", 2)
    world.redis.hset(keys.record(taken), mapping={"state": "initializing", "owner": "old"})
    assert world.ring().rollout_id == waiting
    assert world.ring() == "nobody"
    assert world.redis.keys("fair:waiting:*") == []


def test_a_bell_does_not_cut_the_delay_of_another_attempt_short(world):
    world.submit("a")
    world.store.finish(world.ring(), Finish("again", delay_s=60))
    assert world.ring() == "nobody"


# ------------------------------------------------------------------------------ ahead of RUN


def test_init_goes_no_further_ahead_of_run_than_the_bound_of_its_node(world):
    world.submit("a", 6)
    bound = {"most_on_node": 2}
    first, second = world.ring(**bound), world.ring(**bound)
    for claim in (first, second):
        world.store.note(claim.rollout_id, claim.fence, {"sandbox": "{}", "node": NODE})
    assert world.ring(**bound) == "full"
    assert world.store.finish(first, Finish(State.READY)) == State.READY
    assert world.ring(**bound) == "full", "ready, its sandbox still holds memory"
    elsewhere = world.store.claim_next("w", node="n2", **bound)
    assert isinstance(elsewhere, Claim), "another node has room"
    assert isinstance(world.store.claim(first.rollout_id, 1, Stage.RUN, "w"), Claim)
    assert isinstance(world.ring(**bound), Claim)
    assert world.store.ahead(NODE) == (2, 0)


def test_rollouts_without_a_sandbox_are_bounded_over_all_nodes(world):
    world.submit("a", 6)
    bound = {"most_on_node": 5, "most_without_sandbox": 2}
    first, second = world.ring(**bound), world.ring(**bound)
    for claim in (first, second):
        assert world.store.finish(claim, Finish(State.READY)) == State.READY
    assert world.store.ahead(NODE) == (0, 2)
    assert world.ring(**bound) == world.store.claim_next("w", node="n2", **bound) == "full"
    world.store.cancel(first.rollout_id)
    assert isinstance(world.ring(**bound), Claim)


@pytest.mark.parametrize("end", ["cancel", "again", "handback", "run", "lost", "deadline"])
def test_nothing_is_left_ahead_however_a_rollout_leaves(world, end):
    (only,) = world.submit("a")
    claim = world.ring()
    world.store.note(only, claim.fence, {"sandbox": "{}", "node": NODE})
    assert world.store.ahead(NODE) == (1, 0)
    if end == "run":
        world.redis.hdel(keys.record(only), "sandbox")
        world.run(claim)
    elif end == "cancel":
        world.store.finish(claim, Finish(State.READY))
        world.store.cancel(only)
    elif end in ("again", "handback"):
        world.store.finish(claim, Finish(end))
    else:
        world.redis.hset(keys.record(only), "lease" if end == "lost" else "deadline", 0)
        world.redis.hset(keys.record(only), "lease", 0)
        world.redis.zadd(keys.DUE, {only: 0})
        assert len(world.store.overdue()) == 1
    assert world.store.ahead(NODE) == (0, 0)
    assert world.redis.keys("ahead:*") == []
    assert world.redis.hget(keys.record(only), "ahead") is None


# ------------------------------------------------------------------------------ what it says


def test_usage_tells_of_each_tenant_what_lives_waits_and_was_claimed(world):
    world.weigh(a=2)
    world.submit("a", 3)
    world.submit("b", 2)
    assert Counter(world.served(3)) == {"a": 2, "b": 1}
    by_name = {row.tenant.name: (row.live, row.waiting, row.claimed) for row in world.tenants.usage()}
    assert by_name == {"a": (3, 1, 2), "b": (2, 1, 1)}
