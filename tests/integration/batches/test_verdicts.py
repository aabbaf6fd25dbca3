"""What becomes of a decided group."""

from __future__ import annotations

import json

import pytest

from rollout.batch import BatchState, FilterSpec, Verdict
from rollout.trajectory import FinishReason
from tests.helpers.batch_world import balanced


def test_too_few_scored_rollouts_fail_a_group(world):
    batch = world.create(n=4, groups=1, prompts=3)
    world.end_group(f"{batch}.1", [1, None, None, None])
    now = world.get(batch)
    assert (now.failed, now.reasons) == (1, {"too_few_scored": 1})
    world.end_group(f"{batch}.2", [1, 0, None, None])
    now = world.get(batch)
    assert (now.state, now.rollouts_scored, now.rollouts_dropped) == (BatchState.DONE, 3, 5)


@pytest.mark.parametrize(
    ("filters", "rewards", "fields", "verdict"),
    [
        (None, [1, 1], {}, "uniform_reward"),
        (None, [0.3, 0.3000001], {}, None),
        ([], [1, 1], {}, None),
        ([FilterSpec(name="all_below", options={"reward": 0.5})], [0.2, 0.5], {}, "all_below"),
        ([FilterSpec(name="all_below", options={"reward": 0.5})], [0.2, 0.6], {}, None),
        ([FilterSpec(name="too_long")], [0, 1], {"finish_reason": FinishReason.TURN_LIMIT.value}, "too_long"),
        (
            [FilterSpec(name="too_long", options={"share": 1.0})],
            [0, 1],
            {"finish_reason": "turn_limit"},
            None,
        ),
        ([FilterSpec(name="uniform_reward"), FilterSpec(name="all_below")], [0, 0], {}, "uniform_reward"),
        ([FilterSpec(name="no_such")], [0, 1], {}, "no filter no_such"),
        ([FilterSpec(name="all_below", options={"rewrd": 1})], [0, 1], {}, "all_below: TypeError"),
    ],
)
def test_filters_decide_with_a_reason(world, filters, rewards, fields, verdict):
    batch = world.create(n=2, groups=1, prompts=1, filters=filters)
    world.end_group(f"{batch}.1", rewards, **fields)
    now = world.get(batch)
    assert now.reasons == ({verdict: 1} if verdict else {})
    assert now.kept == (verdict is None) and balanced(now)


def test_single_rollouts_are_kept_as_they_are_for_ppo(world):
    batch = world.create(n=1, groups=3, prompts=3)
    for number, reward in ((1, 1), (2, 1), (3, 0)):
        world.end_group(f"{batch}.{number}", [reward])
    assert world.get(batch).state is BatchState.DONE


def test_groups_older_than_the_staleness_bound_are_filtered(world):
    batch = world.create(n=2, groups=1, prompts=3, max_staleness=1)
    for changes, version in enumerate(("a", "b", "c"), 1):
        world.redis.zadd("policy:sequence", {version: changes})
        world.redis.hset("policy:totals", "changes", changes)
    world.end_group(f"{batch}.1", [1, 0], policy_versions=json.dumps(["a", "c"]))
    assert world.get(batch).reasons == {"stale": 1}
    world.end_group(f"{batch}.2", [1, 0], policy_versions=json.dumps(["b", "c"]))
    assert world.get(batch).state is BatchState.DONE


def test_reasons_beyond_a_bound_are_counted_as_one(world):
    """Filters are anybody's. Each batch tells its own all the same."""
    batch = world.create(n=1, groups=120, prompts=120)
    for number in range(1, 121):
        world.redis.hset(f"batch:group:{{{batch}.{number}}}", "state", "undecided")
        world.batches.decide(f"{batch}.{number}", Verdict.FILTERED, f"because {number}", 1, 0)
    reasons = {name: n for name, n in world.batches.totals().items() if name.startswith("reason_")}
    assert len(reasons) <= 101 and sum(reasons.values()) == 120 and reasons["reason_other"] >= 20
    assert len(world.get(batch).reasons) == 120


@pytest.mark.parametrize(("most", "verdict"), [(0, "stale"), (1, "stale"), (2, None)])
def test_a_group_is_stale_beyond_the_bound_and_not_at_it(world, most, verdict):
    batch = world.create(n=1, groups=1, prompts=1, max_staleness=most)
    world.redis.zadd("policy:sequence", {"old": 1, "newer": 2, "newest": 3})
    world.redis.hset("policy:totals", "changes", 3)
    world.end_group(f"{batch}.1", [1], policy_versions=json.dumps(["old", "newest"]))
    assert world.get(batch).reasons == ({verdict: 1} if verdict else {})


# -- the end ---------------------------------------------------------------------------------


def test_a_decision_is_written_once(world):
    batch = world.create(n=1, groups=2, prompts=2)
    world.end(f"{batch}.1", 1)
    for _ in range(3):
        world.batches.decide(f"{batch}.1", Verdict.KEPT, None, 1, 0)
    assert world.get(batch).kept == 1
