"""Numbers over many rollouts."""

from __future__ import annotations

import pytest

from rollout.summary import summarize
from tests.helpers.rollouts import ended


def test_rewards_components_and_metrics_are_averaged_over_those_that_were_scored():
    scored = {"reward_components": {"correct": 1}, "metrics": {"turns": 2}}
    missed = {"reward_components": {"correct": 0}, "metrics": {"turns": 4, "odd": float("inf")}}
    dropped = {"drop": True, "drop_reason": "sandbox: died", "metrics": {"turns": 100}}
    numbers = summarize([ended(reward=1.0, **scored), ended(reward=0.0, **missed), ended(**dropped)])
    assert (numbers["rollouts"], numbers["scored"], numbers["dropped"]) == (3, 2, 1)
    assert numbers["dropped/sandbox: died"] == 1
    assert (numbers["reward/mean"], numbers["reward/std"], numbers["solved"]) == (0.5, 0.5, 0.5)
    assert (numbers["component/correct"], numbers["metric/turns"]) == (0.5, 3)
    assert "metric/odd" not in numbers


def test_groups_give_pass_at_k_and_the_share_that_teaches():
    rewards = {"a": [1, 1, 1, 0], "b": [0, 0, 0, 0], "c": [1, 1, 1, 1], "d": [1, 0, None, 0]}
    numbers = summarize(
        ended(group_id=group, reward=reward, drop=reward is None)
        for group, values in rewards.items()
        for reward in values
    )
    assert numbers["groups"] == 4
    assert numbers["pass@1"] == pytest.approx((0.75 + 0 + 1 + 1 / 3) / 4)
    assert numbers["pass@4"] == pytest.approx(2 / 3), "over whole groups only"
    assert numbers["informative"] == 0.5


def test_of_nothing_there_are_only_counts():
    assert summarize([]) == {"rollouts": 0, "scored": 0, "dropped": 0}
    assert "pass@1" in summarize([ended(reward=1.0)]) and "informative" not in summarize([ended(reward=1.0)])
