"""Numbers of many rollouts at once: rewards, success within a group, what was dropped and why."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import fmean, pstdev

from rollout.schema import Rollout

SUCCESS = 0.99
"""A reward from here on counts as solved."""


def summarize(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Flat numbers of ended rollouts.

    Returns:
        `rollouts`, `scored` and `dropped` (counts), `dropped/<reason>`; over the scored ones `reward/mean`,
        `reward/std`, `solved` (share with a reward of at least 0.99), `component/<name>` and `metric/<name>`
        (means over those that have it); over groups of k scored rollouts `pass@1` (the mean of their shares)
        and `pass@<k>` (share of the groups with a solved one), and `informative` (share of groups of at least
        two whose rewards differ).
    """
    results = list(rollouts)
    scored = [result for result in results if result.reward is not None and not result.drop]
    numbers: dict[str, float] = {"rollouts": len(results), "scored": len(scored)}
    dropped = Counter(result.drop_reason or "unknown" for result in results if result.drop)
    numbers["dropped"] = dropped.total()
    numbers |= {f"dropped/{reason}": count for reason, count in sorted(dropped.items())}
    if not scored:
        return numbers
    groups = by_group(scored)
    rewards = [reward for group in groups.values() for reward in group]
    numbers |= {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "solved": fmean(reward >= SUCCESS for reward in rewards),
    }
    named: dict[str, list[float]] = defaultdict(list)
    for result in scored:
        for name, value in result.reward_components.items():
            named[f"component/{name}"].append(value)
        for name, value in result.metrics.items():
            if math.isfinite(value):
                named[f"metric/{name}"].append(value)
    numbers |= {name: fmean(values) for name, values in sorted(named.items())}
    return numbers | _within_groups([*groups.values()])


def by_group(rollouts: Iterable[Rollout]) -> dict[str, list[float]]:
    """Group id → the rewards of its members that were scored."""
    groups: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None and not rollout.drop:
            groups[rollout.group_id].append(rollout.reward)
    return groups


def _within_groups(groups: list[list[float]]) -> dict[str, float]:
    shares = [fmean(reward >= SUCCESS for reward in rewards) for rewards in groups]
    numbers = {"groups": len(groups), "pass@1": fmean(shares)}
    several = [rewards for rewards in groups if len(rewards) > 1]
    if several:
        # Groups that lost members to failures would say something else under the same name.
        sizes = Counter(map(len, several))
        k = max(sizes, key=lambda size: (sizes[size], size))
        whole = [rewards for rewards in several if len(rewards) == k]
        numbers[f"pass@{k}"] = fmean(max(rewards) >= SUCCESS for rewards in whole)
        numbers["informative"] = fmean(max(rewards) > min(rewards) for rewards in several)
    return numbers
