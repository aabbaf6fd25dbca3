"""The HTTP of ProRL-Agent-Server at the gateway's root: a `/process` body becomes a rollout, and its end the
result object.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import structlog
from flask import Blueprint, Response, jsonify
from pydantic import AfterValidator, BaseModel, Field, ValidationError, WithJsonSchema

from rollout.schema import BackendRequest, HandlerInfo, Limits, RolloutRequest, SamplingParams, State
from rollout.schema.base import MAX_INT53
from services.engines.address import root
from services.gateway import metrics
from services.gateway.auth import caller
from services.gateway.compat import calls
from services.gateway.compat.prorl_result import RESULT, Ids, result
from services.gateway.compat.rows import DEFAULT_SOURCE, Open, as_instance_problem, handler_of, task_of
from services.gateway.context import gateway
from services.gateway.http import operation
from services.gateway.problems import ApiProblem, from_validation, invalid
from services.gateway.routes.backends import register
from services.gateway.waiting import waiter
from services.settings import Settings
from services.state.api_keys import Scope
from services.state.jobs import REPLAY_S, digest_of
from services.state.prorl import ProrlStore

log = structlog.get_logger("gateway")
blueprint = Blueprint("prorl", __name__)

API = "prorl"
TAG = "api:prorl"
"""The tag of every rollout that came by `/process`."""
NO_EFFECT = frozenset(
    {
        *("model", "api_key", "max_model_len", "custom_tokenizer", "native_tool_calling"),
        *("ensure_thinking_end_properly", "strict_loop_detector"),
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


_NAME = {"type": ["string", "integer"], "maxLength": MAX_NAME}
Name = Annotated[Any, AfterValidator(_name), WithJsonSchema(_NAME)]
"""Ids are numbers in some data sets, and are handed back as they came."""
JobId = Annotated[Name, AfterValidator(_not_empty), WithJsonSchema({**_NAME, "minLength": 1})]


class InstanceParams(Open):
    """What the service reads of an instance; the rest is the task."""

    data_source: Annotated[str, Field(max_length=200)] | None = None
    """None = `swebench`."""
    instance_id: Name | None = None
    trajectory_id: Name | None = None


class ProrlSampling(Open):
    """What has an effect of `sampling_params`; None = not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_output_tokens: int | None = None
    max_tokens: int | None = None
    max_iterations: int | None = Field(None, ge=1, le=1000)
    """Most turns."""
    compact: bool | None = None
    """True: no prompt is repeated in `input_ids`; each message has its own `token_ids`."""
    token_level_generation: bool | None = None
    """True: every message has `token_ids`, `logprobs` and `input_ids` (null), which trainers read of each."""

    @property
    def ids(self) -> Ids:
        """The messages that are to carry ids."""
        if self.token_level_generation:
            return "all"
        return "compact" if self.compact else "sampled"

    def sampling(self) -> dict[str, Any]:
        """As `SamplingParams` has it."""
        limit = self.max_tokens if self.max_output_tokens is None else self.max_output_tokens
        given = self.model_dump(include={"temperature", "top_p", "top_k"}) | {"max_tokens": limit}
        return {name: value for name, value in given.items() if value is not None}


class ProcessRequest(Open):
    """Body of `POST /process`."""

    instance: InstanceParams
    sampling_params: ProrlSampling | None = None
    job_id: JobId | None = None

    @property
    def named_by_task(self) -> bool:
        """Whether its job has the name of its task, under which all repeats of the task come."""
        task = self.instance.instance_id
        return None not in (self.job_id, task) and str(self.job_id) == str(task)


class JobRequest(BaseModel):
    """Body of `POST /cancel`."""

    job_id: JobId


class AddressRequest(BaseModel):
    """Body of `POST /add_llm_server`."""

    address: str = Field(max_length=512)
    """A URL such as `http://gpu1:8000/v1`."""


def rollout_request(
    body: ProcessRequest, handlers: Mapping[str, HandlerInfo], settings: Settings, run: int
) -> RolloutRequest:
    """The rollout that a `/process` asks for, without an id.

    Args:
        run: Number of the API's run: instances of one name are a group within it.

    Raises:
        ApiProblem: 400 naming a field of the body.
    """
    instance, given = body.instance, body.sampling_params or ProrlSampling()
    unknown = sorted(given.model_extra.keys() - NO_EFFECT)
    if unknown:
        log.warning("sampling parameters without effect", names=unknown)
    handler = handler_of(instance.data_source or DEFAULT_SOURCE, handlers, settings.data_source_handlers)
    named = instance.model_dump(exclude_none=True, include=set(InstanceParams.model_fields))
    task = task_of(handlers.get(handler), instance.model_extra | named)
    limits = dict.fromkeys(("init_timeout_s", "run_timeout_s", "eval_timeout_s"), settings.prorl_timeout_s)
    if given.max_iterations is not None:
        limits["max_turns"] = given.max_iterations
    try:
        sampling = SamplingParams.model_validate(given.sampling())
    except ValidationError as error:
        raise from_validation(error, "sampling_params.") from None
    group = None
    if instance.instance_id not in (None, ""):
        group = f"prorl-{digest_of(run, handler, instance.instance_id)}"
    return RolloutRequest(
        handler=handler,
        task=task,
        group_id=group,
        sampling=sampling,
        limits=Limits(**limits),
        tags=[TAG, _tag(body.job_id)] if body.named_by_task else [TAG],
        metadata={"instance_id": instance.instance_id, "trajectory_id": instance.trajectory_id},
    )


# -- routes ---------------------------------------------------------------------------------------


def _store() -> ProrlStore:
    return ProrlStore(gateway().redis)


def _job(*names: str | int) -> str:
    """The key in Redis of a job, whose id counts until the next `/stop`."""
    number = _store().run(caller().tenant.name).number
    return calls.key_of(API, str(number), *map(str, names))


def _job_of(body: ProcessRequest) -> str | None:
    """The key of the one rollout that a body names; None: it names none, or several alike."""
    if body.job_id is None or not body.named_by_task:
        return None if body.job_id is None else _job(body.job_id)
    repeat = body.instance.trajectory_id
    return None if repeat in (None, "") else _job(body.job_id, repeat)


def _tag(job_id: str | int) -> str:
    """The tag of rollouts whose job has the name of their task."""
    return f"job:{digest_of(job_id)}"


@blueprint.post("/start")
@operation(400, scope=Scope.SUBMIT)
def start() -> Response:
    """ProRL: take jobs again after a `/stop`; 400 when that is so already, as the clients expect."""
    if not _store().start(caller().tenant.name):
        raise ApiProblem(400, "Running already", "POST /stop ends what runs; nothing needs to be done")
    return jsonify(status="started")


@blueprint.post("/stop")
@operation(scope=Scope.SUBMIT)
def stop() -> Response:
    """ProRL: cancel the caller's jobs, and take none until the next `/start`."""
    gate, tenant = gateway(), caller().tenant.name
    jobs = _store().stop(tenant)
    words = [word for word, _ in gate.dispatcher.cancel_many(jobs, tenant)]
    _store().ended(tenant, *jobs)
    return jsonify(status="stopped", cancelled=sum(word in ("cancelled", "cancelling") for word in words))


@blueprint.post("/process")
@operation(404, 409, 429, answers={200: RESULT}, scope=Scope.SUBMIT)
def process(body: ProcessRequest) -> Response:
    """ProRL: submit a rollout and answer when it has ended."""
    call = waiter().remember("call", lambda: _begin(body))
    body.instance = {}  # it may be large, and the request may wait for long
    rollout, replayed = calls.finish(call, replay_s=REPLAY_S)
    _store().ended(call.tenant, call.rollout_id)
    info = gateway().tasks.handlers().get(rollout.handler)
    ids = body.sampling_params.ids if body.sampling_params else "sampled"
    return jsonify(result(rollout, info, ids=ids, replayed=replayed))


def _begin(body: ProcessRequest) -> calls.Call:
    gate, tenant = gateway(), caller().tenant.name
    run = _store().run(tenant)
    if run.running is False:
        raise ApiProblem(409, "Stopped", "POST /stop was called: POST /start first")
    request = rollout_request(body, calls.handlers(), gate.settings, run.number)
    job = _job_of(body)
    try:
        call = calls.begin(request, job, before=lambda rollout_id: _store().began(tenant, rollout_id))
    except ApiProblem as problem:
        raise as_instance_problem(problem) from None
    if _store().run(tenant).number != run.number:
        # A /stop came in between, and may not have seen it.
        gate.dispatcher.cancel(call.rollout_id, tenant)
    return call


@blueprint.post("/cancel")
@operation(scope=Scope.SUBMIT)
def cancel(body: JobRequest) -> Response:
    """ProRL: cancel a job; its `/process` is answered. One that is unknown or has ended is no error."""
    gate, tenant = gateway(), caller().tenant.name
    rollout_id = gate.jobs.find(_job(body.job_id))
    if rollout_id is None:
        ids = gate.rollouts.ids(tag=_tag(body.job_id), tenant=tenant, limit=10**9)
    else:
        ids = [rollout_id]
    words = {word for word, _ in gate.dispatcher.cancel_many(ids, tenant)}
    return jsonify(status=status_of(words))


def status_of(words: Collection[str]) -> str:
    """What is said of several that were cancelled: what still has to be waited for first."""
    return next((word for word in ("cancelling", "cancelled", "ended") if word in words), "unknown")


@blueprint.post("/add_llm_server")
@operation(scope=Scope.OPERATE)
def add_llm_server(body: AddressRequest) -> Response:
    """ProRL: register an LLM server for all rollouts of the service. Twice is harmless."""
    gate, tenant = gateway(), caller().tenant.name
    address = body.address
    try:
        server = BackendRequest(url=address)
    except ValidationError as error:
        raise invalid("address", error.errors()[0]["msg"]) from None
    made = all(root(backend.url) != root(address) for backend in gate.backends.list())
    try:
        backend = register(server)
    except ApiProblem as problem:
        raise invalid("address", problem.problem.detail.removeprefix("url: ")) from None
    _store().add_server(tenant, address, backend.id, made=made)
    return jsonify(status="added", backend=backend.id)


@blueprint.post("/clear_llm_server")
@operation(scope=Scope.OPERATE)
def clear_llm_server() -> Response:
    """ProRL: remove the LLM servers that were added so; rollouts under way wait for others."""
    gate = gateway()
    for backend_id in _store().clear_servers(caller().tenant.name):
        gate.backends.remove(backend_id)
    return jsonify(status="cleared")


@blueprint.get("/status")
@operation()
def status() -> Response:
    """ProRL: the caller's jobs, and how many rollouts of the service are where."""
    gate, tenant = gateway(), caller().tenant.name
    jobs = _store().jobs(tenant)
    states = {job: gate.rollouts.state(job, tenant) for job in jobs}
    _store().ended(tenant, *(job for job, state in states.items() if state and state.terminal))
    live = [state for state in states.values() if state and not state.terminal]
    running = _store().run(tenant).running
    counts = _counts(gate.rollouts.counts(), metrics.queue_depths(gate))
    return jsonify(
        status={None: "not started", True: "running", False: "stopped"}[running],
        running=bool(running),
        pending_jobs=len(live),
        jobs=sum(state is not State.QUEUED for state in live),
        llm_servers=_store().servers(tenant),
        total=sum(counts.values()),
        **counts,
    )


def _counts(states: dict[str, int], queues: dict[str, int]) -> dict[str, Any]:
    """Rollouts by what they wait for, and by the stage that works on them."""
    waits = sum(depth for name, depth in queues.items() if name.split(".")[0] == "eval")
    # One state is both: waiting for EVAL, and in it.
    waits = min(waits, states[State.EVALUATING])
    return {
        "init_queue": states[State.QUEUED],
        "run_queue": states[State.READY],
        "eval_queue": waits,
        "active_init": states[State.INITIALIZING],
        "active_run": states[State.RUNNING],
        "active_eval": states[State.EVALUATING] - waits,
    }
