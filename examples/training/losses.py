"""The mathematics: advantages, clipped policy gradient, generalised advantage estimation.

Invariant: every array is (rows, positions), position t speaks of the id at t + 1, and what `mask` leaves out
(prompts, observations, padding) adds nothing to any sum.

Sources: GRPO arXiv 2402.03300, DAPO 2503.14476 (clip-higher, token mean), PPO 1707.06347, GAE 1506.02438,
leave-one-out 2402.14740; the truncated weight between the engine's log-probs and the trainer's is that of
"Your efficient RL framework secretly brings you off-policy training" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

STD_FLOOR = 1e-6
"""Added to a group's standard deviation: groups of equal rewards get advantage 0 and not NaN."""


def group_advantages(rewards: Sequence[float], kind: Literal["group", "loo"] = "group") -> list[float]:
    """One advantage for each rollout of a group.

    Args:
        kind: `group`: distance from the mean, in standard deviations. `loo`: from the mean of the others.
    """
    n = len(rewards)
    mean = sum(rewards) / n if n else 0.0
    if kind == "loo":
        # r - mean of the others = (r - mean) n / (n - 1)
        return [(r - mean) * n / (n - 1) if n > 1 else 0.0 for r in rewards]
    std = (sum((r - mean) ** 2 for r in rewards) / n) ** 0.5 if n else 0.0
    return [(r - mean) / (std + STD_FLOOR) for r in rewards]


@dataclass(frozen=True)
class Clip:
    """Bounds of the policy's step."""

    low: float = 0.2
    high: float = 0.28
    """Above `low` (clip-higher): unlikely tokens may become likely."""
    truncate: float = 2.0
    """Largest weight for a token whose engine and trainer disagree, or whose weights are older."""


@dataclass
class Policy:
    """What `policy_loss` found."""

    loss: torch.Tensor
    """A sum over tokens, divided by `tokens`."""
    clipped: float
    """Tokens without a gradient because their ratio is out of bounds."""
    truncated: float
    """Tokens whose weight met its bound."""


def policy_loss(
    new: torch.Tensor,
    start: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    tokens: int,
    clip: Clip,
) -> Policy:
    """Clipped surrogate, mean over the batch's sampled tokens, each weighted by how far it is off-policy.

    Args:
        new: Log-probs under the weights that learn, with gradient.
        start: The same at the beginning of this step: the centre of the clip.
        behaviour: The rollouts' own, as the engine reported them.
        tokens: Sampled tokens in the whole batch, of which these rows may be a part.
    """
    weight = torch.exp(start - behaviour)
    ratio = torch.exp(new - start)
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high)
    gain = torch.minimum(ratio * advantages, bounded * advantages) * weight.clamp(max=clip.truncate)
    out = ((ratio > 1 + clip.high) & (advantages > 0)) | ((ratio < 1 - clip.low) & (advantages < 0))
    return Policy(
        -torch.where(mask, gain, 0.0).sum() / tokens,
        (out & mask).sum().item(),
        ((weight > clip.truncate) & mask).sum().item(),
    )


def kl_penalty(new: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """Token mean of the estimator exp(d) - d - 1 with d = reference - new: unbiased and never negative."""
    distance = reference - new
    return torch.where(mask, torch.exp(distance) - distance - 1, 0.0).sum() / tokens


def gae(
    values: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, both shaped like `values`; the reward comes with a row's last sampled token.

    Observations between turns are passed over: after a turn comes the value of the next turn's first id.

    Args:
        values: What the critic expects before each id is sampled, (rows, positions).
        rewards: (rows,)
    """
    advantages = torch.zeros_like(values)
    following_value = torch.zeros_like(rewards)
    following_advantage = torch.zeros_like(rewards)
    due = rewards.clone()  # paid at the first sampled position met from the right
    for t in range(values.shape[1] - 1, -1, -1):
        here = mask[:, t]
        delta = due + gamma * following_value - values[:, t]
        advantage = delta + gamma * lam * following_advantage
        advantages[:, t] = torch.where(here, advantage, 0.0)
        following_value = torch.where(here, values[:, t], following_value)
        following_advantage = torch.where(here, advantage, following_advantage)
        due = torch.where(here, 0.0, due)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(parts: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Mean 0 and standard deviation 1 over the masked positions of all parts together; 0 elsewhere."""
    chosen = torch.cat([values[mask] for values, mask in zip(parts, masks, strict=True)])
    mean, std = chosen.mean(), chosen.std(unbiased=False) + STD_FLOOR
    return [torch.where(mask, (values - mean) / std, 0.0) for values, mask in zip(parts, masks, strict=True)]


def value_loss(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """Half the mean squared error over sampled tokens."""
    return 0.5 * torch.where(mask, (values - returns) ** 2, 0.0).sum() / tokens
