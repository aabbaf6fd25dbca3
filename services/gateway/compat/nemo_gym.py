"""An agent server of NeMo Gym: a row becomes a rollout, and its end a verified response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import redis
from flask import Blueprint, Response, jsonify
from kombu.exceptions import OperationalError
from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from rollout.datasets import user_text
from rollout.schema import HandlerInfo, RolloutRequest, SamplingParams
from rollout.schema.base import MAX_INT53
from services.engines.address import root
from services.gateway.compat import calls, rows
from services.gateway.compat import nemo_gym_answers as answers
from services.gateway.compat.rows import HANDLERS, Open
from services.gateway.context import gateway
from services.gateway.http import operation
from services.gateway.problems import ApiProblem, from_validation, invalid
from services.gateway.waiting import waiter
from services.settings import Settings
from services.state.api_keys import Scope
from services.state.jobs import REPLAY_S, digest_of

blueprint = Blueprint("nemo_gym", __name__)

API = "nemo-gym"
TAG = "api:nemo-gym"
"""The tag of every rollout that came by `/run` or `/v1/responses`."""
NOT_THE_TASK = ("responses_create_params", "agent_ref", "policy_base_url", "policy_api_key", "handler")
INFRASTRUCTURE = (429, 503)
"""Statuses of a refusal after which another attempt may do better."""


def _no_stream(stream: bool | None) -> bool | None:
    if stream:
        raise ValueError("answers are not streamed here: leave it out, and wait for the whole one")
    return stream


class CreateParams(Open):
    """What has an effect of a Responses request."""

    input: str | list[Any] = Field(default_factory=list)
    metadata: Annotated[dict[str, Any], Field(max_length=1000)] | None = None
    stream: Annotated[bool | None, AfterValidator(_no_stream)] = None
    """There are no tokens to be streamed: an answer comes when the rollout has ended."""
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    _as_it_came: Any = None

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, validate: ModelWrapValidatorHandler[CreateParams]) -> CreateParams:
        params = validate(value)
        if not isinstance(value, cls):
            params._as_it_came = value
        return params

    @property
    def as_it_came(self) -> Any:
        """What was sent, for answers that repeat it."""
        return self._as_it_came


Index = Annotated[int, Field(ge=-MAX_INT53, le=MAX_INT53)]


class AgentRef(Open):
    name: str = Field(max_length=200)


class RunRequest(Open):
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

    def repeated(self) -> dict[str, Any]:
        """What an answer repeats: the request as it came, and fields that the collector finds its rows by."""
        fields = self.model_dump(by_alias=True, exclude_none=True, exclude={"responses_create_params"})
        own = {
            name: value for name, value in fields.items() if name == "agent_ref" or name.startswith("_ng_")
        }
        return {"responses_create_params": self.responses_create_params.as_it_came, **own}

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


def rollout_request(
    row: RunRequest, handlers: Mapping[str, HandlerInfo], settings: Settings
) -> RolloutRequest:
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
    metadata = rows.whole(params.metadata or {})
    instance = {**metadata, **fields}
    text = params.input if isinstance(params.input, str) else user_text(params.input)
    handler = _handler(row, instance, handlers, settings)
    instance |= rows.unpacked(
        handlers.get(handler), {name: metadata[name] for name in metadata.keys() - fields}
    )
    # The problem of a published set goes before its wording as a request; a handler of yours gets both.
    if text and not (handler in HANDLERS.values() and {"problem", "question"} & instance.keys()):
        instance.setdefault("prompt", text)
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
        task=rows.task_of(handlers.get(handler), instance),
        group_id=group,
        sampling=sampling,
        tags=[TAG],
    )


def _handler(
    row: RunRequest, instance: Mapping[str, Any], handlers: Mapping[str, HandlerInfo], settings: Settings
) -> str:
    more = settings.data_source_handlers
    agent = row.agent_ref.name if row.agent_ref else None
    for name in (row.handler, agent):
        if name and (name in handlers or name.lower() in more or name.lower() in HANDLERS):
            return rows.handler_of(name, handlers, more)
    if isinstance(source := instance.get("data_source"), str):
        return rows.handler_of(source, handlers, more)
    if "problem_statement" in instance:
        return rows.handler_of("swebench", handlers, more)
    message = f"{agent!r} names no handler, and the row has no data_source; {rows.there_are(handlers, more)}"
    raise invalid("agent_ref.name", message)


# -- routes ---------------------------------------------------------------------------------------


@blueprint.post("/run")
@operation(answers={200: answers.VERIFIED}, scope=Scope.SUBMIT)
def run(body: RunRequest) -> Response:
    """NeMo Gym: submit the rollout of a row and answer when it has ended. Every failure is a row, too."""
    call = waiter().remember("call", lambda: _begin(body))
    if isinstance(call, ApiProblem):
        return jsonify(_refused(body, call))
    try:
        # An id that the row names itself may come again; indices begin anew with every collection.
        rollout, replayed = calls.finish(call, replay_s=REPLAY_S if body.rollout_id else 0.0)
    except ApiProblem as problem:
        # The row counts as failed, and another attempt has another id.
        calls.abandon(gateway(), call)
        return jsonify(_refused(body, problem))
    except (redis.RedisError, OperationalError) as error:
        return jsonify(answers.failed(body.repeated(), "infrastructure", f"Redis does not answer: {error}"))
    verified = answers.answer(body.repeated(), rollout, gateway().tasks.handlers().get(rollout.handler))
    return jsonify(verified | {"replayed": replayed})


@blueprint.post("/v1/responses")
@operation(404, 429, scope=Scope.SUBMIT)
def responses(body: CreateParams) -> Response:
    """NeMo Gym: `/run` without a score: the body is what `responses_create_params` of a row is."""
    row = RunRequest(responses_create_params=body)
    call = waiter().remember("call", lambda: _begin(row))
    if isinstance(call, ApiProblem):
        raise call
    rollout, _ = calls.finish(call, replay_s=0.0)
    params = row.repeated()["responses_create_params"]
    return jsonify(answers.response(params, rollout, gateway().tasks.handlers().get(rollout.handler)))


@blueprint.post("/aggregate_metrics")
@operation(scope=Scope.READ)
def aggregate_metrics(body: answers.AggregateRequest) -> Response:
    """NeMo Gym: numbers of many answers of `/run`. Nothing is read but the body."""
    return jsonify(answers.aggregate(body.verify_responses))


def _begin(row: RunRequest) -> calls.Call | ApiProblem:
    """Submit the rollout of a row; what goes wrong is answered as the row's failure."""
    try:
        request = rollout_request(row, calls.handlers(), gateway().settings)
        if row.policy_base_url is not None:
            _check_policy(row.policy_base_url)
        name = row.name
        # Another row under the same indices is another rollout: they are unique within a collection only.
        job = name and calls.key_of(API, name, digest_of(request.model_dump_json()))
        return calls.begin(request, job)
    except ApiProblem as problem:
        return rows.as_instance_problem(problem, "(row)")
    except (redis.RedisError, OperationalError) as error:
        return ApiProblem(503, "Service unavailable", f"Redis does not answer: {error}")


def _check_policy(url: str) -> None:
    """Refuse a policy that the rollout might not be sampled from.

    Raises:
        ApiProblem: 400; it is no backend here, or not all backends serve the same model.
    """
    backends = gateway().backends.list()
    named = next((backend for backend in backends if root(backend.url) == root(url)), None)
    if named is None:
        raise invalid("policy_base_url", f"{url} is no LLM backend here: register it by POST /v1/backends")
    rest = [backend for backend in backends if not backend.draining]
    differing = ", ".join(sorted(backend.id for backend in rest if backend.model != named.model))
    if differing:
        raise invalid(
            "policy_base_url",
            f"{url} serves {named.model!r}, and a rollout goes to any backend, also to {differing} "
            "with another model: drain those",
        )


def _refused(row: RunRequest, problem: ApiProblem) -> dict[str, Any]:
    status = problem.problem.status
    why = "infrastructure" if status in INFRASTRUCTURE or status == 404 else "task"
    return answers.failed(row.repeated(), why, problem.problem.detail or problem.problem.title)
