"""The API as an OpenAPI 3.1 document, made from the same models that check requests."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import rollout
from rollout.schema import (
    Backend,
    BackendRequest,
    CompletionPage,
    HandlerInfo,
    Problem,
    Rollout,
    RolloutPage,
    RolloutRequest,
    State,
    SubmitRequest,
    SubmitResponse,
)

_JSON = "application/json"
_MODELS: list[type[BaseModel]] = [
    Backend,
    BackendRequest,
    CompletionPage,
    HandlerInfo,
    Problem,
    Rollout,
    RolloutPage,
    RolloutRequest,
    SubmitRequest,
    SubmitResponse,
]


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {_JSON: {"schema": schema}}}


def _answer(text: str, schema: dict[str, Any] | None = None, media: str = _JSON) -> dict[str, Any]:
    return {"description": text} | ({"content": {media: {"schema": schema}}} if schema else {})


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
_CURSOR = _query("cursor", _STRING, "Where the last page ended.")
_PROBLEM = _answer("Problem document (RFC 9457)", _ref(Problem), "application/problem+json")


def _operation(summary: str, ok: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"summary": summary, "responses": {**ok, "default": _PROBLEM}, **more}


def _paths() -> dict[str, Any]:
    one_id = [_path("rollout_id")]
    return {
        "/v1/rollouts": {
            "post": _operation(
                "Submit one request or many; all or none",
                {"202": _answer("Accepted", _ref(SubmitResponse))},
                requestBody=_body({"anyOf": [_ref(RolloutRequest), _ref(SubmitRequest)]}),
            ),
            "get": _operation(
                "List rollouts, the newest first",
                {"200": _answer("Summaries", _ref(RolloutPage))},
                parameters=[
                    _query("state", {"enum": [state.value for state in State]}, "Only this state."),
                    _query("handler", _STRING, "Only this handler."),
                    _query("group_id", _STRING, "Only this group."),
                    _TAG,
                    _LIMIT,
                    _CURSOR,
                ],
            ),
        },
        "/v1/rollouts/{rollout_id}": {
            "get": _operation(
                "One rollout",
                {"200": _answer("The rollout", _ref(Rollout))},
                parameters=[*one_id, _WAIT, _INCLUDE],
            )
        },
        "/v1/rollouts/{rollout_id}/cancel": {
            "post": _operation(
                "Cancel one rollout", {"200": _answer("What became of it", _OBJECT)}, parameters=one_id
            )
        },
        "/v1/rollouts/cancel": {
            "post": _operation(
                "Cancel by ids, group or tag",
                {"200": _answer("How many", _OBJECT)},
                requestBody=_body(_OBJECT),
            )
        },
        "/v1/completions": {
            "get": _operation(
                "Rollouts in order of completion since a cursor",
                {"200": _answer("A page", _ref(CompletionPage))},
                parameters=[_CURSOR, _WAIT, _LIMIT, _TAG, _INCLUDE],
            )
        },
        "/v1/handlers": {
            "get": _operation("Handlers and their task schemas", {"200": _answer("Handlers", _OBJECT)})
        },
        "/v1/status": {"get": _operation("The service at a glance", {"200": _answer("Status", _OBJECT)})},
        "/v1/backends": {
            "get": _operation("LLM backends and their load", {"200": _answer("Backends", _OBJECT)}),
            "post": _operation(
                "Register an LLM backend",
                {"201": _answer("Registered", _ref(Backend))},
                requestBody=_body(_ref(BackendRequest)),
            ),
        },
        "/v1/backends/{backend_id}": {
            "delete": _operation(
                "Forget an LLM backend", {"204": _answer("Gone")}, parameters=[_path("backend_id")]
            )
        },
        "/health": {"get": _operation("Alive", {"200": _answer("Alive", _OBJECT)})},
        "/ready": {
            "get": _operation(
                "Ready for rollouts",
                {"200": _answer("Ready", _OBJECT), "503": _answer("What is missing", _OBJECT)},
            )
        },
        "/metrics": {
            "get": _operation("Prometheus metrics", {"200": _answer("Text", _STRING, "text/plain")})
        },
        "/openapi.json": {"get": _operation("This document", {"200": _answer("OpenAPI", _OBJECT)})},
    }


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The whole document."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in _MODELS], ref_template="#/components/schemas/{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout service", "version": rollout.__version__},
        "paths": _paths(),
        "components": {"schemas": schemas["$defs"]},
    }
