"""What NeMo Gym's collectors read: rollouts as verified responses, failures as masked rows, sums of rows."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from rollout.adapters.nemo_gym import masked, output_of, weightless_item
from rollout.schema import HandlerInfo, Rollout, RolloutRequest, State
from rollout.schema.base import Items
from rollout.summary import summarize
from rollout.trajectory import FinishReason
from services.gateway.compat.calls import lacking
from services.gateway.problems import invalid, short

TERMINAL = frozenset({"task", "handler"})
"""Classes of failures that another attempt would not mend."""
_CUT = (FinishReason.LENGTH, FinishReason.TOKEN_LIMIT, FinishReason.CONTEXT_LENGTH)
MAX_ROWS = 50_000
"""Most rows of one call of `/aggregate_metrics`."""
MAX_NUMBERS = 1000
"""Most entries of `metrics` or `reward_components` of a row."""
MAX_NUMBER = 1e150
"""The largest number of a row; its square is still one."""
VERIFIED = {
    "type": "object",
    "required": ["responses_create_params", "response", "reward"],
    "properties": {
        "response": {"type": "object"},
        "reward": {"type": "number"},
        "mask_sample": {"type": "boolean"},
        "replayed": {"type": "boolean"},
    },
}
"""JSON Schema of a verified response, as far as clients may count on it."""


class AggregateRequest(BaseModel):
    """Body of `POST /aggregate_metrics`."""

    verify_responses: Items[dict[str, Any]] = Field(max_length=MAX_ROWS)


def answer(repeated: dict[str, Any], rollout: Rollout, info: HandlerInfo | None) -> dict[str, Any]:
    """A row's verified response. What is dropped has reward 0, a mask and the class of its failure.

    Args:
        repeated: Fields of the row that the answer repeats, `responses_create_params` among them.
    """
    flaw = _flaw(rollout)
    verified = repeated | {
        "response": response(repeated["responses_create_params"], rollout, info),
        "reward": 0.0 if flaw else rollout.reward or 0.0,
        "reward_components": {} if flaw else rollout.reward_components,
        "rollout_id": rollout.id,
        "metrics": rollout.metrics,
    }
    return verified | failure(repeated, *flaw) if flaw else verified


def failed(repeated: dict[str, Any], why: str, message: str) -> dict[str, Any]:
    """The answer to a row of which no rollout could be made; `repeated` as in `answer`."""
    params = repeated["responses_create_params"]
    empty = _responses_object(params, "failed", [weightless_item("none")], None)
    empty |= {"id": "resp_none", "created_at": 0, "model": ""}
    row = {"response": empty, "reward": 0.0, "reward_components": {}}
    return repeated | row | failure(repeated, why, message)


def failure(repeated: dict[str, Any], why: str, message: str) -> dict[str, Any]:
    """What marks a row as failed."""
    return {
        **masked(repeated),
        "_ng_failure_class": why,
        "_ng_failure_terminal": why in TERMINAL,
        "error": message,
    }


def _flaw(rollout: Rollout) -> tuple[str, str] | None:
    """The class of the failure that makes it no sample, and a message; None = it is one."""
    if lack := lacking(rollout):
        return "infrastructure" if rollout.trajectory is None else "handler", lack
    if not rollout.drop:
        return None
    if rollout.error:
        return rollout.error.blame.value, rollout.error.message
    state = "timeout" if rollout.state is State.TIMED_OUT else rollout.state.value
    return state, rollout.drop_reason or ""


def response(params: dict[str, Any], rollout: Rollout, info: HandlerInfo | None) -> dict[str, Any]:
    """The Responses object of an ended rollout."""
    cut = rollout.finish_reason in _CUT
    status = "failed" if rollout.drop else "incomplete" if cut else "completed"
    body = _responses_object(params, status, output_of(rollout), info)
    body |= {
        "id": f"resp_{rollout.id}",
        "created_at": int(rollout.created_at),
        "model": (rollout.trajectory.model if rollout.trajectory else None) or str(params.get("model") or ""),
    }
    if cut and not rollout.drop:
        body["incomplete_details"] = {"reason": "max_output_tokens"}
    if rollout.drop:
        message = rollout.error.message if rollout.error else rollout.drop_reason or rollout.state.value
        body["error"] = {"code": "server_error", "message": message}
    return body


def _responses_object(
    params: dict[str, Any], status: str, output: list[dict[str, Any]], info: HandlerInfo | None
) -> dict[str, Any]:
    described = info.tool_schemas if info else []
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in described]
    return {
        "object": "response",
        "status": status,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": tools,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": params.get("metadata") or {},
    }


def aggregate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of many verified responses; masked ones are counted and nothing else.

    Returns:
        `agent_metrics` and, of each task, `group_level_metrics`: what `rollout.summary.summarize` says;
        `key_metrics`: the most important of the former.

    Raises:
        ApiProblem: 400 naming the row and field at fault.
    """
    tasks: dict[str, list[Rollout]] = defaultdict(list)
    for number, row in enumerate(rows):
        rollout = _as_rollout(row, number)
        tasks[rollout.group_id].append(rollout)
    overall = _numbers([rollout for members in tasks.values() for rollout in members])
    keys = [name for name in overall if name == "mean/reward" or name.startswith("pass@")]
    groups = [{"_ng_task_index": _index(task), **_numbers(members)} for task, members in tasks.items()]
    return {
        "agent_metrics": overall,
        "key_metrics": {name: overall[name] for name in keys},
        "group_level_metrics": groups,
    }


def _numbers(members: list[Rollout]) -> dict[str, float]:
    numbers = summarize(members)
    return numbers | ({"mean/reward": numbers["reward/mean"]} if "reward/mean" in numbers else {})


def _index(task: str) -> int | str:
    return int(task) if re.fullmatch("-?[0-9]{1,18}", task) else task


def _require_number(value: Any, name: str) -> None:
    # As pydantic reads it: also of a text.
    if not abs(float(value)) <= MAX_NUMBER:
        raise ValueError(f"{name} is no number of at most {MAX_NUMBER:g}")


def _require_few_numbers(numbers: Any, name: str) -> None:
    if not isinstance(numbers, dict):
        raise ValueError(f"{name} is no object of numbers")
    if len(numbers) > MAX_NUMBERS:
        raise ValueError(f"{name} holds {len(numbers)} numbers; at most {MAX_NUMBERS}")
    for key, value in numbers.items():
        _require_number(value, f"{name}.{short(key, 100)}")


_NO_REQUEST = RolloutRequest(handler="-")


def _as_rollout(row: dict[str, Any], number: int) -> Rollout:
    masked = bool(row.get("mask_sample"))
    try:
        for name in ("reward_components", "metrics"):
            _require_few_numbers(row.get(name) or {}, name)
        if not masked:
            _require_number(row.get("reward") or 0.0, "reward")
        return Rollout(
            id=str(number),
            group_id=str(row.get("_ng_task_index", number)),
            index=int(row.get("_ng_rollout_index") or 0),
            handler="-",
            state=State.COMPLETED,
            attempt=1,
            request=_NO_REQUEST,
            reward=None if masked else row.get("reward"),
            reward_components=row.get("reward_components") or {},
            metrics=row.get("metrics") or {},
            drop=masked,
            drop_reason=row.get("_ng_failure_class"),
            created_at=0.0,
            updated_at=0.0,
            deadline_at=0.0,
        )
    except (ValidationError, ValueError, TypeError, OverflowError) as error:
        text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise invalid(f"verify_responses.{number}", text) from None
