"""Rows of the compatible APIs: which handler a data source is for. Their forms are known to the handlers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict

from rollout.schema import FieldError, HandlerInfo
from services.gateway.bodies import read_json
from services.gateway.problems import ApiProblem, invalid

DEFAULT_SOURCE = "swebench"
HANDLERS = {
    "swebench": "swe",
    "swe-bench": "swe",
    "swe-gym": "swe",
    "r2e-gym": "swe",
    "deepscaler": "math",
    "math": "math",
    "deepcoder": "code",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "code": "code",
    "stem": "stem",
    "reasoning_gym": "reasoning_gym",
}
"""Data source → handler; `ROLLOUT_DATA_SOURCES` adds to it."""
SERVICE_FIELDS = frozenset({"data_source", "data_kind", "instance_id", "trajectory_id"})
"""Fields of an instance that are the service's, and the task's only where its handler's schema names them."""


class Open(BaseModel):
    """Unknown keys are kept: a row has whatever its data set has."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


def handler_of(source: str, known: Mapping[str, Any], more: Mapping[str, str]) -> str:
    """The handler of a data source. One that is called like a handler is that handler's.

    Args:
        known: Handlers that workers have announced.
        more: What the deployment adds to `HANDLERS`.

    Raises:
        ApiProblem: 400; there is none.
    """
    name = source.strip().lower()
    handler = more.get(name) or HANDLERS.get(name) or (source if source in known else None)
    if handler is None:
        message = f"no handler for {source!r}; {there_are(known, more)}"
        raise invalid("instance.data_source", message)
    return handler


def there_are(known: Mapping[str, Any], more: Mapping[str, str]) -> str:
    """What may be named, for the message to who named something else."""
    return f"there are: {', '.join(sorted({*HANDLERS, *more, *known}))}; set ROLLOUT_DATA_SOURCES"


def task_of(info: HandlerInfo | None, instance: Mapping[str, Any]) -> dict[str, Any]:
    """The task that an instance is: its field `task`, or all that it has beside the service's own.

    Args:
        info: What the handler announced; None = no worker has announced it.
    """
    if isinstance(task := instance.get("task"), dict):
        return dict(task)
    service_fields = SERVICE_FIELDS - (info.task_schema.get("properties", {}).keys() if info else set())
    return {name: value for name, value in instance.items() if name not in service_fields}


def whole(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The instance in the metadata of a row, with what NeMo Gym's own SWE rows have in `instance_dict`."""
    packed = metadata.get("instance_dict")
    inner = _parsed(packed) if isinstance(packed, str) else None
    if not isinstance(inner, dict):
        return dict(metadata)
    return inner | {name: value for name, value in metadata.items() if name != "instance_dict"}


def unpacked(info: HandlerInfo | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Values of metadata, which must be texts there: those of fields that take no text, read as JSON."""
    schema = info.task_schema if info else {}
    values = dict(metadata)
    for name in metadata.keys() & schema.get("properties", {}).keys():
        field = {"$defs": schema.get("$defs", {}), **schema["properties"][name]}
        if isinstance(metadata[name], str) and not Draft202012Validator(field).is_valid(metadata[name]):
            values[name] = _parsed(metadata[name])
    return values


def _parsed(text: str) -> Any:
    """The value of a JSON text, or the text itself."""
    try:
        return read_json(text.encode(errors="backslashreplace"))
    except ApiProblem:
        return text


def as_instance_problem(problem: ApiProblem, where: str = "instance") -> ApiProblem:
    """A refusal that speaks of the instance, where the caller knows of no task."""
    body = problem.problem
    errors = [FieldError(field=_renamed(error.field, where), message=error.message) for error in body.errors]
    detail = "" if errors else body.detail
    return ApiProblem(body.status, body.title, detail, errors, headers=problem.headers)


def _renamed(field: str, where: str) -> str:
    if field == "handler":
        return f"{where}.data_source"
    return where + field.removeprefix("task") if field == "task" or field.startswith("task.") else field
