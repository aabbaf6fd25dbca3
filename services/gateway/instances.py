"""Rows of the compatible APIs as tasks: which handler a data source is for, and where its fields are.

Rows come as trainers have them: the problem may be a list of chat messages, the answer in `reward_model`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollout.schema import FieldError
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
"""Of an instance: for the service and not for the task, but for an `instance_id` of SWE rows."""
_PROBLEM = ("problem", "question", "prompt", "problem_statement")
_ANSWER = ("answer", "ground_truth", "expected_answer")
_STEM = ("kind", "choices", "unit", "unit_required", "rel_tolerance", "abs_tolerance")


def handler_of(source: str, known: Mapping[str, Any], more: Mapping[str, str]) -> str:
    """The handler of a data source. One that is called like a handler is that handler's.

    Args:
        known: Handlers that workers have announced.
        more: What the deployment adds to `HANDLERS`.

    Raises:
        ApiProblem: 400; there is none.
    """
    name = source.strip().lower()
    found = more.get(name) or HANDLERS.get(name) or (source if source in known else None)
    if found is None:
        there = ", ".join(sorted({*HANDLERS, *more, *known}))
        raise invalid(
            "instance.data_source", f"no handler for {source!r}; there are: {there}; set ROLLOUT_DATA_SOURCES"
        )
    return found


def task_of(handler: str, instance: Mapping[str, Any]) -> dict[str, Any]:
    """The task that an instance is. Handlers that are not built in get `instance["task"]`, or all its fields.

    Raises:
        ApiProblem: 400 naming a field.
    """
    make = _TASKS.get(handler)
    if make is not None:
        return make(instance)
    if isinstance(task := instance.get("task"), dict):
        return dict(task)
    return {name: value for name, value in instance.items() if name not in SERVICE_FIELDS}


def as_instance_problem(problem: ApiProblem, where: str = "instance") -> ApiProblem:
    """A refusal that speaks of the instance, where the caller knows of no task."""
    body = problem.problem
    errors = [FieldError(field=_renamed(error.field, where), message=error.message) for error in body.errors]
    detail = f"{errors[0].field}: {errors[0].message}" if errors else body.detail
    return ApiProblem(body.status, body.title, detail, errors, headers=problem.headers)


def _renamed(field: str, where: str) -> str:
    if field == "handler":
        return f"{where}.data_source"
    return where + field.removeprefix("task") if field == "task" or field.startswith("task.") else field


def _swe(instance: Mapping[str, Any]) -> dict[str, Any]:
    task = {name: value for name, value in instance.items() if name not in SERVICE_FIELDS - {"instance_id"}}
    kind = str(instance.get("data_kind") or "").lower()
    if "docker_image" in task and "r2e" not in kind and not task.get("expected_output_json"):
        # In a row of our own it would tell R2E-Gym; here it is the image of any row.
        image = task.pop("docker_image")
        task.setdefault("image", image)
    if task.get("instance_id") is not None:
        task["instance_id"] = str(task["instance_id"])
    return task


def _math(instance: Mapping[str, Any]) -> dict[str, Any]:
    return {"problem": _problem(instance), "answer": _answer(instance)}


def _stem(instance: Mapping[str, Any]) -> dict[str, Any]:
    extra = _object(instance.get("extra_info"))
    told = {name: row[name] for row in (extra, instance) for name in _STEM if row.get(name) is not None}
    return _math(instance) | told


def _code(instance: Mapping[str, Any]) -> dict[str, Any]:
    task = {name: value for name, value in instance.items() if name not in SERVICE_FIELDS}
    task["prompt"] = _problem(instance)
    truth = _parsed(_truth(instance))
    if isinstance(truth, list) and not task.get("tests"):
        # As DeepCoder and LiveCodeBench have them: `input`, `output` and what kind of test it is.
        task["private_test_cases"] = truth
        extra = _object(instance.get("extra_info"))
        task["metadata"] = _object(instance.get("metadata")) or _object(extra.get("metadata"))
        del task["reward_model"]
    return task


def _reasoning_gym(instance: Mapping[str, Any]) -> dict[str, Any]:
    extra = _object(instance.get("extra_info"))
    row = {name: value for name, value in {**extra, **instance}.items() if name not in SERVICE_FIELDS}
    task = {
        name: row[name]
        for name in ("dataset", "seed", "index", "size", "config", "partial_credit")
        if row.get(name) is not None
    }
    if "seed" in task:
        return task
    metadata = _object(row.get("metadata")) or extra
    return task | {"question": _problem(instance), "answer": _answer(instance), "metadata": metadata}


_TASKS = {
    "swe": _swe,
    "math": _math,
    "math_tools": _math,
    "stem": _stem,
    "stem_tools": _stem,
    "code": _code,
    "code_text": _code,
    "reasoning_gym": _reasoning_gym,
}


def _problem(instance: Mapping[str, Any]) -> str:
    for name in _PROBLEM:
        value = instance.get(name)
        text = said(value) if isinstance(value, list) else value
        if isinstance(text, str) and text.strip():
            return text
    raise invalid("instance", f"has no text under any of {', '.join(_PROBLEM)}")


def said(messages: list[Any]) -> str:
    """What the user says in chat messages, or in the input of a Responses request."""
    texts = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in (None, "user"):
            continue
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if isinstance(content, str) and content:
            texts.append(content)
    return "\n\n".join(texts)


def _answer(instance: Mapping[str, Any]) -> Any:
    found = next((instance[name] for name in _ANSWER if instance.get(name) is not None), None)
    found = _truth(instance) if found is None else found
    if found is None:
        names = ", ".join(_ANSWER)
        raise invalid("instance", f"has no answer under any of {names}, reward_model.ground_truth")
    return found


def _truth(instance: Mapping[str, Any]) -> Any:
    return _object(instance.get("reward_model")).get("ground_truth")


def _object(value: Any) -> dict[str, Any]:
    value = _parsed(value)
    return value if isinstance(value, dict) else {}


def _parsed(value: Any) -> Any:
    """What a field is that may have been made text, as Parquet files have it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
