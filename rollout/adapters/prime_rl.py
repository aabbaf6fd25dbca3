"""prime-rl and verifiers: `TrainingSample`s of prime-rl, and the message graph of a verifiers v1 `Trace`.

prime-rl is not on the package index: its names follow its source (`transports/rollouts/types.py`).
verifiers is: 0.4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.adapters.base import own_samples, samples, usable
from rollout.schema import Chain, Message, Rollout, Segment, State


def training_samples(
    rollout: Rollout,
    *,
    advantage: float | None = None,
    role_advantages: Mapping[str, float] | None = None,
    token_advantages: Sequence[Sequence[float]] | None = None,
    env_name: str | None = None,
    policy: str | None = None,
) -> list[dict[str, Any]]:
    """Arguments of `TrainingSample`, one a chain; none for a dropped rollout, which teaches nothing.

    prime-rl's loss weighs tokens: a rollout of many chains weighs as one chain of as many sampled tokens.

    Args:
        advantage: Of the rollout, for every token that was sampled; see `base.advantages`. None = none is
            set, which prime-rl's trainer takes only where a sample's weights for RL are 0.
        role_advantages: Of roles that other policies play and that are trained; the others have `advantage`.
        token_advantages: In place of `advantage`, as `Tree.advantages` has them of the agent's chains.
        env_name: None = the handler's name.
        policy: Whose trainer it is for; None = the one that the request names.

    Raises:
        ValueError: There is none for a role that has a reward of its own.
    """
    if not usable(rollout):
        return []
    rows, own = [], iter(token_advantages or ())
    for sample in samples(rollout, policy or rollout.request.policy):
        prompt = len(sample.prompt_ids)
        tokens = sample.prompt_ids + sample.response_ids
        mask = [False] * prompt + [bit == 1 for bit in sample.loss_mask]
        row = {
            "token_ids": tokens,
            "mask": mask,
            "logprobs": [0.0] * prompt + sample.logprobs,
            "temperatures": [rollout.request.sampling.temperature] * len(tokens),
            "env_name": env_name or rollout.handler,
        }
        if token_advantages is not None and sample.chain.policy is None:
            rows.append(row | {"advantages": [0.0] * prompt + list(next(own))})
            continue
        role = sample.chain.role
        value = (role_advantages or {}).get(role, advantage)
        if value is not None and role in rollout.role_rewards and role not in (role_advantages or {}):
            raise ValueError(f"role {role!r} has a reward of its own: say what with `role_advantages`")
        rows.append(row if value is None else row | {"advantages": [value * bit for bit in mask]})
    return rows


def trace_fields(rollout: Rollout) -> dict[str, Any]:
    """Arguments of a verifiers `Trace` beside `task` and `agent`, which are the caller's."""
    nodes: list[dict[str, Any]] = []
    for sample in own_samples(rollout):
        nodes += _nodes(sample.chain, len(nodes))
    names = (rollout.reward_components or {"reward": rollout.reward}) if usable(rollout) else {}
    error = rollout.error
    return {
        "nodes": nodes,
        # verifiers sums its rewards, and our components need not sum to the reward.
        "rewards": {"reward": {"score": rollout.reward}} if usable(rollout) else {},
        "metrics": {**rollout.metrics, **{f"reward/{name}": value for name, value in names.items()}},
        "is_completed": rollout.state.terminal,
        "ok": usable(rollout),
        "stop_condition": rollout.finish_reason.value if rollout.finish_reason else None,
        "is_timeout": rollout.state is State.TIMED_OUT,
        "errors": [error.model_dump(include={"type", "message", "traceback"})] if error else [],
    }


def _nodes(chain: Chain, first: int) -> list[dict[str, Any]]:
    """A node a message; the tokens of a segment are on the node of its last message."""
    nodes: list[dict[str, Any]] = []
    waiting: list[Segment] = []

    def add(segments: list[Segment], messages: list[dict[str, Any]], sampled: bool) -> None:
        for message in messages:
            parent = first + len(nodes) - 1 if nodes else None
            nodes.append({"parent": parent, "message": message, "sampled": sampled})
        nodes[-1] |= {
            "token_ids": [token for segment in segments for token in segment.token_ids],
            "mask": [segment.sampled for segment in segments for _ in segment.token_ids],
            "logprobs": [value for segment in segments for value in segment.logprobs or ()],
        }

    for segment in chain.segments:
        waiting.append(segment)
        if segment.messages:
            add(waiting, [_message(message) for message in segment.messages], segment.sampled)
            waiting = []
    if any(segment.token_ids for segment in waiting):  # a call that was cut off before it said anything
        add(waiting, [{"role": "assistant", "content": ""}], True)
    return nodes


def _message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role == "tool":
        fields["tool_call_id"] = message.tool_call_id or ""
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": json.dumps(call.arguments)}
            for call in message.tool_calls
        ]
    return fields
