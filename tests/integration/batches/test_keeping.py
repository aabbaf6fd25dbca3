"""One batch for one request, whoever dies; nothing of it is kept for ever; every group is accounted for."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.schema import Limits, RolloutRequest, State, new_id
from services.state.batches.store import BatchConflict, NoSuchBatch, Todo
from tests.helpers.batch_world import balanced

BATCH = new_id()
NOT_CHECKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def test_the_same_batch_twice_is_one_and_another_body_is_refused(world):
    body = {"id": "mine", "n": 2, "groups": 1, "prompts": 2}
    assert world.create(**body) == world.create(**body) == "mine"
    assert world.get("mine").started == 2
    with pytest.raises(BatchConflict):
        world.create(**{**body, "groups": 2})
    with pytest.raises(BatchConflict):
        world.create(**body, tenant="other")
    with pytest.raises(NoSuchBatch):
        world.batches.get("mine", "other")


def test_a_worker_that_dies_before_it_submits_leaves_the_group_to_another(world, monkeypatch):
    monkeypatch.setattr("services.state.batches.store.LEASE_S", 0.05)
    world.desk.dies = 1
    with pytest.raises(KeyboardInterrupt):
        world.create(id=BATCH, n=2, groups=2, prompts=2)
    assert world.get(BATCH).started == 2 and world.live() == []
    until(world, lambda: len(world.live()) == 4)
    assert world.live() == [f"{BATCH}.1.0", f"{BATCH}.1.1", f"{BATCH}.2.0", f"{BATCH}.2.1"]


def dying_with_half_a_group(world):
    """A batch whose second group lacks its first half: who was to submit that has died."""
    submit = world.desk.submit

    def dies(requests, tenant, *, batch_group, members):
        if batch_group == f"{BATCH}.2" and members.start == 0:
            world.desk.submit = submit
            raise KeyboardInterrupt
        submit(requests, tenant, batch_group=batch_group, members=members)

    world.desk.submit = dies
    with pytest.raises(KeyboardInterrupt):
        world.create(id=BATCH, n=4, groups=2, prompts=2, max_in_flight=6)
    world.batches.later(Todo("fill", BATCH, ""), 0.0)  # what the dead one had taken is due
    world.end_group(f"{BATCH}.1", [0, 1, 0, 1])
    assert world.live() == [f"{BATCH}.2.2", f"{BATCH}.2.3"], "the second half did not wait for the first"
    notes = world.redis.zrange("batches:todo", 0, -1)
    world.redis.zadd("batches:todo", dict.fromkeys(notes, 0))  # the dead one's lease is over


def until(world, look):
    for _ in range(200):
        world.settle()
        if look():
            return
        time.sleep(0.01)
    raise TimeoutError(f"live: {world.live()}")


def test_half_a_group_whose_submitter_died_comes_though_the_other_half_is_there(world):
    dying_with_half_a_group(world)
    until(world, lambda: len(world.live()) == 4)
    world.end_group(f"{BATCH}.2", [0, 1, 0, 1])
    assert (world.get(BATCH).kept, world.redis.zcard("batches:todo")) == (2, 0)


def test_what_is_submitted_only_after_its_batch_has_ended_is_cancelled(world):
    dying_with_half_a_group(world)
    world.batches.cancel(BATCH, "default")
    until(world, lambda: world.get(BATCH).open == 0)
    assert world.live() == [] and balanced(world.get(BATCH))
    assert {world.rollouts.state(f"{BATCH}.2.{k}") for k in range(4)} == {State.CANCELLED}


def test_nothing_of_an_ended_batch_outlives_its_retention(world):
    first = world.create(n=2, groups=1, prompts=4, oversample=3)
    world.end_group(f"{first}.1", [1, 1])
    world.end_group(f"{first}.2", [0, 1])
    second = world.create(n=2, groups=1, prompts=0, carry_from=first)
    assert world.redis.ttl(f"batch:group:{{{first}.3}}") == -1, "what is under way again is kept"
    world.end_group(f"{first}.3", [0, 1])
    world.batches.cancel(second, None)
    world.settle()
    names = world.redis.keys("batch:*")
    assert names and all(world.redis.ttl(key) > 0 for key in names)
    world.redis.zadd("batches", {first: 1})
    world.redis.zadd("batches:tenant:default", {first: 1})
    world.rollouts.trim()
    assert world.batches.ids(None) == world.batches.ids("default") == [second]


def test_a_batch_past_its_retention_leaves_nothing_to_do(world):
    batch = world.create(n=1, groups=2, prompts=2)
    world.end(f"{batch}.1", 1)
    world.redis.delete(f"batch:{{{batch}}}")
    world.settle()
    assert world.redis.zcard("batches:todo") == 0


def test_the_same_call_again_does_not_open_a_batch_that_was_closed_meanwhile(world):
    first = world.create(n=1, groups=1, prompts=1)
    world.end_group(f"{first}.1", [1])
    body = {"id": BATCH, "n": 1, "groups": 9, "prompts": 1, "carry_from": first, "closed": False}
    world.create(**body)
    world.batches.extend(BATCH, [], True, None)
    world.create(**body)
    assert world.get(BATCH).closed


def test_prompts_of_one_call_come_once_however_often_it_is_sent(world):
    batch = world.create(n=1, groups=9, prompts=1, closed=False)
    world.batches.pause(batch, True, None)
    more = RolloutRequest(handler="noop", task={"number": 9}).model_dump_json()
    for part, waiting in (("p", 1), ("p", 1), ("q", 2), (None, 3), (None, 4)):
        assert world.batches.extend(batch, [more], None, None, part) == waiting


def test_what_is_asked_for_while_it_is_done_is_done_again(world):
    batch = world.create(n=1, groups=9, prompts=1)
    world.batches.pause(batch, False, None)
    (todo,) = world.batches.take()
    assert world.batches.take() == [], "it is the caller's for a while"
    world.batches.pause(batch, False, None)
    world.batches.through(todo)
    (again,) = world.batches.take()
    assert (again.kind, again.subject) == ("fill", batch)
    world.batches.through(again)
    assert world.batches.todo() == 0


def test_a_batch_that_cannot_be_moved_on_keeps_no_other_from_it(world):
    broken, well = (world.create(n=1, groups=1, prompts=1) for _ in range(2))
    world.redis.hset(f"batch:{{{broken}}}", "config", "{")
    for batch in (broken, well):
        world.end(f"{batch}.1", 1)
    world.settle()
    assert (world.get(broken).kept, world.get(well).kept) == (0, 1)
    assert world.batches.todo() == 1, "it is tried again"


def test_no_more_is_taken_at_once_than_is_asked_for(world):
    for number in range(3):
        world.batches.later(Todo("fill", f"b{number}", ""), 0.0)
    assert [len(world.batches.take(2)) for _ in range(3)] == [2, 1, 0]


def test_prompts_of_a_cancelled_batch_leave_their_tenants_account(world):
    batch = world.create(n=1, groups=9, prompts=4, max_in_flight=1)
    before = int(world.redis.hget("tenants:bytes", "default"))
    waiting = sum(map(len, world.redis.lrange(f"batch:{{{batch}}}:prompts", 0, -1)))
    world.batches.cancel(batch, None)
    assert int(world.redis.hget("tenants:bytes", "default")) == before - waiting
    world.settle()
    assert world.get(batch).waiting_prompts == 0


@settings(max_examples=25, deadline=None, suppress_health_check=NOT_CHECKED)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 4),
    groups=st.integers(1, 4),
    carry=st.sampled_from(["groups", "none"]),
    chain=st.integers(1, 3),
)
def test_every_group_and_rollout_is_accounted_for_whatever_happens(world, seed, n, groups, carry, chain):
    world.redis.flushall()
    chance = random.Random(seed)
    batches: list[str] = []
    limits = Limits(max_attempts=1)
    for number in range(chain):
        prompts = [RolloutRequest(handler="noop", task={"k": k}, limits=limits) for k in range(groups + 2)]
        more = {"carry_from": batches[-1]} if batches else {}
        batches.append(
            world.create(id=f"b{number}", prompts=prompts, n=n, groups=groups, carry=carry, **more)
        )
        while not world.get(batches[-1]).state.ended:
            live = world.live()
            event = chance.random()
            if event < 0.04:
                world.batches.cancel(batches[-1], None)
            elif event < 0.08:
                world.batches.pause(batches[-1], chance.random() < 0.3, None)
            elif event < 0.14 and live:
                world.rollouts.cancel(chance.choice(live))
            elif live:
                world.end(chance.choice(live), chance.choice([0, 0, 1, 1, 0.5, None]))
            else:
                world.batches.pause(batches[-1], False, None)
            if chance.random() < 0.7:
                world.settle()
        world.settle()
    for batch_id in batches:
        batch = world.get(batch_id)
        assert balanced(batch), batch
        assert batch.kept <= groups and batch.in_flight >= 0
    counted = Counter(
        rollout.state.terminal for rollout in world.rollouts.get_many(world.rollouts.ids(limit=10**6))
    )
    live = sum(world.get(batch_id).in_flight for batch_id in batches)
    assert counted[False] == live, "what is under way is somebody's"
    sent = sum(int(world.redis.hget(key, "sent")) for key in world.redis.keys("batch:group:*"))
    assert counted[True] + counted[False] == sent
