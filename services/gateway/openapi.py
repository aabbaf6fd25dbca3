"""The API as an OpenAPI 3.1 document, made from what the routes declare (`http.operation`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from flask import Flask
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import rollout
from rollout.arrays import MEDIA_TYPE
from rollout.schema import Problem
from services.gateway.auth import scope_of
from services.gateway.http import JSON, STRING, Operation, Schema

EXTENSION = "openapi"
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
_ARRAYS = {
    **STRING,
    "format": "binary",
    "description": "{v, json, records}: JSON without trajectories, these as typed arrays; see docs/api.md",
}


def _schema(value: Schema) -> Any:
    return {"$ref": f"#/components/schemas/{value.__name__}"} if isinstance(value, type) else value


def _body(schema: Any) -> dict[str, Any]:
    return {"required": True, "content": {JSON: {"schema": schema}}}


def _answer(text: str, schema: Any = None, media: str = JSON) -> dict[str, Any]:
    return {"description": text} | ({"content": {media: {"schema": schema}}} if schema else {})


def _operation(
    summary: str, answers: dict[str, Any], *problems: int, public: bool = False, **more: Any
) -> dict[str, Any]:
    """One operation, with its problems beside those of every call that is not public."""
    statuses = {*problems} if public else {*problems, 401, 403, 503}
    refusals = {
        str(status): _answer(_PROBLEMS[status], _schema(Problem), "application/problem+json")
        for status in sorted(statuses)
    }
    return {"summary": summary, "responses": refusals | answers, **more}


def _described(rule: str, declared: Operation, *, public: bool) -> dict[str, Any]:
    names = re.findall(r"<(\w+)>", rule)
    problems, more = {*declared.problems}, {}
    if rule.startswith("/v1/"):
        problems.add(400)
    if names:
        problems.add(404)
        more["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": STRING} for name in names
        ]
    if declared.query:
        more["parameters"] = more.get("parameters", []) + [
            {
                "name": query.header or name,
                "in": "header" if query.header else "query",
                "schema": query.schema,
                "description": query.text,
            }
            for name, query in declared.query.items()
        ]
    if declared.body:
        problems |= {400, 413, 415}
        schemas = [_schema(model) for model in declared.body]
        body = _body(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
        more["requestBody"] = body | {"required": declared.empty is None}
    answers = {}
    for status, schema in declared.answers.items():
        answers[str(status)] = _answer(HTTPStatus(status).phrase, _schema(schema), declared.media)
        if declared.arrays:
            answers[str(status)]["content"][MEDIA_TYPE] = {"schema": _ARRAYS}
    return _operation(declared.summary, answers, *problems, public=public, **more)


def _operations(app: Flask) -> Iterator[tuple[str, str, Any]]:
    """Path, method and view of each route that declares an operation."""
    for rule in app.url_map.iter_rules():
        view = app.view_functions[rule.endpoint]
        if hasattr(view, "operation"):
            for method in sorted(rule.methods - {"HEAD", "OPTIONS"}):
                yield rule.rule, method, view


def document(app: Flask) -> dict[str, Any]:
    """The whole document of an application, made once."""
    if EXTENSION not in app.extensions:
        app.extensions[EXTENSION] = _document(app)
    return app.extensions[EXTENSION]


def _document(app: Flask) -> dict[str, Any]:
    models: dict[tuple[type[BaseModel], Any], None] = {(Problem, "serialization"): None}
    paths: dict[str, dict[str, Any]] = {}
    for rule, method, view in _operations(app):
        declared = view.operation
        models |= {(model, "validation"): None for model in declared.body}
        answered = (schema for schema in declared.answers.values() if isinstance(schema, type))
        models |= {(model, "serialization"): None for model in answered}
        public = scope_of(view, method) is None
        path = paths.setdefault(re.sub(r"<(\w+)>", r"{\1}", rule), {})
        path[method.lower()] = _described(rule, declared, public=public)
    _, schemas = models_json_schema([*models], ref_template="#/components/schemas/{model}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout service", "version": rollout.__version__},
        "paths": paths,
        # `{}`: without a key where none is configured, from the gateway's own machine.
        "security": [{"key": []}, {}],
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key, rlt_ID_SECRET."}
            },
        },
    }
