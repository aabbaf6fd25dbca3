"""An agent server of NeMo Gym: `/`, `/run`, `/v1/responses`, `/aggregate_metrics`."""

from __future__ import annotations

from typing import Any

import redis
from flask import Blueprint, Response, jsonify
from kombu.exceptions import OperationalError
from pydantic import ValidationError

from services.engines.address import root
from services.gateway import calls
from services.gateway.auth import needs
from services.gateway.bodies import body_json
from services.gateway.context import gateway
from services.gateway.instances import as_instance_problem
from services.gateway.nemo_gym import (
    AggregateRequest,
    RunRequest,
    aggregate,
    answer,
    failed,
    response,
    rollout_request,
)
from services.gateway.problems import ApiProblem, from_validation, invalid
from services.state.api_keys import Scope
from services.state.jobs import digest_of

blueprint = Blueprint("nemo_gym", __name__)

API = "nemo-gym"
INFRASTRUCTURE = (429, 503)
"""Statuses of a refusal after which another attempt may do better."""
Started = tuple[RunRequest, dict[str, Any], "calls.Call | ApiProblem"]
"""A row, its `responses_create_params` as they came, and its rollout or why there is none."""


@blueprint.get("/")
@needs(None)
def alive() -> Response:
    """200 while the process lives."""
    return jsonify(status="ok")


@blueprint.post("/run")
@needs(Scope.SUBMIT)
def run() -> Response:
    """Submit the rollout of a row and answer when it has ended. Every failure is a row, too."""
    row, params, call = calls.once(lambda: _begin(_object()))
    if isinstance(call, ApiProblem):
        return jsonify(_refused(row, params, call))
    try:
        # An id that the row names itself may come again; indices begin anew with every collection.
        found = calls.finish(call, replay_s=calls.REPLAY_S if row.rollout_id else 0.0)
    except ApiProblem as problem:
        # The row counts as failed, and another attempt has another id.
        calls.abandon(gateway(), call)
        return jsonify(_refused(row, params, problem))
    except (redis.RedisError, OperationalError) as error:
        return jsonify(failed(row, params, "infrastructure", f"Redis does not answer: {error}"))
    return jsonify(answer(row, params, found, gateway().tasks.handlers().get(found.handler)))


@blueprint.post("/v1/responses")
@needs(Scope.SUBMIT)
def responses() -> Response:
    """The same without a score: the body is what `responses_create_params` of a row is."""
    _, params, call = calls.once(lambda: _begin({"responses_create_params": _object()}))
    if isinstance(call, ApiProblem):
        raise call
    found = calls.finish(call, replay_s=0.0)
    return jsonify(response(params, found, gateway().tasks.handlers().get(found.handler)))


@blueprint.post("/aggregate_metrics")
@needs(Scope.READ)
def aggregate_metrics() -> Response:
    """Numbers of many answers of `/run`. Nothing is read but the body."""
    try:
        wanted = AggregateRequest.model_validate(body_json())
    except ValidationError as error:
        raise from_validation(error) from None
    return jsonify(aggregate(wanted.verify_responses))


def _object() -> dict[str, Any]:
    body = body_json()
    if not isinstance(body, dict):
        raise invalid("(body)", "must be an object")
    return body


def _begin(body: dict[str, Any]) -> Started:
    """Read a row and submit its rollout.

    Raises:
        ApiProblem: 400; the body is no row. What else goes wrong is answered as the row's failure.
    """
    gate = gateway()
    try:
        row = RunRequest.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    params = body["responses_create_params"]
    try:
        request = rollout_request(row, calls.handlers(), gate.settings)
        if row.policy_base_url is not None:
            _check_policy(row.policy_base_url)
        name = row.name
        # Another row under the same indices is another rollout: they are unique within a collection only.
        job = name and calls.key_of(API, name, digest_of(request.model_dump_json()))
        return row, params, calls.begin(request, job)
    except ApiProblem as problem:
        return row, params, as_instance_problem(problem, "(row)")
    except (redis.RedisError, OperationalError) as error:
        return row, params, ApiProblem(503, "Service unavailable", f"Redis does not answer: {error}")


def _check_policy(url: str) -> None:
    """Refuse a policy that the rollout might not be sampled from.

    Raises:
        ApiProblem: 400; it is no backend here, or not all backends serve the same model.
    """
    backends = gateway().backends.list()
    named = next((backend for backend in backends if root(backend.url) == root(url)), None)
    if named is None:
        raise invalid("policy_base_url", f"{url} is no LLM backend here: register it by POST /v1/backends")
    others = sorted({one.id for one in backends if one.model != named.model and not one.draining})
    if others:
        raise invalid(
            "policy_base_url",
            f"{url} serves {named.model!r}, and a rollout goes to any backend, also to {', '.join(others)} "
            "with another model: drain those",
        )


def _refused(row: RunRequest, params: dict[str, Any], problem: ApiProblem) -> dict[str, Any]:
    status = problem.problem.status
    why = "infrastructure" if status in INFRASTRUCTURE or status == 404 else "task"
    return failed(row, params, why, problem.problem.detail or problem.problem.title)
