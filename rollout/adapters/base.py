"""What the adapters share: the chains of a rollout as parallel lists, and what becomes of dropped ones.

One rule for all: a dropped rollout was not judged, and one without a sampled token says nothing of the
policy, so neither is ever a reward, nor ends a step (`usable`). A trainer that can leave a row out does not
get it. One that wants a row for every rollout gets one with a mask of zeros (`weightless` where nothing was
sampled), and for its reward none, or the mean of the others in its group: no baseline shifts (`rewards`).

Chains that were `discarded`, or `auxiliary` to the task, are nobody's sample. Of the others each sampled
token is in one alone, and all have their rollout's reward and advantage: a group counts rollouts, not chains.

Chains of other policies are samples where the request says that their role is trained. Such a role has a
reward of its own where its handler gave it one (`role_rewards`), and then the mean of its own in each group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollout.schema import Chain, FinishReason, Rollout, Trajectory
from rollout.schema.trajectory import ChainRole

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
    """Whether it may be learned from: it was judged, and something of it was sampled."""
    return not rollout.drop and rollout.reward is not None and not _silent(rollout)


def _silent(rollout: Rollout) -> bool:
    """Whether its trajectory is not kept, or has no chain to learn from. One not fetched is not looked at."""
    if rollout.trajectory is not None:
        return not any(map(teaches, rollout.trajectory.chains))
    arrays = rollout.__dict__.get("arrays")
    if arrays is None:
        return rollout.trajectory_dropped is not None
    return not arrays.trained


def teaches(chain: Chain) -> bool:
    """Whether something was sampled in it that is to be learned from."""
    return chain.teaches and any(segment.sampled for segment in chain.segments)


def trajectory_of(rollout: Rollout) -> Trajectory | None:
    """The trajectory, however it came; None where none was made or asked for."""
    if rollout.trajectory is not None:
        return rollout.trajectory
    try:
        return rollout.arrays.trajectory()
    except LookupError:
        return None


def samples(rollout: Rollout, policy: str | None = None) -> list[Sample]:
    """Its chains to learn from, in which something was sampled; none where no model call was made.

    Args:
        policy: Those of this one alone, which may have a tokenizer of its own; None = of all.
    """
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
        if teaches(chain) and policy in (None, chain.policy or rollout.request.policy)
    ]


def own_samples(rollout: Rollout) -> list[Sample]:
    """Those of the agent, for trainers that know one reward a rollout."""
    return [sample for sample in samples(rollout) if sample.chain.policy is None]


def last_sample(rollout: Rollout) -> Sample:
    """The agent's last chain to learn from, for trainers that take one row a rollout.

    Without one it is a row that weighs nothing: two ids that every vocabulary has, neither sampled. The
    prompt is not in it, for it may be what did not fit.
    """
    return next(reversed(own_samples(rollout)), None) or weightless()


def weightless() -> Sample:
    """The least row that every trainer takes, to learn nothing from."""
    return Sample(Chain(), True, [0], [0], [0], [0.0], [None])


def reward_of(rollout: Rollout, role: ChainRole = "agent") -> float | None:
    """The reward of a role: its own, or the rollout's where it has none."""
    return rollout.role_rewards.get(role, rollout.reward)


def neutral_reward(group: Iterable[Rollout], role: ChainRole = "agent") -> float:
    """The mean reward of those that were judged: what a dropped member gets; 0.0 where none was."""
    rewards = [reward_of(rollout, role) for rollout in group if usable(rollout)]
    return sum(rewards) / len(rewards) if rewards else 0.0


def _with_means(rollouts: Iterable[Rollout], role: ChainRole) -> list[tuple[float, float]]:
    """For each its reward and the mean of its group, which stands for a reward that is not to be used."""
    groups: dict[str, list[Rollout]] = {}
    every = list(rollouts)
    for rollout in every:
        groups.setdefault(rollout.group_id, []).append(rollout)
    means = {group_id: neutral_reward(group, role) for group_id, group in groups.items()}
    return [
        (reward_of(rollout, role) if usable(rollout) else means[rollout.group_id], means[rollout.group_id])
        for rollout in every
    ]


def rewards(rollouts: Iterable[Rollout], role: ChainRole = "agent") -> list[float]:
    """A reward of the role for each; dropped ones get the mean of their group."""
    return [reward for reward, _ in _with_means(rollouts, role)]


def advantages(rollouts: Iterable[Rollout], role: ChainRole = "agent") -> list[float]:
    """Each reward of the role less the mean of its group; 0.0 for what may not be learned from."""
    return [reward - mean for reward, mean in _with_means(rollouts, role)]


def step_of(version: str | None) -> int:
    """The number at the end of a version (`step-17`); 0 for weights that an engine was started with.

    Raises:
        ValueError: There is no number in it.
    """
    if version is None or version == _FIRST_WEIGHTS:
        return 0
    digits = re.search(r"\d+$", version)
    if digits is None:
        raise ValueError(
            f"policy version {version!r} does not end in a number; name versions so, or pass step_of="
        )
    return int(digits[0])
