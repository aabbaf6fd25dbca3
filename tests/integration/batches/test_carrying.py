"""Groups under way when a batch ends: cancelled, or taken over by the next."""

from __future__ import annotations

import json

import pytest

from rollout.batch import BatchState
from services.state.batches.store import BatchRuns, NoSuchBatch
from tests.helpers.batch_world import balanced


def test_redundant_rollouts_are_cancelled_at_once_where_nothing_is_carried(world):
    batch = world.create(n=2, groups=1, prompts=3, carry="none", oversample=3)
    world.end(f"{batch}.2.0", 1)
    world.end_group(f"{batch}.1", [1, 0])
    now = world.get(batch)
    assert (now.state, now.cancelled, now.open, now.in_flight) == (BatchState.DONE, 2, 0, 0)
    assert world.live() == [] and balanced(now)
    assert world.rollouts.get(f"{batch}.2.0").reward == 1, "what had ended keeps its reward"


def test_groups_under_way_go_into_the_next_batch_with_their_finished_siblings(world):
    first = world.create(n=2, groups=1, prompts=4, oversample=3)
    world.end(f"{first}.2.0", 1)
    world.end(f"{first}.3.0", 0)
    world.end(f"{first}.3.1", 1)
    world.end_group(f"{first}.1", [1, 0])
    assert world.get(first).state is BatchState.DONE
    second = world.create(n=2, groups=3, prompts=1, carry_from=first)
    old, new = world.get(first), world.get(second)
    # The order in which 1 and 3 were decided is open: one of them made the first batch done.
    assert old.kept == 1 and old.carried_out == new.carried_in == 2 and old.open == 0
    assert balanced(old) and balanced(new)
    assert new.started == 2, "the fourth prompt and its own"
    world.end(f"{first}.2.1", 0)
    world.settle()
    assert world.get(second).kept == 2
    assert {group.group_id for group in world.batches.groups(second, "0", 10)} <= {
        f"{first}.{k}" for k in (1, 2, 3)
    }


def test_the_most_advanced_groups_are_carried_first(world):
    first = world.create(n=3, groups=1, prompts=4, oversample=4)
    world.end(f"{first}.3.0", 1)
    world.end(f"{first}.3.1", 1)
    world.end(f"{first}.4.0", 1)
    world.end_group(f"{first}.1", [0, 0, 1])
    second = world.create(n=3, groups=2, prompts=0, carry_from=first, max_carried=2)
    assert world.batches.open_groups(second) == [f"{first}.3", f"{first}.4"]
    assert world.batches.open_groups(first) == [f"{first}.2"]


def test_what_was_carried_may_be_too_old_when_it_is_decided(world):
    first = world.create(n=2, groups=1, prompts=2, oversample=2)
    world.end_group(f"{first}.1", [0, 1])
    second = world.create(n=2, groups=1, prompts=0, carry_from=first, max_staleness=0)
    world.redis.zadd("policy:sequence", {"new": 1})
    world.redis.hset("policy:totals", "changes", 1)
    world.end_group(f"{first}.2", [0, 1], policy_versions=json.dumps(["old"]))
    assert world.get(second).reasons == {"stale": 1}


def test_a_cancelled_batch_leaves_nothing_and_twice_is_harmless(world):
    batch = world.create(n=2, groups=2, prompts=4)
    world.end(f"{batch}.1.0", 1)
    for _ in range(2):
        assert world.batches.cancel(batch, "default").state is BatchState.CANCELLED
        world.settle()
    now = world.get(batch)
    assert (now.open, now.in_flight, now.waiting_prompts, world.live()) == (0, 0, 0, [])
    assert now.cancelled == now.started and balanced(now)


def test_a_batch_that_is_done_can_give_up_what_it_would_carry(world):
    batch = world.create(n=2, groups=1, prompts=2, oversample=2)
    world.end_group(f"{batch}.1", [0, 1])
    assert len(world.live()) == 2
    assert world.batches.cancel(batch, "default").state is BatchState.DONE
    world.settle()
    assert world.live() == [] and balanced(world.get(batch))


def test_only_batches_that_have_ended_can_be_taken_over(world):
    first = world.create(n=2, groups=1, prompts=2)
    with pytest.raises(BatchRuns, match="has not ended"):
        world.create(n=2, groups=1, prompts=0, carry_from=first)
    with pytest.raises(NoSuchBatch):
        world.create(n=2, groups=1, prompts=0, carry_from="no-such")


# -- once, and whoever dies ------------------------------------------------------------------
