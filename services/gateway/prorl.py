"""The wire format of ProRL-Agent-Server: a `/process` body as a rollout, a rollout as its result object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import structlog
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rollout.schema import HandlerInfo, Limits, Rollout, RolloutRequest, SamplingParams, State
from rollout.schema.base import MAX_INT53
from rollout.schema.trajectory import calls_of
from rollout.summary import SUCCESS
from rollout.trajectory import Chain, FinishReason, Message
from services.gateway.instances import DEFAULT_SOURCE, handler_of, task_of
from services.gateway.problems import from_validation
from services.settings import Settings
from services.state.jobs import digest_of

log = structlog.get_logger("gateway")

TAG = "api:prorl"
"""Of every rollout that came by `/process`."""
NO_EFFECT = frozenset(
    {
        "model",
        "api_key",
        "max_model_len",
        "custom_tokenizer",
        "native_tool_calling",
        "ensure_thinking_end_properly",
        "strict_loop_detector",
    }
)
"""Sampling parameters that are known and change nothing here: backends say what they serve, and tokens are
always those that were sampled."""


MAX_NAME = 1000


def _name(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("must be a text or an integer")
    if isinstance(value, str) and len(value) > MAX_NAME:
        raise ValueError(f"{len(value)} characters; at most {MAX_NAME}")
    if isinstance(value, int) and abs(value) > MAX_INT53:
        raise ValueError("an integer of more than 53 bits; send it as a text")
    return value


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("must not be empty")
    return value


Name = Annotated[Any, AfterValidator(_name)]
"""Ids are numbers in some data sets, and are handed back as they came."""
JobId = Annotated[Name, AfterValidator(_not_empty)]
Ids = Literal["sampled", "all", "compact"]
"""Which messages carry ids: those that were sampled, each with its prompt; all; all, and none its prompt."""


class _Open(BaseModel):
    """Unknown keys are kept: they are no error."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class InstanceParams(_Open):
    """What the service reads of an instance; the rest is the task."""

    data_source: Annotated[str, Field(max_length=200)] | None = None
    """None = `swebench`."""
    instance_id: Name | None = None
    trajectory_id: Name | None = None


class ProrlSampling(_Open):
    """What has an effect of `sampling_params`; None = not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_output_tokens: int | None = None
    max_tokens: int | None = None
    max_iterations: int | None = None
    """Most turns."""
    compact: bool | None = None
    """True: messages without `input_ids`; each has its own `token_ids`."""
    token_level_generation: bool | None = None
    """True: every message has `token_ids`, `input_ids` and `logprobs`, for trainers read all of them."""

    @property
    def ids(self) -> Ids:
        """How messages are to carry ids."""
        return "compact" if self.compact else "all" if self.token_level_generation else "sampled"

    def sampling(self) -> dict[str, Any]:
        """As `SamplingParams` has it."""
        found: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens if self.max_output_tokens is None else self.max_output_tokens,
        }
        return {name: value for name, value in found.items() if value is not None}


class ProcessRequest(_Open):
    """Body of `POST /process`."""

    instance: InstanceParams
    sampling_params: ProrlSampling | None = None
    job_id: JobId | None = None


def rollout_request(
    body: ProcessRequest, handlers: Mapping[str, HandlerInfo], settings: Settings, run: int
) -> RolloutRequest:
    """The rollout that a `/process` asks for, without an id.

    Args:
        run: Number of the API's run: instances of one name are a group within it.

    Raises:
        ApiProblem: 400 naming a field of the body.
    """
    wanted, given = body.instance, body.sampling_params or ProrlSampling()
    unknown = sorted(given.model_extra.keys() - NO_EFFECT)
    if unknown:
        log.warning("sampling parameters without effect", names=unknown)
    handler = handler_of(wanted.data_source or DEFAULT_SOURCE, handlers, settings.data_source_handlers)
    task = task_of(handler, _given(wanted))
    try:
        sampling = SamplingParams.model_validate(given.sampling())
        limits = _limits(settings.prorl_timeout_s, given.max_iterations)
    except ValidationError as error:
        raise from_validation(error, "sampling_params.") from None
    named = wanted.instance_id not in (None, "")
    group = f"prorl-{digest_of(run, handler, wanted.instance_id)}" if named else None
    return RolloutRequest(
        handler=handler,
        task=task,
        group_id=group,
        sampling=sampling,
        limits=limits,
        tags=[TAG],
        metadata={"instance_id": wanted.instance_id, "trajectory_id": wanted.trajectory_id},
    )


def _given(instance: InstanceParams) -> dict[str, Any]:
    named = instance.model_dump(exclude_none=True, include=set(InstanceParams.model_fields))
    return {**instance.model_extra, **named}


class _Turns(BaseModel):
    """The one limit that a request names, under its own name: it is what an error speaks of."""

    max_iterations: Annotated[int, Field(ge=1, le=1000)] | None = None


def _limits(budget_s: float, max_iterations: int | None) -> Limits:
    turns = _Turns(max_iterations=max_iterations).max_iterations
    limits = {"init_timeout_s": budget_s, "run_timeout_s": budget_s, "eval_timeout_s": budget_s}
    return Limits(**limits) if turns is None else Limits(**limits, max_turns=turns)


# -- the result --------------------------------------------------------------------------------


def result(found: Rollout, info: HandlerInfo | None, *, ids: Ids) -> dict[str, Any]:
    """The result object of an ended rollout.

    Args:
        info: Of its handler, for the tools; None = unknown.
        ids: Which messages carry ids.
    """
    trajectory = found.trajectory
    lost = not found.drop and trajectory is None
    dropped = found.drop or lost
    reason = found.finish_reason
    names = found.request.metadata
    error = found.error
    why = None
    if lost:
        why = "the trajectory is not kept any more"
    elif found.drop:
        why = f"{error.blame}: {error.message}" if error else found.drop_reason or found.state.value
    return {
        "instance_id": names.get("instance_id"),
        "trajectory_id": names.get("trajectory_id"),
        "git_patch": trajectory.artifacts.get("patch") if trajectory else None,
        "success": not dropped,
        "finish": not dropped and reason is FinishReason.STOP,
        "end_properly": not dropped and reason is not FinishReason.TIME_LIMIT and not _cut_off(found),
        "resolved": not dropped and (found.reward or 0.0) > SUCCESS,
        "reward": None if dropped else found.reward,
        "messages": list(_messages(found, ids)),
        "tools": info.tool_schemas if info else [],
        "critical_error": "final_result" if lost else _critical_error(found),
        "filter": dropped,
        "error": why,
        "traceback": error.traceback if error else None,
        "timing": _timing(found),
    }


def _cut_off(found: Rollout) -> bool:
    """Whether the last turn ended in the middle, or there was none."""
    if not (found.trajectory and found.trajectory.turns):
        # A handler without a model has no turn that could.
        return found.finish_reason is not FinishReason.STOP
    last = next(s for s in reversed(found.trajectory.chain.segments) if s.sampled)
    return last.finish_reason in ("length", "abort")


def _critical_error(found: Rollout) -> str | None:
    """Where it failed; of a cancelled one, where it was."""
    if not found.drop:
        return None
    if found.state is State.TIMED_OUT or (found.error and found.error.blame == "timeout"):
        return "timeout"
    if found.error and found.error.stage:
        return found.error.stage.value
    before = [event.state for event in found.timeline if not event.state.terminal]
    last = before[-1] if before else State.QUEUED
    return {State.EVALUATING: "eval", State.READY: "run", State.RUNNING: "run"}.get(last, "init")


def _timing(found: Rollout) -> dict[str, Any]:
    spent = found.stage_seconds
    stages = {f"{name}_time": spent.get(name, 0.0) for name in ("init", "run", "eval")}
    by_limit = found.finish_reason is FinishReason.TIME_LIMIT or found.state is State.TIMED_OUT
    blamed = found.error is not None and found.error.blame == "timeout"
    return {
        **stages,
        "others_time": spent.get("queued", 0.0),
        "counted_elapsed": sum(stages.values()),
        "timeout_triggered": by_limit or blamed,
    }


def _messages(found: Rollout, ids: Ids) -> Iterator[dict[str, Any]]:
    """Messages of all chains, in order. Log-probs and ids stay as they were sampled."""
    if found.trajectory is None:
        return
    chains = found.trajectory.chains
    for number, chain in enumerate(chains):
        where = {"chain": number} if len(chains) > 1 else {}
        for message in _chain_messages(chain, ids):
            yield message | where
    for message in found.trajectory.unread:
        yield _message(message) | _NOT_SAMPLED[ids]


_NOT_SAMPLED: dict[Ids, dict[str, Any]] = {
    "sampled": {},
    "all": {"token_ids": [], "input_ids": None, "logprobs": None},
    "compact": {"token_ids": []},
}
"""What a message that was not sampled has beside its text."""


def _chain_messages(chain: Chain, form: Ids) -> Iterator[dict[str, Any]]:
    seen: list[int] = []
    for call in calls_of(chain):
        ids = [token for segment in call for token in segment.token_ids]
        said = [_message(message) for segment in call for message in segment.messages]
        if call[0].sampled:
            answer = said[-1] if said else _message(Message(role="assistant"))
            answer["token_ids"] = ids
            answer["logprobs"] = [value for segment in call for value in segment.logprobs or ()]
            if form != "compact":
                answer["input_ids"] = list(seen)
            said = [answer]
        elif form != "sampled":
            # The ids of messages that came together cannot be told apart; the last has them all.
            said = [
                message | _NOT_SAMPLED[form] for message in said or [{"role": call[0].role, "content": ""}]
            ]
            said[-1]["token_ids"] = ids
        seen += ids
        yield from said


def _message(message: Message) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role == "assistant":
        told["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        if message.reasoning:
            told["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        told["tool_call_id"] = message.tool_call_id
    return told
