"""From groups of rollouts to tensors.

Invariant: the ids, masks and log-probs are those of the trajectory. Nothing is tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from rollout.adapters.base import reward_of, teaches, usable
from rollout.batch import Group
from rollout.schema import Rollout


@dataclass
class Sample:
    """One chain of a rollout: what one forward pass sees."""

    token_ids: list[int]
    sampled: list[bool]
    """Parallel to `token_ids`: the policy said it."""
    logprobs: list[float]
    """Parallel to `token_ids`: the engine's; 0.0 where nothing was sampled."""
    versions: list[str | None]
    """Parallel to `token_ids`: the weights that sampled it."""
    reward: float
    advantage: float | list[float]
    """Of the rollout; or parallel to `token_ids`, where turns differ."""


def scored(group: Group) -> list[Rollout]:
    """The rollouts of a group that may be learned from."""
    return [r for r in group.rollouts if usable(r) and r.trajectory]


def is_informative(group: Group) -> bool:
    """Whether its rewards differ."""
    return len({rollout.reward for rollout in scored(group)}) > 1


def samples_of(group: Group, advantages: Callable[[Sequence[float]], list[float]]) -> list[Sample]:
    """A sample for every chain to learn from; all chains of a rollout share its advantage, or their role's.

    A group's mean is over its rollouts, and the loss is a mean over tokens, each of which is sampled in one
    chain: so a rollout of several chains counts as one chain of their length would.
    """
    rollouts = scored(group)
    rewards: dict[str, list[float]] = {}
    for role in {chain.role for rollout in rollouts for chain in rollout.trajectory.chains}:
        rewards[role] = [float(reward_of(rollout, role)) for rollout in rollouts]
    by_role = {role: advantages(values) for role, values in rewards.items()}
    samples = []
    for place, rollout in enumerate(rollouts):
        for chain in filter(teaches, rollout.trajectory.chains):
            if chain.policy not in (None, rollout.request.policy):
                continue  # another model, which this trainer does not have
            prompt = [False] * len(chain.prompt_ids)
            samples.append(
                Sample(
                    token_ids=chain.token_ids,
                    sampled=prompt + [bool(bit) for bit in chain.loss_mask],
                    logprobs=[0.0] * len(prompt) + chain.logprobs,
                    versions=[None] * len(prompt) + chain.policy_versions,
                    reward=rewards[chain.role][place],
                    advantage=by_role[chain.role][place],
                )
            )
    return samples


def each_token(sample: Sample) -> list[float]:
    """Its advantage, parallel to its ids."""
    advantage = sample.advantage
    return advantage if isinstance(advantage, list) else [advantage] * len(sample.token_ids)


@dataclass
class Rows:
    """Samples side by side, padded on the right: attention is causal, so padding changes nothing before it.

    All but `ids` and `rewards` are (rows, positions), with one position less than `ids`: position t is about
    the id at t + 1, which the model predicts there.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    current: torch.Tensor
    """Sampled by the very weights that the trainer holds."""
    rewards: torch.Tensor


def collate(samples: Sequence[Sample], version: str, device: torch.device | str = "cpu") -> Rows:
    """Rows of `samples`; `version` is the label of the weights that the trainer holds."""

    def padded(name: str, fill: float, of: Callable[[Sample], Iterable]) -> torch.Tensor:
        kind = torch.long if name == "ids" else torch.float32
        table = torch.full((len(samples), longest), fill, dtype=kind)
        for row, sample in enumerate(samples):
            table[row, : len(sample.token_ids)] = torch.tensor(list(of(sample)), dtype=kind)
        return table.to(device)

    longest = max(len(sample.token_ids) for sample in samples)
    mask = padded("mask", 0, lambda sample: sample.sampled)[:, 1:].bool()
    advantages = padded("advantages", 0.0, each_token)[:, 1:]
    return Rows(
        ids=padded("ids", 0, lambda sample: sample.token_ids),
        mask=mask,
        behaviour=padded("behaviour", 0.0, lambda sample: sample.logprobs)[:, 1:],
        advantages=torch.where(mask, advantages, 0.0),
        current=padded("current", 0, lambda s: (v == version for v in s.versions))[:, 1:].bool() & mask,
        rewards=torch.tensor([sample.reward for sample in samples], device=device),
    )
