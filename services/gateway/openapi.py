"""The API as an OpenAPI 3.1 document, made from the same models that check requests."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import rollout
from rollout.arrays import MEDIA_TYPE
from rollout.batch import Batch, BatchList, BatchRequest, GroupPage, PromptsRequest, PromptsResponse
from rollout.policy import PolicyRequest, PolicyStatus, PolicyUpdate
from rollout.schema import (
    AckRequest,
    AckResponse,
    Backend,
    BackendRequest,
    CompletionPage,
    DrainRequest,
    HandlerInfo,
    Problem,
    RedeliverRequest,
    Rollout,
    RolloutPage,
    RolloutRequest,
    State,
    SubmitRequest,
    SubmitResponse,
)
from rollout.schema.fleet import Fleet
from services.gateway.compat import openapi as openapi_compatible

_JSON = "application/json"
_MODELS: list[type[BaseModel]] = [
    AckRequest,
    AckResponse,
    BackendRequest,
    BatchRequest,
    CompletionPage,
    DrainRequest,
    GroupPage,
    HandlerInfo,
    PolicyRequest,
    Problem,
    PromptsRequest,
    PromptsResponse,
    RedeliverRequest,
    Rollout,
    RolloutPage,
    RolloutRequest,
    SubmitRequest,
    SubmitResponse,
]
_ANSWERS: list[type[BaseModel]] = [Backend, Batch, BatchList, Fleet, PolicyStatus, PolicyUpdate]
"""Described as they are sent, with the values that are computed then."""


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {_JSON: {"schema": schema}}}


def _answer(text: str, schema: dict[str, Any] | None = None, media: str = _JSON) -> dict[str, Any]:
    return {"description": text} | ({"content": {media: {"schema": schema}}} if schema else {})


def _typed(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """JSON, or msgpack with typed arrays, as `Accept` says."""
    answer = _answer(text, schema)
    note = "{v, json, records}: the JSON without trajectories, and these as typed arrays; see docs/api.md"
    answer["content"][MEDIA_TYPE] = {"schema": {"type": "string", "format": "binary", "description": note}}
    return answer


def _query(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": text}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


_OBJECT = {"type": "object"}
_NUMBER, _STRING = {"type": "number", "minimum": 0}, {"type": "string"}
_WAIT = _query("wait", _NUMBER, "Seconds to wait for an answer (long-poll).")
_INCLUDE = _query("include", {"enum": ["trajectory", "summary"]}, "Whether trajectories come along.")
_LIMIT = _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}, "Most entries of a page.")
_TAG = _query("tag", _STRING, "Only rollouts with this tag.")
_TENANT = _query("tenant", _STRING, "Another tenant than the key's own, or * for all: needs the scope admin.")
_CURSOR = _query("cursor", _STRING, "Where the last page ended.")
_PROBLEMS = {
    400: "A parameter or the body does not fit; `errors` names the fields",
    401: "No valid API key",
    403: "The key, or its tenant, may not do this",
    404: "There is none, or not for this tenant",
    409: "Not with what is there already",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    429: "Over quota, or too much that waits for this tenant; Retry-After says when to try again",
    503: "Redis does not answer, or something else that is needed; Retry-After says when to try again",
}
"""Answers with a problem document (RFC 9457), by status."""
_BODY = (400, 413, 415)
"""Of operations that read a body."""

_BACKENDS = {
    "type": "object",
    "properties": {"backends": {"type": "array", "items": _ref(Backend)}},
    "required": ["backends"],
}


def _operation(
    summary: str, ok: dict[str, Any], *problems: int, public: bool = False, **more: Any
) -> dict[str, Any]:
    """One operation.

    Args:
        problems: Statuses that it can answer beside those of every call that is not public.
    """
    every = {*problems} if public else {*problems, 401, 403, 503}
    answers = {
        str(status): _answer(_PROBLEMS[status], _ref(Problem), "application/problem+json")
        for status in sorted(every)
    }
    return {"summary": summary, "responses": answers | ok, **more}


def _paths() -> dict[str, Any]:
    one_id = [_path("rollout_id")]
    backend_id, batch_id = [_path("backend_id")], [_path("batch_id")]
    return {
        "/v1/rollouts": {
            "post": _operation(
                "Submit one request or many; all or none",
                {"202": _answer("Accepted", _ref(SubmitResponse))},
                *_BODY,
                409,
                429,
                requestBody=_body({"anyOf": [_ref(RolloutRequest), _ref(SubmitRequest)]}),
            ),
            "get": _operation(
                "List rollouts, the newest first",
                {"200": _answer("Summaries", _ref(RolloutPage))},
                400,
                parameters=[
                    _query("state", {"enum": [state.value for state in State]}, "Only this state."),
                    _query("handler", _STRING, "Only this handler."),
                    _query("group_id", _STRING, "Only this group."),
                    _TAG,
                    _LIMIT,
                    _CURSOR,
                    _TENANT,
                ],
            ),
        },
        "/v1/rollouts/{rollout_id}": {
            "get": _operation(
                "One rollout",
                {"200": _typed("The rollout", _ref(Rollout))},
                400,
                404,
                429,
                parameters=[*one_id, _WAIT, _INCLUDE, _TENANT],
            )
        },
        "/v1/rollouts/{rollout_id}/cancel": {
            "post": _operation(
                "Cancel one rollout",
                {"200": _answer("What became of it", _OBJECT)},
                404,
                parameters=[*one_id, _TENANT],
            )
        },
        "/v1/rollouts/cancel": {
            "post": _operation(
                "Cancel by ids, group or tag",
                {"200": _answer("How many", _OBJECT)},
                *_BODY,
                parameters=[_TENANT],
                requestBody=_body(_OBJECT),
            )
        },
        "/v1/completions": {
            "get": _operation(
                "Rollouts in order of completion since a cursor",
                {"200": _typed("A page", _ref(CompletionPage))},
                400,
                429,
                parameters=[_CURSOR, _WAIT, _LIMIT, _TAG, _INCLUDE, _TENANT],
            )
        },
        "/v1/completions/stream": {
            "get": _operation(
                "The same as server-sent events; Last-Event-ID goes on where a stream was cut",
                {"200": _answer("Events: completion, expired, missed", _STRING, "text/event-stream")},
                400,
                429,
                parameters=[
                    _CURSOR,
                    _TAG,
                    _INCLUDE,
                    _TENANT,
                    {"name": "Last-Event-ID", "in": "header", "schema": _STRING},
                ],
            )
        },
        "/v1/batches": {
            "post": _operation(
                "Start a batch: groups of rollouts, of which informative ones are kept",
                {"202": _answer("Started, or there already", _ref(Batch))},
                *_BODY,
                409,
                429,
                requestBody=_body(_ref(BatchRequest)),
            ),
            "get": _operation(
                "List batches, the newest first",
                {"200": _answer("Batches", _ref(BatchList))},
                400,
                parameters=[_LIMIT, _TENANT],
            ),
        },
        "/v1/batches/{batch_id}": {
            "get": _operation(
                "One batch and its counters",
                {"200": _answer("The batch", _ref(Batch))},
                400,
                404,
                429,
                parameters=[*batch_id, _WAIT, _TENANT],
            )
        },
        "/v1/batches/{batch_id}/groups": {
            "get": _operation(
                "Groups in the order in which they were decided, since a cursor",
                {"200": _typed("A page", _ref(GroupPage))},
                400,
                404,
                429,
                parameters=[
                    *batch_id,
                    _CURSOR,
                    _WAIT,
                    _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Most groups."),
                    _query("include", {"enum": ["trajectory", "summary", "verdicts"]}, "What comes along."),
                    _query("verdict", {"enum": ["kept", "all"]}, "Only groups that were kept, or all."),
                    _TENANT,
                ],
            )
        },
        "/v1/batches/{batch_id}/prompts": {
            "post": _operation(
                "More prompts for a batch that is not closed",
                {"200": _answer("How many wait", _ref(PromptsResponse))},
                *_BODY,
                404,
                409,
                429,
                parameters=[*batch_id, _TENANT],
                requestBody=_body(_ref(PromptsRequest)),
            )
        },
        **{
            f"/v1/batches/{{batch_id}}/{action}": {
                "post": _operation(
                    text,
                    {"200": _answer("The batch", _ref(Batch))},
                    400,
                    404,
                    parameters=[*batch_id, _TENANT],
                )
            }
            for action, text in (
                ("pause", "Start no more groups; what runs goes on"),
                ("resume", "Start groups again"),
                ("cancel", "End a batch with all that is under way"),
            )
        },
        "/v1/rollouts/ack": {
            "post": _operation(
                "Acknowledge results that have arrived",
                {"200": _answer("How many", _ref(AckResponse))},
                *_BODY,
                parameters=[_TENANT],
                requestBody=_body(_ref(AckRequest)),
            )
        },
        "/v1/webhooks": {
            "get": _operation(
                "Webhooks on their way, and those given up", {"200": _answer("Webhooks", _OBJECT)}, 400
            )
        },
        "/v1/webhooks/redeliver": {
            "post": _operation(
                "Send webhooks of ended rollouts once more",
                {"200": _answer("How many", _OBJECT)},
                *_BODY,
                requestBody=_body(_ref(RedeliverRequest)),
            )
        },
        "/v1/handlers": {
            "get": _operation("Handlers and their task schemas", {"200": _answer("Handlers", _OBJECT)})
        },
        "/v1/status": {"get": _operation("The service at a glance", {"200": _answer("Status", _OBJECT)})},
        "/v1/fleet": {
            "get": _operation(
                "Workers, nodes and stages, with what they carry", {"200": _answer("Fleet", _ref(Fleet))}, 400
            )
        },
        "/v1/backends": {
            "get": _operation(
                "LLM backends, their load, health and weights", {"200": _answer("Backends", _BACKENDS)}, 400
            ),
            "post": _operation(
                "Register an LLM backend, or describe it anew",
                {"201": _answer("Registered", _ref(Backend))},
                *_BODY,
                409,
                requestBody=_body(_ref(BackendRequest)),
            ),
        },
        "/v1/backends/{backend_id}": {
            "get": _operation(
                "One LLM backend",
                {"200": _answer("The backend", _ref(Backend))},
                400,
                404,
                parameters=backend_id,
            ),
            "delete": _operation(
                "Forget an LLM backend",
                {"204": _answer("Gone")},
                400,
                404,
                409,
                parameters=[
                    *backend_id,
                    _query("force", {"type": "boolean"}, "false: not while in use."),
                ],
            ),
        },
        "/v1/backends/{backend_id}/drain": {
            "post": _operation(
                "Let an LLM backend take no new rollouts, or again some",
                {"200": _answer("The backend", _ref(Backend))},
                *_BODY,
                404,
                parameters=backend_id,
                requestBody={**_body(_ref(DrainRequest)), "required": False},
            )
        },
        "/v1/policy": {
            "get": _operation(
                "Current policy, update under way, latest updates",
                {"200": _answer("Policy", _ref(PolicyStatus))},
            ),
            "post": _operation(
                "Bring new weights to the LLM backends",
                {
                    "200": _answer("Ended", _ref(PolicyUpdate)),
                    "202": _answer("Under way", _ref(PolicyUpdate)),
                },
                *_BODY,
                409,
                requestBody=_body(_ref(PolicyRequest)),
            ),
        },
        "/v1/policy/updates/{update_id}": {
            "get": _operation(
                "One update of the policy",
                {"200": _answer("The update", _ref(PolicyUpdate))},
                400,
                404,
                parameters=[_path("update_id"), _WAIT],
            )
        },
        "/health": {"get": _operation("Alive", {"200": _answer("Alive", _OBJECT)}, public=True)},
        "/ready": {
            "get": _operation(
                "Ready for rollouts",
                {"200": _answer("Ready", _OBJECT), "503": _answer("What is missing", _OBJECT)},
                public=True,
            )
        },
        "/metrics": {
            "get": _operation("Prometheus metrics", {"200": _answer("Text", _STRING, "text/plain")})
        },
        "/openapi.json": {
            "get": _operation("This document", {"200": _answer("OpenAPI", _OBJECT)}, public=True)
        },
    }


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The whole document."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in _MODELS] + [(model, "serialization") for model in _ANSWERS],
        ref_template="#/components/schemas/{model}",
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout service", "version": rollout.__version__},
        "paths": _paths() | openapi_compatible.paths(_operation, _body, _answer),
        # `{}`: without a key where none is configured, from the gateway's own machine.
        "security": [{"key": []}, {}],
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key, rlt_ID_SECRET."}
            },
        },
    }
