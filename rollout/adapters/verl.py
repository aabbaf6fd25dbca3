"""verl: the fields of `AgentLoopOutput` (`verl.experimental.agent_loop`), checked against verl 0.9.

verl pads prompts at the left and responses at the right itself, and repeats `uid` for grouping.
"""

from __future__ import annotations

from typing import Any

from rollout.adapters.base import StepOf, last_sample, step_of, usable, weightless
from rollout.schema import Rollout


def agent_loop_output(
    rollout: Rollout,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    neutral_reward: float = 0.0,
    step_of: StepOf = step_of,
) -> dict[str, Any]:
    """Arguments of `AgentLoopOutput`, of the last chain.

    Args:
        prompt_length, response_length: verl's `rollout.prompt_length` and `rollout.response_length`, where
            they are to hold: a longer response is cut, with its mask and log-probs.
        neutral_reward: What a dropped rollout gets beside its mask of zeros; see `base.neutral_reward`.

    Raises:
        ValueError: A policy version has no number, or the prompt of a rollout to learn from is too long: verl
            would cut it at its left, and train on something that the engine never saw.
    """
    sample = last_sample(rollout)
    if prompt_length is not None and len(sample.prompt_ids) > prompt_length and not usable(rollout):
        sample = weightless()
    if prompt_length is not None and len(sample.prompt_ids) > prompt_length:
        raise ValueError(
            f"the prompt of {rollout.id} has {len(sample.prompt_ids)} ids and rollout.prompt_length is "
            f"{prompt_length}; raise it"
        )
    steps = [step_of(s.policy_version) for s in sample.chain.segments if s.sampled]
    return {
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids[:response_length],
        "response_mask": sample.loss_mask[:response_length],
        "response_logprobs": sample.logprobs[:response_length],
        "reward_score": rollout.reward if usable(rollout) else neutral_reward,
        "num_turns": sum(len(segment.messages) for segment in sample.chain.segments),
        "metrics": {
            "generate_sequences": rollout.stage_seconds.get("run", 0.0),
            "compute_score": rollout.stage_seconds.get("eval", 0.0),
        },
        "extra_fields": {
            # Without a turn: as weights that the engine was started with.
            "min_global_steps": min(steps, default=0),
            "max_global_steps": max(steps, default=0),
            "rollout_id": rollout.id,
            "reward_extra_info": dict(rollout.reward_components),
        },
    }
