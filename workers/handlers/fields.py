"""Tasks that may also be rows of published data sets, and the fields that several domains share.

A row is taken as its set has it: the problem under one of several names or as chat messages, the answer
within `reward_model`, columns of objects as JSON text, and null where a row has nothing. Each task's
`from_row` makes its own fields of that. The gateway checks tasks by their JSON schema alone, so the schema
tells of it, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema, model_validator

from rollout.datasets import user_text

PROBLEM = ("problem", "question", "prompt", "problem_statement")
"""Names of the problem's text."""
ANSWER = ("answer", "ground_truth", "expected_answer")
"""Names of the accepted answer, which may also be `reward_model.ground_truth`."""
MAX_ANSWERS = 100


class RowTask(BaseModel):
    """A task that is also read from a row of a data set."""

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> dict[str, Any]:
        """The task's own fields from a row, in which nothing is null.

        Raises:
            ValueError: The row is in none of the known forms.
        """
        return row

    @model_validator(mode="before")
    @classmethod
    def _of_row(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return cls.from_row({name: value for name, value in data.items() if value is not None})


def parsed(value: Any) -> Any:
    """What a column holds that may have been made JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def object_of(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object in a column; an empty one where there is none."""
    value = parsed(row.get(name))
    return value if isinstance(value, dict) else {}


def truth_of(row: Mapping[str, Any]) -> Any:
    """`reward_model.ground_truth`, as sets made for verl have it; None = the row has none."""
    return object_of(row, "reward_model").get("ground_truth")


def problem_of(row: Mapping[str, Any], names: Sequence[str] = PROBLEM) -> Any:
    """The problem's text under the first name that has one; where none has, whatever there is."""
    values = [row[name] for name in names if name in row]
    texts = [user_text(value) if isinstance(value, list) else value for value in values]
    whole = (text for text in texts if isinstance(text, str) and text.strip())
    return next(whole, texts[0] if texts else None)


def with_problem_and_answer(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its problem and its answer under `problem` and `answer`."""
    answers = [row[name] for name in ANSWER if name in row] or [truth_of(row)]
    shared = {"problem": problem_of(row), "answer": answers[0]}
    return row | {name: value for name, value in shared.items() if value is not None}


_VALUE = {"anyOf": [{"type": "string", "minLength": 1}, {"type": "number"}]}
_SEVERAL = {"type": "array", "items": _VALUE, "minItems": 1, "maxItems": MAX_ANSWERS}
CHAT = {"type": "array", "items": {"type": "object"}, "minItems": 1}
NULL = {"type": "null"}
OBJECT = {"type": ["object", "string"]}
"""An object, or one as JSON text."""


def _as_texts(value: object) -> object:
    values = value if isinstance(value, list) else [value]
    return [
        str(item) if isinstance(item, int | float) and not isinstance(item, bool) else item for item in values
    ]


def _not_blank(values: list[str]) -> list[str]:
    if not all(item.strip() for item in values):
        raise ValueError("an answer is empty")
    return values


Problem = Annotated[
    str,
    Field(min_length=1, max_length=100_000),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1, "maxLength": 100_000}, CHAT]}),
]
Answers = Annotated[
    list[str],
    Field(min_length=1, max_length=MAX_ANSWERS),
    BeforeValidator(_as_texts),
    AfterValidator(_not_blank),
    WithJsonSchema({"anyOf": [*_VALUE["anyOf"], _SEVERAL]}),
]
"""A string, a number or a list of them; always a list of strings once it is read."""
JsonObject = Annotated[dict[str, Any], BeforeValidator(parsed), WithJsonSchema(OBJECT)]


def tell_of_rows(schema: dict[str, Any]) -> None:
    """Tell a model's JSON schema of the names that problem and answer have in rows, and of columns that are
    null; for `json_schema_extra`.
    """
    properties = schema["properties"]
    within = {"reward_model": OBJECT | {"required": ["ground_truth"]}}
    schema["allOf"] = []
    for name, *aliases in (PROBLEM, ANSWER):
        own = properties[name]
        properties |= {alias: {**own, "description": f"The same as {name}."} for alias in aliases}
        under_alias = [{"required": [alias], "properties": {alias: {"not": NULL}}} for alias in aliases]
        if name == "answer":
            under_alias.append({"required": ["reward_model"], "properties": within})
        # Not `anyOf` of all names: of what is missing it would say that the whole task fits none.
        need = {"required": [name], "properties": {name: own}}
        schema["allOf"].append({"if": {"anyOf": under_alias}, "else": need})
        schema["required"].remove(name)
    schema["properties"] = {
        name: {"anyOf": [described, NULL]} for name, described in properties.items()
    } | within
