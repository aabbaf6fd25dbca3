"""What the adapters share: the chains of a rollout as parallel lists, and what becomes of dropped ones.

A dropped rollout was not judged, so it must not teach anything. Where a trainer wants a row for every
rollout, it gets one with a mask of zeros, and the mean reward of its group, which shifts no baseline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollout.schema import Rollout
from rollout.trajectory import Chain, FinishReason, Trajectory

TRUNCATED = frozenset(
    {
        FinishReason.TURN_LIMIT,
        FinishReason.TOKEN_LIMIT,
        FinishReason.LENGTH,
        FinishReason.CONTEXT_LENGTH,
        FinishReason.TIME_LIMIT,
    }
)
"""Reasons for which a trainer calls a rollout cut off."""
_FIRST_WEIGHTS = "default"
"""What engines call weights that they were started with."""

StepOf = Callable[[str | None], int]
"""The trainer's step at which a policy version was made."""


@dataclass(frozen=True)
class Sample:
    """One chain: a sequence to learn from. All but `prompt_ids` are parallel."""

    chain: Chain
    last: bool
    """It is the chain that reached the end of the rollout."""
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    """1 = sampled; all 0 where the rollout was dropped."""
    logprobs: list[float]
    """0.0 on tokens that were not sampled."""
    policy_versions: list[str | None]


def usable(rollout: Rollout) -> bool:
    """Whether it may be learned from."""
    return not rollout.drop and rollout.reward is not None


def trajectory_of(rollout: Rollout) -> Trajectory | None:
    """The trajectory, however it came; None where none was made or asked for."""
    if rollout.trajectory is not None:
        return rollout.trajectory
    try:
        return rollout.arrays.trajectory()
    except LookupError:
        return None


def samples(rollout: Rollout) -> list[Sample]:
    """Its chains in which something was sampled; none where no model call was made."""
    trajectory = trajectory_of(rollout)
    chains = [] if trajectory is None else trajectory.chains
    keep = int(usable(rollout))
    return [
        Sample(
            chain=chain,
            last=chain is chains[-1],
            prompt_ids=chain.prompt_ids,
            response_ids=chain.response_ids,
            loss_mask=[bit * keep for bit in chain.loss_mask],
            logprobs=chain.logprobs,
            policy_versions=chain.policy_versions,
        )
        for chain in chains
        if any(segment.sampled for segment in chain.segments)
    ]


def last_sample(rollout: Rollout) -> Sample:
    """The last chain in which something was sampled, for trainers that take one row a rollout.

    Raises:
        ValueError: No model call was made, so there is no row.
    """
    found = samples(rollout)
    if not found:
        why = rollout.drop_reason or rollout.state.value
        raise ValueError(
            f"rollout {rollout.id} has no turn ({why}): there is no row to give; submit it again, or leave "
            "its group out"
        )
    return found[-1]


def neutral_reward(group: Iterable[Rollout]) -> float:
    """The mean reward of those that were judged: what a dropped member gets; 0.0 where none was."""
    rewards = [rollout.reward for rollout in group if usable(rollout)]
    return sum(rewards) / len(rewards) if rewards else 0.0


def rewards(rollouts: Iterable[Rollout]) -> list[float]:
    """A reward for each; dropped ones get the mean of their group."""
    every = list(rollouts)
    groups: dict[str, list[Rollout]] = {}
    for rollout in every:
        groups.setdefault(rollout.group_id, []).append(rollout)
    means = {name: neutral_reward(group) for name, group in groups.items()}
    return [one.reward if usable(one) else means[one.group_id] for one in every]


def step_of(version: str | None) -> int:
    """The number at the end of a version (`step-17`); 0 for weights that an engine was started with.

    Raises:
        ValueError: There is no number in it.
    """
    if version is None or version == _FIRST_WEIGHTS:
        return 0
    found = re.search(r"\d+$", version)
    if found is None:
        raise ValueError(
            f"policy version {version!r} does not end in a number; name versions so, or pass step_of="
        )
    return int(found[0])
