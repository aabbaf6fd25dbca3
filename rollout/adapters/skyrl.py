"""SkyRL: `GeneratorOutput` (`skyrl.train.generators.base`), lists over the batch; checked with SkyRL 0.4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollout.adapters.base import TRUNCATED, Sample, last_sample, own_samples, rewards
from rollout.schema import Rollout


def generator_output(
    rollouts: Sequence[Rollout], *, step_wise: bool = False, trajectory_id: Callable[..., Any] = dict
) -> dict[str, Any]:
    """A `GeneratorOutput`.

    Args:
        step_wise: A row for every chain of the agent, `is_last_step` set on a rollout's last; else the last
            chain alone. SkyRL takes a group's advantages from the last rows, one a rollout, and gives them to
            the others: so there is no row for the chains of another policy, which has a reward of its own.
        trajectory_id: SkyRL's class `TrajectoryID`; without it the ids are dicts.
    """
    rows: list[tuple[Rollout, Sample, float, bool]] = []
    for rollout, reward in zip(rollouts, rewards(rollouts), strict=True):
        steps = own_samples(rollout)[:-1] if step_wise else []
        rows += [(rollout, sample, reward, False) for sample in steps]
        rows.append((rollout, last_sample(rollout), reward, True))
    return {
        "prompt_token_ids": [sample.prompt_ids for _, sample, _, _ in rows],
        "response_ids": [sample.response_ids for _, sample, _, _ in rows],
        "rewards": [reward for _, _, reward, _ in rows],
        "loss_masks": [sample.loss_mask for _, sample, _, _ in rows],
        "stop_reasons": ["length" if item.finish_reason in TRUNCATED else "stop" for item, *_ in rows],
        "rollout_metrics": None,
        "rollout_logprobs": [sample.logprobs for _, sample, _, _ in rows],
        "trajectory_ids": [
            trajectory_id(instance_id=rollout.group_id, repetition_id=rollout.index) for rollout, *_ in rows
        ],
        "trajectory_generation_times": [rollout.stage_seconds.get("run", 0.0) for rollout in rollouts],
        "trajectory_time_splits": None,
        "rollout_expert_indices": None,
        "rollout_sample_support": None,
        "is_last_step": [last for *_, last in rows] if step_wise else None,
        "env_metrics": [dict(rollout.metrics) for rollout, *_ in rows],
        "pixel_values": None,
        "image_grid_thw": None,
    }
