"""The routes of ProRL-Agent-Server at the gateway's root, for clients that were written for it."""

from __future__ import annotations

from typing import Any, TypeVar

from flask import Blueprint, Response, jsonify
from pydantic import BaseModel, Field, ValidationError

from rollout.schema import BackendRequest, State
from services.engines.address import root
from services.gateway import calls, metrics
from services.gateway.auth import caller, needs
from services.gateway.bodies import body_json
from services.gateway.context import gateway
from services.gateway.instances import as_instance_problem
from services.gateway.problems import ApiProblem, from_validation, invalid
from services.gateway.prorl import Ids, JobId, ProcessRequest, result, rollout_request
from services.gateway.routes.backends import register
from services.state.api_keys import Scope

blueprint = Blueprint("prorl", __name__)

API = "prorl"
M = TypeVar("M", bound=BaseModel)


class CancelRequest(BaseModel):
    """Body of `POST /cancel`."""

    job_id: JobId


class AddressRequest(BaseModel):
    """Body of `POST /add_llm_server`."""

    address: str = Field(max_length=512)
    """For example `http://gpu1:8000/v1`."""


def _body(model: type[M]) -> M:
    try:
        return model.model_validate(body_json())
    except ValidationError as error:
        raise from_validation(error) from None


def _job(job_id: str | int) -> str:
    """Where a job is kept: its id counts until the next `/stop`."""
    number = gateway().prorl.run(caller().tenant.name).number
    return calls.key_of(API, str(number), str(job_id))


@blueprint.post("/start")
@needs(Scope.SUBMIT)
def start() -> tuple[Response, int]:
    """Take jobs again after a `/stop`; 400 when that is so already, as the clients expect."""
    if not gateway().prorl.start(caller().tenant.name):
        raise ApiProblem(400, "Running already", "POST /stop ends what runs; nothing needs to be done")
    return jsonify(status="started"), 200


@blueprint.post("/stop")
@needs(Scope.SUBMIT)
def stop() -> Response:
    """Cancel the caller's jobs, and take none until the next `/start`."""
    gate, tenant = gateway(), caller().tenant.name
    jobs = gate.prorl.stop(tenant)
    words = [word for word, _ in gate.dispatcher.cancel_many(jobs, tenant)]
    gate.prorl.ended(tenant, *jobs)
    return jsonify(status="stopped", cancelled=sum(word in ("cancelled", "cancelling") for word in words))


@blueprint.post("/process")
@needs(Scope.SUBMIT)
def process() -> Response:
    """Submit a rollout and answer when it has ended."""
    call, ids = calls.once(_begin)
    gate = gateway()
    found = calls.finish(call, replay_s=calls.REPLAY_S)
    gate.prorl.ended(call.tenant, call.rollout_id)
    info = gate.tasks.handlers().get(found.handler)
    return jsonify(result(found, info, ids=ids))


def _begin() -> tuple[calls.Call, Ids]:
    gate, tenant = gateway(), caller().tenant.name
    body = _body(ProcessRequest)
    run = gate.prorl.run(tenant)
    if run.running is False:
        raise ApiProblem(409, "Stopped", "POST /stop was called: POST /start first")
    request = rollout_request(body, calls.handlers(), gate.settings, run.number)
    ids = body.sampling_params.ids if body.sampling_params else "sampled"
    job = None if body.job_id is None else _job(body.job_id)
    try:
        call = calls.begin(request, job, before=lambda rollout_id: gate.prorl.began(tenant, rollout_id))
    except ApiProblem as problem:
        raise as_instance_problem(problem) from None
    if gate.prorl.run(tenant).number != run.number:
        # A /stop came in between, and may not have seen it.
        gate.dispatcher.cancel(call.rollout_id, tenant)
    return call, ids


@blueprint.post("/cancel")
@needs(Scope.SUBMIT)
def cancel() -> Response:
    """Cancel a job; its `/process` is answered. One that is unknown or has ended is no error."""
    gate, tenant = gateway(), caller().tenant.name
    job = _job(_body(CancelRequest).job_id)
    rollout_id = gate.jobs.find(job)
    if rollout_id is None:
        return jsonify(status="unknown")
    word, _ = gate.dispatcher.cancel(rollout_id, tenant)
    if word in ("cancelled", "cancelling"):
        # Who cancels knows how it ended: the same id again is another try.
        gate.jobs.answered(job, rollout_id, 0.0)
    return jsonify(status="unknown" if word == "gone" else word)


@blueprint.post("/add_llm_server")
def add_llm_server() -> Response:
    """Register an LLM server for all rollouts of the service. Twice is harmless."""
    gate, tenant = gateway(), caller().tenant.name
    address = _body(AddressRequest).address
    try:
        wanted = BackendRequest(url=address)
    except ValidationError as error:
        raise invalid("address", error.errors()[0]["msg"]) from None
    made = all(root(backend.url) != root(address) for backend in gate.backends.list())
    try:
        backend = register(wanted)
    except ApiProblem as problem:
        raise invalid("address", problem.problem.detail.removeprefix("url: ")) from None
    gate.prorl.add_server(tenant, address, backend.id, made=made)
    return jsonify(status="added", backend=backend.id)


@blueprint.post("/clear_llm_server")
def clear_llm_server() -> Response:
    """Remove the LLM servers that were added so; rollouts under way wait for others."""
    gate = gateway()
    for backend_id in gate.prorl.clear_servers(caller().tenant.name):
        gate.backends.remove(backend_id)
    return jsonify(status="cleared")


@blueprint.get("/status")
def status() -> Response:
    """The caller's jobs, and how many rollouts of the service are where."""
    gate, tenant = gateway(), caller().tenant.name
    jobs = gate.prorl.jobs(tenant)
    states = {one: gate.rollouts.state(one, tenant) for one in jobs}
    gate.prorl.ended(tenant, *(one for one, state in states.items() if state and state.terminal))
    live = [state for state in states.values() if state and not state.terminal]
    running = gate.prorl.run(tenant).running
    counts = _counts(gate.rollouts.counts(), metrics.queue_depths(gate.redis))
    return jsonify(
        status={None: "not started", True: "running", False: "stopped"}[running],
        running=bool(running),
        pending_jobs=len(live),
        jobs=sum(state is not State.QUEUED for state in live),
        llm_servers=gate.prorl.servers(tenant),
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
