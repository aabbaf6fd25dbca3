"""Fields that tasks of several handlers share, and that datasets spell in several ways.

The gateway checks tasks by their JSON schema alone, so the schema must tell of every spelling, too.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, WithJsonSchema

OTHER_NAMES = {
    "problem": ("question", "prompt"),
    "answer": ("ground_truth", "expected_answer"),
}
"""What these fields are also read as."""

PROBLEM, ANSWER = (AliasChoices(name, *others) for name, others in OTHER_NAMES.items())

_VALUE = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "number"}]}
MAX_ANSWERS = 100
_SEVERAL = {"type": "array", "items": _VALUE, "minItems": 1, "maxItems": MAX_ANSWERS}


def _as_texts(value: object) -> object:
    values = value if isinstance(value, list) else [value]
    return [str(one) if isinstance(one, int | float) and not isinstance(one, bool) else one for one in values]


def _not_blank(values: list[str]) -> list[str]:
    if not all(one.strip() for one in values):
        raise ValueError("an answer is empty")
    return values


Problem = Annotated[str, Field(min_length=1, max_length=100_000)]
Answers = Annotated[
    list[str],
    Field(min_length=1, max_length=MAX_ANSWERS),
    BeforeValidator(_as_texts),
    AfterValidator(_not_blank),
    WithJsonSchema({"anyOf": [*_VALUE["anyOf"], _SEVERAL]}),
]
"""A string, a number or a list of them; always a list of strings once it is read."""


def tell_other_names(schema: dict[str, Any]) -> None:
    """Put the other names into a model's JSON schema; for `json_schema_extra`."""
    required = schema.get("required", [])
    schema["required"] = [name for name in required if name not in OTHER_NAMES]
    schema["allOf"] = []
    for name, others in OTHER_NAMES.items():
        told = {**schema["properties"][name], "description": f"The same as {name}."}
        schema["properties"] |= dict.fromkeys(others, told)
        # Not `anyOf` of all names: of what is missing it would say that the whole task fits none.
        another = {"anyOf": [{"required": [other]} for other in others]}
        schema["allOf"].append({"if": another, "else": {"required": [name]}})
