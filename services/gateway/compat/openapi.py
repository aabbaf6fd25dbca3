"""The compatible APIs in the OpenAPI document. Their own words are loose, so most is told as objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OBJECT = {"type": "object"}
_STRING = {"type": "string"}
_NAME = {"type": ["string", "integer"]}
_PROCESS = {
    "type": "object",
    "required": ["instance"],
    "properties": {
        "instance": {
            "type": "object",
            "properties": {"data_source": _STRING, "instance_id": _NAME, "trajectory_id": _NAME},
        },
        "sampling_params": OBJECT,
        "job_id": {**_NAME, "minLength": 1, "maxLength": 1000},
    },
}
_RESULT = {
    "type": "object",
    "required": ["success", "filter", "resolved", "reward", "messages", "tools", "critical_error", "timing"],
    "properties": {
        "success": {"type": "boolean"},
        "filter": {"type": "boolean"},
        "resolved": {"type": "boolean"},
        "reward": {"type": ["number", "null"]},
        "messages": {"type": "array", "items": OBJECT},
        "tools": {"type": "array", "items": OBJECT},
        "timing": OBJECT,
    },
}
_PARAMS = {"type": "object", "properties": {"input": {"anyOf": [_STRING, {"type": "array"}]}}}
_ROW = {
    "type": "object",
    "required": ["responses_create_params"],
    "properties": {
        "responses_create_params": _PARAMS,
        "agent_ref": {"type": "object", "required": ["name"], "properties": {"name": _STRING}},
        "_ng_task_index": {"type": "integer"},
        "_ng_rollout_index": {"type": "integer"},
    },
}
_VERIFIED = {
    "type": "object",
    "required": ["responses_create_params", "response", "reward"],
    "properties": {"response": OBJECT, "reward": {"type": "number"}, "mask_sample": {"type": "boolean"}},
}
_ROWS = {
    "type": "object",
    "required": ["verify_responses"],
    "properties": {"verify_responses": {"type": "array", "items": OBJECT}},
}
_BODY = (400, 413, 415)


Part = Callable[..., dict[str, Any]]


def paths(operation: Part, body_of: Part, answer_of: Part) -> dict[str, Any]:
    """Operations by path, made with the functions that make all of the document."""

    def post(
        summary: str, reply: dict[str, Any], *problems: int, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        more = {} if body is None else {"requestBody": body_of(body)}
        statuses = problems if body is None else (*_BODY, *problems)
        return {"post": operation(summary, {"200": answer_of("Done", reply)}, *statuses, **more)}

    return {
        "/start": post("ProRL: take jobs; 400 when it does already", OBJECT, 400),
        "/stop": post("ProRL: cancel the caller's jobs and take none", OBJECT),
        "/process": post(
            "ProRL: submit a rollout, answered when it has ended", _RESULT, 404, 409, 429, body=_PROCESS
        ),
        "/cancel": post(
            "ProRL: cancel a job",
            OBJECT,
            body={"type": "object", "required": ["job_id"], "properties": {"job_id": _NAME}},
        ),
        "/add_llm_server": post(
            "ProRL: register an LLM backend",
            OBJECT,
            body={"type": "object", "required": ["address"], "properties": {"address": _STRING}},
        ),
        "/clear_llm_server": post("ProRL: remove the LLM backends that it registered", OBJECT),
        "/status": {"get": operation("ProRL: jobs, queues and stages", {"200": answer_of("Status", OBJECT)})},
        "/": {"get": operation("NeMo Gym: alive", {"200": answer_of("Alive", OBJECT)}, public=True)},
        "/run": post("NeMo Gym: roll out a row, answered when it has ended", _VERIFIED, body=_ROW),
        "/v1/responses": post("NeMo Gym: the same without a score", OBJECT, 404, 429, body=_PARAMS),
        "/aggregate_metrics": post("NeMo Gym: numbers of many answers of /run", OBJECT, body=_ROWS),
    }
