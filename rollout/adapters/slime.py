"""slime: the fields of `Sample` (`slime.utils.types`), for `Sample.from_dict`.

slime is not on the package index (a package of that name is another one): the names follow its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.adapters.base import TRUNCATED, Sample, advantages, rewards, samples, usable, weightless
from rollout.schema import Rollout, State
from rollout.schema.trajectory import OTHER_ROLES


def sample_dicts(
    group: Sequence[Rollout],
    *,
    group_index: int,
    first_index: int = 0,
    centred: bool = False,
    policy: str | None = None,
) -> list[dict[str, Any]]:
    """One `Sample` a chain; the chains of a rollout share `rollout_id`, by which slime weighs them as one.

    Args:
        group_index: Number of the prompt.
        first_index: Number of the group's first rollout; samples and rollouts count on from it.
        centred: Give advantages for rewards, each rollout counted once in its group's mean. It goes with
            `--disable-rewards-normalization`: slime itself takes the mean of a batch's samples as soon as one
            rollout has several.
        policy: Whose trainer it is for; None = the one that the request names.
    """
    rows = []
    values_of = advantages if centred else rewards
    values = {role: values_of(group, role) for role in ("agent", *OTHER_ROLES)}
    for number, rollout in enumerate(group):
        # Without a turn there is nothing to learn from, but slime counts the members of a group.
        for sample in samples(rollout, policy or rollout.request.policy) or [weightless()]:
            place = {"group_index": group_index, "index": first_index + len(rows)}
            place["rollout_id"] = first_index + number
            reward = values.get(sample.chain.role, values["agent"])[number]
            rows.append(_fields(rollout, sample, reward) | place)
    return rows


def _fields(rollout: Rollout, sample: Sample, reward: float) -> dict[str, Any]:
    segments = sample.chain.segments
    first = next((i for i, segment in enumerate(segments) if segment.sampled), 0)
    calls = {s.call_id: s.policy_version for s in segments if s.sampled}
    return {
        "prompt": [message.to_chat() for segment in segments[:first] for message in segment.messages],
        "tokens": sample.prompt_ids + sample.response_ids,
        "response": "".join(message.text for segment in segments[first:] for message in segment.messages),
        "response_length": len(sample.response_ids),
        "reward": reward,
        "loss_mask": sample.loss_mask,
        "weight_versions": [version or "" for version in calls.values()],
        "rollout_log_probs": sample.logprobs,
        "remove_sample": not usable(rollout),
        "status": _status(rollout),
        "metadata": {"rollout_id": rollout.id, "group_id": rollout.group_id, **rollout.reward_components},
    }


def _status(rollout: Rollout) -> str:
    if rollout.state is State.CANCELLED:
        return "aborted"
    if not usable(rollout):
        return "failed"
    return "truncated" if rollout.finish_reason in TRUNCATED else "completed"
