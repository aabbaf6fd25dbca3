"""The API as an OpenAPI 3.1 document, made from what the routes declare (`http.operation`)."""

from __future__ import annotations

import re
from functools import lru_cache
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

_PROBLEMS = {
    400: "A parameter or the body does not fit; `errors` names the fields",
    401: "No valid API key",
    403: "The key, or its tenant, may not do this",
    404: "There is none, or not for this tenant",
    409: "Not with what is there already",
    410: "It has ended",
    413: "The body is too large",
    415: "The body is not declared as what it has to be: JSON, as a rule",
    429: "Over quota, or too much that waits for this tenant; Retry-After says when to try again",
    503: "Redis does not answer, or something else that is needed; Retry-After says when to try again",
}
"""Answers with a problem document (RFC 9457), by status."""
_PLACE = re.compile(r"<(?:\w+:)?(\w+)>")
"""A parameter in the path of a rule."""
_REFERENCE = "#/components/schemas/{model}"
_ARRAYS = {
    **STRING,
    "format": "binary",
    "description": "{v, json, records}: JSON without trajectories, these as typed arrays; see docs/api.md",
}


def _schema(value: Schema) -> Any:
    return {"$ref": _REFERENCE.format(model=value.__name__)} if isinstance(value, type) else value


def _answer(text: str, schema: Any = None, media: str = JSON) -> dict[str, Any]:
    return {"description": text} | ({"content": {media: {"schema": schema}}} if schema else {})


def _described(rule: str, declared: Operation, *, public: bool) -> dict[str, Any]:
    """One operation, with its problems beside those of every call that is not public."""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": STRING} for name in _PLACE.findall(rule)
    ]
    problems = {*declared.problems} | (set() if public else {401, 403, 503})
    problems |= ({400} if rule.startswith("/v1/") else set()) | ({404} if parameters else set())
    schemas = declared.query.model_json_schema(ref_template=_REFERENCE).get("properties", {})
    for name, field in declared.query.model_fields.items():
        schema = schemas[field.alias or name]
        schema = schema.get("anyOf", [schema])[0]  # no parameter is null: it is left out
        parameters.append(
            {
                "name": field.alias or name,
                "in": "header" if field.alias else "query",
                "schema": {key: schema[key] for key in schema.keys() - {"title", "description", "default"}},
                "description": field.description,
            }
        )
    operation: dict[str, Any] = {"summary": declared.summary}
    if parameters:
        operation["parameters"] = parameters
    if declared.takes or declared.body:
        problems |= {400, 413, 415}
        schemas = [_schema(model) for model in declared.body] or [{**STRING, "format": "binary"}]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        content = {declared.takes or JSON: {"schema": schema}}
        operation["requestBody"] = {"required": declared.empty is None, "content": content}
    responses = operation["responses"] = {
        str(status): _answer(_PROBLEMS[status], _schema(Problem), "application/problem+json")
        for status in sorted(problems)
    }
    for status, schema in declared.answers.items():
        answer = _answer(HTTPStatus(status).phrase, _schema(schema), declared.media)
        if declared.arrays:
            answer["content"][MEDIA_TYPE] = {"schema": _ARRAYS}
        responses[str(status)] = answer
    return operation


@lru_cache(maxsize=1)
def document(app: Flask) -> dict[str, Any]:
    """The whole document of an application, made once."""
    models: dict[tuple[type[BaseModel], Any], None] = {(Problem, "serialization"): None}
    paths: dict[str, dict[str, Any]] = {}
    for rule in app.url_map.iter_rules():
        view = app.view_functions[rule.endpoint]
        declared = getattr(view, "operation", None)
        if declared is None:
            continue
        models |= {(model, "validation"): None for model in declared.body}
        answered = (schema for schema in declared.answers.values() if isinstance(schema, type))
        models |= {(model, "serialization"): None for model in answered}
        path = paths.setdefault(_PLACE.sub(r"{\1}", rule.rule), {})
        for method in sorted(rule.methods - {"OPTIONS"} - ({"HEAD"} if "GET" in rule.methods else set())):
            public = scope_of(view, method) is None
            path[method.lower()] = _described(rule.rule, declared, public=public)
    _, schemas = models_json_schema([*models], ref_template=_REFERENCE)
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
