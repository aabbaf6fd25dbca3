"""TRL: what a `rollout_func` of `GRPOTrainer` returns; checked against TRL 1.16.

Everything beside the three required keys and `env_mask` goes to the reward functions by its name: `reward`
here, which a reward function of one line hands back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.adapters.base import last_sample, usable
from rollout.schema import Rollout


def rollout_func_result(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """The result for these rollouts, in their order: that of the prompts which TRL passed."""
    rows = [last_sample(rollout) for rollout in rollouts]
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.response_ids for row in rows],
        "logprobs": [row.logprobs for row in rows],
        "env_mask": [row.loss_mask for row in rows],
        # None: TRL leaves the sample out of its group's mean.
        "reward": [rollout.reward if usable(rollout) else None for rollout in rollouts],
    }


def reward(completions: Sequence[Any], reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """A reward function for `reward_funcs`: hands back what the service has scored."""
    return list(reward)
