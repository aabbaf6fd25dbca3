"""AReaL: the dict that a `RolloutWorkflow` returns, as NumPy arrays; checked against AReaL 1.0.4.

`{name: torch.from_numpy(value) for name, value in tensor_dict(rollout).items()}` is what it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.adapters.base import StepOf, step_of, usable
from rollout.schema import Rollout

if TYPE_CHECKING:
    import numpy as np


def tensor_dict(rollout: Rollout, *, step_of: StepOf = step_of) -> dict[str, np.ndarray] | None:
    """`input_ids`, `loss_mask`, `logprobs`, `versions`, `attention_mask` (1 × tokens) and `rewards` (1).

    Of the agent's last chain to learn from. `versions` is -1 on what was not sampled. None for a rollout
    that must not be learned from, which AReaL then leaves out.

    Raises:
        ValueError: A policy version has no number; see `step_of`.
    """
    import numpy as np

    if not usable(rollout):
        return None
    try:
        # A later one ends in a prompt that may be what did not fit.
        arrays = [chain for chain in rollout.arrays.trained if chain.own][-1]
    except LookupError:
        return None
    prompt = arrays.prompt_tokens
    # The last place is for -1, not sampled, which indexes it from the end.
    steps = np.array([*map(step_of, arrays.versions), -1], np.int64)
    row = {
        "input_ids": arrays.token_ids.astype(np.int64),
        "loss_mask": np.concatenate([np.zeros(prompt, np.int64), arrays.loss_mask]),
        "logprobs": np.concatenate([np.zeros(prompt, np.float32), arrays.logprobs.astype(np.float32)]),
        "versions": np.concatenate([np.full(prompt, -1, np.int64), steps[arrays.policy_versions]]),
        "attention_mask": np.ones(len(arrays.token_ids), bool),
    }
    rewards = np.array([rollout.reward], np.float32)
    return {name: value[None] for name, value in row.items()} | {"rewards": rewards}
