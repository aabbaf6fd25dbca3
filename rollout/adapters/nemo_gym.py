"""NeMo Gym: the answer of an agent server to `/run`, with token fields on the last item of each model call.

Checked against NeMo Gym 0.7, and NeMo RL's reading of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from rollout.adapters.base import own_samples, usable, weightless
from rollout.schema import Chain, Message, Rollout, Segment
from rollout.schema.calls import calls_of

TOKENS = {"prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"}


def run_response(rollout: Rollout, row: dict[str, Any] | None = None) -> dict[str, Any]:
    """The row with `response` and `reward`; of the last chain, as Gym takes one.

    Args:
        row: What Gym has sent to `/run`; it goes back with the answer.
    """
    row = {"responses_create_params": {"input": []}, **(row or {})}
    params = row["responses_create_params"]
    trajectory = rollout.trajectory
    answer = row | {
        "response": {
            "id": f"resp_{rollout.id}",
            "created_at": int(rollout.created_at),
            "model": params.get("model") or (trajectory.model if trajectory else None) or "",
            "object": "response",
            "output": output_of(rollout),
            "parallel_tool_calls": True,
            "tool_choice": params.get("tool_choice", "auto"),
            "tools": params.get("tools", []),
        },
        "reward": rollout.reward if usable(rollout) else 0.0,
    }
    if not usable(rollout):
        why = rollout.error.blame if rollout.error else rollout.state
        return answer | masked(row) | {"_ng_failure_class": why.value}
    components = rollout.reward_components
    return answer | ({"reward_components": dict(components)} if components else {})


def masked(row: dict[str, Any]) -> dict[str, Any]:
    """What says that a row is not to be learned from: NeMo RL looks for it in `instance_config`."""
    config = row.get("instance_config")
    return {
        "mask_sample": True,
        "instance_config": {**(config if isinstance(config, dict) else {}), "mask_sample": True},
    }


def output_of(rollout: Rollout) -> list[dict[str, Any]]:
    """The items of the agent's last chain to learn from.

    Those of a rollout that must not be learned from have no tokens, and an item that weighs nothing follows:
    NeMo RL takes rows with the same first prompt for a group, and counts masked ones in its mean.
    """
    sequences, unread = own_samples(rollout), rollout.trajectory.unread if rollout.trajectory else ()
    items = output_items(sequences[-1].chain, rollout.id, unread) if sequences else []
    if usable(rollout):
        return items
    said = [{name: value for name, value in item.items() if name not in TOKENS} for item in items]
    return [*said, weightless_item(rollout.id)]


def weightless_item(name: str) -> dict[str, Any]:
    """A turn that says nothing, for a masked row without one: a row without tokens ends NeMo RL's step."""
    row = weightless()
    return _message_item(f"{name}_none", "", cut=True) | {
        "prompt_token_ids": row.prompt_ids,
        "generation_token_ids": row.response_ids,
        "generation_log_probs": row.logprobs,
    }


def _message_item(name: str, text: str, *, cut: bool) -> dict[str, Any]:
    """A message of the model."""
    return {
        "type": "message",
        "id": f"msg_{name}",
        "role": "assistant",
        "status": "incomplete" if cut else "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def output_items(chain: Chain, name: str, unread: Iterable[Message] = ()) -> list[dict[str, Any]]:
    """What follows the prompt: messages, calls, their outputs; the last item of a model call has its tokens.

    Args:
        name: Begins the items' ids.
        unread: Observations that no call has read, behind the rest.
    """
    items: list[dict[str, Any]] = []
    seen: list[int] = []
    number = 0
    for call in calls_of(chain):
        ids = [token for segment in call for token in segment.token_ids]
        if call[0].sampled:
            turn = _sampled(call, f"{name}_{number}")
            number += 1
            turn[-1] |= {
                "prompt_token_ids": list(seen),
                "generation_token_ids": ids,
                "generation_log_probs": [value for segment in call for value in segment.logprobs or ()],
            }
            if call[-1].routed_experts is not None:
                turn[-1]["routed_experts"] = call[-1].routed_experts
            items += turn
        elif number:  # what comes before the first turn is the input
            items += _observations(message for segment in call for message in segment.messages)
        seen += ids
    return [*items, *_observations(unread)]


def _sampled(call: list[Segment], name: str) -> list[dict[str, Any]]:
    message = next((m for segment in reversed(call) for m in segment.messages), Message(role="assistant"))
    items: list[dict[str, Any]] = []
    if message.reasoning:
        text = {"type": "summary_text", "text": message.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [text]})
    if message.text or not message.tool_calls:
        items.append(_message_item(name, message.text, cut=call[-1].finish_reason in ("length", "abort")))
    for tool_call in message.tool_calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{tool_call.id}",
                "call_id": tool_call.id,
                "name": tool_call.name,
                "arguments": json.dumps(tool_call.arguments),
                "status": "completed",
            }
        )
    return items


def _observations(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    """What the environment said. A call that could not be parsed has no id that an output could name."""
    for message in messages:
        if message.role == "tool" and message.tool_call_id:
            yield {
                "type": "function_call_output",
                "call_id": message.tool_call_id,
                "output": message.text,
                "status": "completed",
            }
        else:
            role = message.role if message.role in ("user", "system") else "user"
            content = [{"type": "input_text", "text": message.text}]
            yield {"type": "message", "role": role, "status": "completed", "content": content}
