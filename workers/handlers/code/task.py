"""Tasks of the handler `code`, and the forms in which published datasets carry their tests."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workers.handlers.fields import NULL, RowTask, object_of, parsed, problem_of, truth_of

MAX_CASES = 1000
MAX_CASE_CHARS = 8 << 20
"""Of one input or output. Some judges' largest tests are a few MB."""
PROMPTS = ("prompt", "question", "problem", "description", "problem_statement")
"""Names of the problem's text, as datasets have it."""


class Case(BaseModel):
    """One hidden test. Either `stdin` and `stdout`, or `args` and `expected` of a function call."""

    model_config = ConfigDict(extra="forbid")

    stdin: str | None = Field(default=None, max_length=MAX_CASE_CHARS)
    stdout: str | None = Field(default=None, max_length=MAX_CASE_CHARS)
    args: list[Any] | None = None
    expected: Any = None
    any_of: list[Any] | None = None
    """Further accepted results of a function call."""

    @model_validator(mode="after")
    def _of_one_kind(self) -> Case:
        if (self.stdin is None) != (self.stdout is None):
            raise ValueError("a case of standard input needs both `stdin` and `stdout`")
        if (self.stdin is None) == (self.args is None):
            raise ValueError("a case has either `stdin` and `stdout`, or `args` and `expected`")
        return self

    @property
    def is_call(self) -> bool:
        """Whether a function is called; else the program reads standard input."""
        return self.args is not None


SOLUTIONS = ("solutions", "solution", "canonical_solution")
PYTHON3 = (3, "PYTHON3")
"""Python 3 among the languages of code_contests."""
TESTS = (
    *("tests", "input_output", "reward_model", "public_tests", "private_tests", "generated_tests"),
    *("public_test_cases", "private_test_cases"),
)
"""Names of the hidden tests, as datasets have them."""


def _any_form(schema: dict[str, Any]) -> None:
    """What the gateway checks: that there is a problem and that there are tests, under any of their names."""
    for name in ("prompt", "tests", "solutions"):
        schema["properties"][name] = {"title": name, "description": schema["properties"][name]["description"]}
    schema.pop("required")
    schema["allOf"] = [{"anyOf": [{"required": [name]} for name in names]} for names in (PROMPTS, TESTS)]
    schema["properties"] = {
        name: {"anyOf": [described, NULL]} for name, described in schema["properties"].items()
    }


class CodeTask(RowTask):
    """A programming problem with hidden tests."""

    model_config = ConfigDict(json_schema_extra=_any_form, use_attribute_docstrings=True)

    prompt: str = Field(min_length=1)
    """The problem; also as question, problem, description, or a list of chat messages."""
    tests: list[Case] = Field(min_length=1, max_length=MAX_CASES)
    """Hidden: a list of {stdin, stdout} or {args, expected}; or as published sets do."""
    fn_name: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """The function to call, plain or a method of a class `Solution`; needed where cases have `args`."""
    starter_code: str = ""
    time_limit_s: float = Field(default=6.0, gt=0, le=120)
    """For one case."""
    memory_limit_mb: int = Field(default=512, ge=32, le=16384)
    """For one case."""
    score: Literal["all", "fraction"] = "all"
    """Reward 1 when every case passes, or the share of those that do."""
    solutions: list[str] = Field(default_factory=list)
    """Programs that solve it, for `rollout tasks check`; also as solution."""

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> dict[str, Any]:
        """A row of APPS, TACO, Eurus-2, code_contests, DeepCoder or LiveCodeBench.

        Raises:
            ValueError: Its tests are in none of the known forms.
        """
        task = row | {"prompt": problem_of(row, PROMPTS), "solutions": _solutions(row)}
        tests = _json(row.get("tests"), "tests")
        if isinstance(tests, list):
            return task | {"tests": tests}
        tests = _json(tests or row.get("input_output") or truth_of(row), "input_output")
        if isinstance(tests, list):
            return task | _live_code_bench(row, tests)
        if tests is not None:
            return task | _from_input_output(tests)
        columns = [row.get(name) for name in ("public_tests", "private_tests", "generated_tests")]
        if any(columns):
            return task | {"tests": [case for column in columns for case in _from_columns(column)]}
        published = [row[name] for name in ("public_test_cases", "private_test_cases") if name in row]
        if published:
            cases = [case for column in published for case in _json(column, "test_cases") or []]
            return task | _live_code_bench(row, cases)
        return task

    @model_validator(mode="after")
    def _callable(self) -> CodeTask:
        if self.fn_name is None and any(case.is_call for case in self.tests):
            raise ValueError("cases with `args` need `fn_name`, the function to call")
        return self


def _solutions(row: dict[str, Any]) -> list[str]:
    """The programs of a row in any form; of several languages those in Python."""
    value = next((row[name] for name in SOLUTIONS if row.get(name)), None)
    value = parsed(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value
    if isinstance(value, dict):  # code_contests: columns, and languages by number
        pairs = zip(value.get("language") or [], value.get("solution") or [], strict=False)
        value = [text for language, text in pairs if language in PYTHON3]
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _json(value: Any, field: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{field} is no JSON: {error}") from None


def _from_input_output(tests: Any) -> dict[str, Any]:
    inputs, outputs = map(tests.get, ("inputs", "outputs")) if isinstance(tests, dict) else (None, None)
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        raise ValueError("input_output needs `inputs` and `outputs`, lists of the same length")
    pairs = zip(inputs, outputs, strict=True)
    if fn_name := tests.get("fn_name"):
        return {"fn_name": fn_name, "tests": [_call(*pair) for pair in pairs]}
    return {"tests": [{"stdin": _lines(given), "stdout": _lines(expected)} for given, expected in pairs]}


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _call(given: Any, expected: Any) -> dict[str, Any]:
    # The published graders of APPS accept a result in a list of its own.
    more = [expected[0]] if isinstance(expected, list) and len(expected) == 1 else []
    return {"args": given if isinstance(given, list) else [given], "expected": expected, "any_of": more}


def _from_columns(column: Any) -> list[dict[str, Any]]:
    if not column:
        return []
    pairs = zip(column["input"], column["output"], strict=True)
    return [{"stdin": given, "stdout": expected} for given, expected in pairs]


def _live_code_bench(row: dict[str, Any], cases: list[dict[str, Any]]) -> dict[str, Any]:
    metadata = object_of(row, "metadata") or object_of(object_of(row, "extra_info"), "metadata")
    return {
        "tests": [_live_code_bench_case(case) for case in cases],
        "fn_name": metadata.get("func_name") or row.get("fn_name"),
        "starter_code": row.get("starter_code") or "",
    }


def _live_code_bench_case(case: dict[str, Any]) -> dict[str, Any]:
    if case.get("testtype") == "functional":
        args = [json.loads(line) for line in case["input"].splitlines() if line.strip()]
        return {"args": args, "expected": json.loads(case["output"])}
    return {"stdin": case["input"], "stdout": case["output"]}
