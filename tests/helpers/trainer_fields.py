"""Records of trainers that are in no package index, as their source had them in August 2026.

`make trainers-test` compares them with the source of the day, where GitHub answers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

_STREAM = list[float] | None
TRAINING_SAMPLE: dict[str, Any] = {
    "token_ids": list[int],
    "mask": list[bool],
    "logprobs": list[float],
    "temperatures": list[float],
    "env_name": str,
    "ref_logprobs": _STREAM,
    "mm_kwargs": dict[str, Any] | None,
    "routed_experts": Any,
    "mm_token_type_ids": list[int] | None,
    "rl_weights": _STREAM,
    "ce_weights": _STREAM,
    "ref_kl_weights": _STREAM,
    "advantages": _STREAM,
}
"""prime-rl at 559b447, `prime_rl.transports.rollouts.types.TrainingSample`; the first five are required."""
SAMPLE = {
    *(
        "group_index",
        "index",
        "rollout_id",
        "prompt",
        "tokens",
        "multimodal_inputs",
        "multimodal_train_inputs",
    ),
    *("multimodal_train_input_id", "apply_chat_template_kwargs", "response", "response_length", "label"),
    *("reward", "loss_mask", "weight_versions", "rollout_log_probs", "rollout_top_p_token_ids"),
    *(
        "rollout_top_p_token_offsets",
        "rollout_routed_experts",
        "remove_sample",
        "teacher_log_probs",
        "status",
    ),
    *("metadata", "generate_function_path", "custom_rm_path", "train_metadata", "session_id"),
    *("non_generation_time", "spec_info", "prefix_cache_info"),
}
"""slime at 624b824, `slime.utils.types.Sample`."""
STATUS = {"pending", "completed", "truncated", "aborted", "failed"}

TrainingSample = msgspec.defstruct(
    "TrainingSample",
    [
        (name, type_) if at < 5 else (name, type_, None)
        for at, (name, type_) in enumerate(TRAINING_SAMPLE.items())
    ],
    array_like=True,
)


def fields_of(class_: Any) -> set[str]:
    """The names of a released class: a struct's or a dataclass'."""
    if dataclasses.is_dataclass(class_):
        return {field.name for field in dataclasses.fields(class_)}
    return set(class_.__struct_fields__)
