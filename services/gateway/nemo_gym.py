"""The wire format of NeMo Gym's agent servers: a row as a rollout, a rollout as a verified response."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rollout.adapters.nemo_gym import output_items, weightless_item
from rollout.schema import HandlerInfo, Rollout, RolloutRequest, SamplingParams, State
from rollout.schema.base import MAX_INT53, Items
from rollout.summary import summarize
from rollout.trajectory import FinishReason
from services.gateway.instances import HANDLERS, handler_of, said, task_of
from services.gateway.problems import from_validation, invalid, short
from services.settings import Settings
from services.state.jobs import digest_of

TAG = "api:nemo-gym"
"""Of every rollout that came by `/run` or `/v1/responses`."""
TERMINAL = frozenset({"task", "handler"})
"""Classes of failures that another attempt would not mend."""
NOT_THE_TASK = ("responses_create_params", "agent_ref", "policy_base_url", "policy_api_key", "handler")
_CUT = (FinishReason.LENGTH, FinishReason.TOKEN_LIMIT, FinishReason.CONTEXT_LENGTH)


MAX_ROWS = 50_000
"""Of one call of `/aggregate_metrics`."""
MAX_NUMBERS = 1000
"""Of `metrics` or `reward_components` of a row."""
MAX_NUMBER = 1e150
"""Of a row: its square is still a number."""


class _Open(BaseModel):
    """Unknown keys are kept: a row has whatever its data set has."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


def _no_stream(stream: bool | None) -> bool | None:
    if stream:
        raise ValueError("answers are not streamed here: leave it out, and wait for the whole one")
    return stream


class CreateParams(_Open):
    """What has an effect of a Responses request."""

    input: str | list[Any] = Field(default_factory=list)
    metadata: Annotated[dict[str, Any], Field(max_length=1000)] | None = None
    stream: Annotated[bool | None, AfterValidator(_no_stream)] = None
    """There are no tokens to be streamed: an answer comes when the rollout has ended."""
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None


Index = Annotated[int, Field(ge=-MAX_INT53, le=MAX_INT53)]


class AgentRef(_Open):
    name: str = Field(max_length=200)


class RunRequest(_Open):
    """Body of `POST /run`: a whole row of a data set."""

    responses_create_params: CreateParams
    agent_ref: AgentRef | None = None
    handler: str | None = Field(default=None, max_length=200)
    """Names the handler where neither `agent_ref` nor `data_source` does."""
    task_index: Index | None = Field(default=None, alias="_ng_task_index")
    rollout_index: Index | None = Field(default=None, alias="_ng_rollout_index")
    attempt_index: Index | None = Field(default=None, alias="_ng_attempt_index")
    rollout_id: str | None = Field(
        default=None, alias="_ng_rollout_id", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=1000
    )
    policy_base_url: str | None = Field(default=None, max_length=512)
    policy_api_key: str | None = Field(default=None, max_length=10_000)

    @property
    def name(self) -> str | None:
        """What the row calls its rollout: made of its indices where it has no id; None = nothing."""
        if self.rollout_id is not None:
            name = self.rollout_id
        elif self.task_index is not None and self.rollout_index is not None:
            name = f"{self.task_index}-{self.rollout_index}"
        else:
            return None
        return f"{name}-a{self.attempt_index}" if self.attempt_index else name


class AggregateRequest(BaseModel):
    """Body of `POST /aggregate_metrics`."""

    verify_responses: Items[dict[str, Any]] = Field(max_length=MAX_ROWS)


def rollout_request(row: RunRequest, handlers: Mapping[str, Any], settings: Settings) -> RolloutRequest:
    """The rollout that a row asks for, without an id.

    Raises:
        ApiProblem: 400 naming a field.
    """
    params = row.responses_create_params
    fields = {
        name: value
        for name, value in row.model_extra.items()
        if name not in NOT_THE_TASK and not name.startswith("_ng_")
    }
    instance = {**(params.metadata or {}), **fields}
    text = params.input if isinstance(params.input, str) else said(params.input)
    if text:
        instance.setdefault("prompt", text)
    handler = _handler(row, instance, handlers, settings)
    given = {"temperature": params.temperature, "top_p": params.top_p, "max_tokens": params.max_output_tokens}
    try:
        sampling = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise from_validation(error, "responses_create_params.") from None
    # Rows with the same index may be of different data sets.
    index = row.task_index
    group = None if index is None else f"gym-{digest_of(index, handler, json.dumps(fields))}"
    return RolloutRequest(
        handler=handler,
        task=task_of(handler, instance),
        group_id=group,
        sampling=sampling,
        tags=[TAG],
    )


def _handler(
    row: RunRequest, instance: Mapping[str, Any], handlers: Mapping[str, Any], settings: Settings
) -> str:
    more = settings.data_source_handlers
    agent = row.agent_ref.name if row.agent_ref else None
    for name in (row.handler, agent):
        if name and (name in handlers or name.lower() in more or name.lower() in HANDLERS):
            return handler_of(name, handlers, more)
    if isinstance(source := instance.get("data_source"), str):
        return handler_of(source, handlers, more)
    if "problem_statement" in instance:
        return handler_of("swebench", handlers, more)
    there = ", ".join(sorted({*HANDLERS, *more, *handlers}))
    raise invalid(
        "agent_ref.name",
        f"{agent!r} names no handler, and the row has no data_source; there are: {there}; set "
        "ROLLOUT_DATA_SOURCES",
    )


# -- the answer --------------------------------------------------------------------------------


def answer(
    row: RunRequest, params: dict[str, Any], found: Rollout, info: HandlerInfo | None
) -> dict[str, Any]:
    """A row's verified response. What is dropped has reward 0, a mask and the class of its failure."""
    told = _named(row) | {
        "responses_create_params": params,
        "response": response(params, found, info),
        "reward": 0.0 if found.drop else found.reward or 0.0,
        "reward_components": {} if found.drop else found.reward_components,
        "rollout_id": found.id,
        "metrics": found.metrics,
    }
    if not found.drop and found.trajectory is None:
        # By `ROLLOUT_RESULTS_MAX_BYTES`, say: there is a score, and nothing to learn from.
        return told | {"reward": 0.0} | failure("infrastructure", "the trajectory is not kept any more")
    if found.drop:
        told |= failure(_class(found), found.error.message if found.error else found.drop_reason or "")
    return told


def failed(row: RunRequest, params: dict[str, Any], why: str, message: str) -> dict[str, Any]:
    """A row of which no rollout could be made."""
    empty = _responses_object(params, "failed", [weightless_item("none")], None) | {
        "id": "resp_none",
        "created_at": 0,
        "model": "",
    }
    return (
        _named(row)
        | {"responses_create_params": params, "response": empty, "reward": 0.0, "reward_components": {}}
        | failure(why, message)
    )


def failure(why: str, message: str) -> dict[str, Any]:
    """What marks a row as failed."""
    return {
        "mask_sample": True,
        "_ng_failure_class": why,
        "_ng_failure_terminal": why in TERMINAL,
        "error": message,
    }


def _class(found: Rollout) -> str:
    if found.error:
        return found.error.blame.value
    return "timeout" if found.state is State.TIMED_OUT else found.state.value


def _named(row: RunRequest) -> dict[str, Any]:
    """The collector's own fields, which it finds its rows by."""
    given = row.model_dump(by_alias=True, exclude_none=True)
    return {name: value for name, value in given.items() if name == "agent_ref" or name.startswith("_ng_")}


def response(params: dict[str, Any], found: Rollout, info: HandlerInfo | None) -> dict[str, Any]:
    """The Responses object of an ended rollout."""
    cut = found.finish_reason in _CUT
    status = "failed" if found.drop else "incomplete" if cut else "completed"
    told = _responses_object(params, status, _output(found), info)
    told |= {
        "id": f"resp_{found.id}",
        "created_at": int(found.created_at),
        "model": (found.trajectory.model if found.trajectory else None) or str(params.get("model") or ""),
    }
    if cut and not found.drop:
        told["incomplete_details"] = {"reason": "max_output_tokens"}
    if found.drop:
        message = found.error.message if found.error else found.drop_reason or found.state.value
        told["error"] = {"code": "server_error", "message": message}
    return told


def _output(found: Rollout) -> list[dict[str, Any]]:
    """Items of the last chain: a reader may take what it sees for one growing context.

    A masked row in which nothing was sampled has a turn that says nothing: without any it would end a
    trainer's step.
    """
    trajectory = found.trajectory
    if trajectory is not None and trajectory.sampled_tokens:
        return output_items(trajectory.chain, found.id, trajectory.unread)
    return [weightless_item(found.id)] if found.drop or trajectory is None else []


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
        one = _as_rollout(row, number)
        tasks[one.group_id].append(one)
    overall = _numbers([one for members in tasks.values() for one in members])
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
    return int(task) if task.lstrip("-").isdigit() else task


def _require_few_numbers(numbers: Any, name: str) -> None:
    if not isinstance(numbers, dict):
        raise ValueError(f"{name} is no object of numbers")
    if len(numbers) > MAX_NUMBERS:
        raise ValueError(f"{name} holds {len(numbers)} numbers; at most {MAX_NUMBERS}")
    for key, value in numbers.items():
        if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            raise ValueError(f"{name}.{short(key, 100)} is beyond {MAX_NUMBER:g}")


_NO_REQUEST = RolloutRequest(handler="-")


def _as_rollout(row: dict[str, Any], number: int) -> Rollout:
    masked = bool(row.get("mask_sample"))
    try:
        for name in ("reward_components", "metrics"):
            _require_few_numbers(row.get(name) or {}, name)
        if not masked and abs(float(row.get("reward") or 0.0)) > MAX_NUMBER:
            raise ValueError(f"reward is beyond {MAX_NUMBER:g}")
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
    except (ValidationError, ValueError, TypeError) as error:
        text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise invalid(f"verify_responses.{number}", text) from None
