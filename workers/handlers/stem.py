"""Science questions with short answers: `stem`, and `stem_tools` with a sandbox and perhaps a search."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from rollout.trajectory import Message
from services.settings import settings
from workers.agent.tools import ExecuteBash, ExecuteIPythonCell, Finish, Think, Tool
from workers.errors import TaskError
from workers.handlers.answers import boxed_answer, declared, in_box, last_words
from workers.handlers.base import EVERY_STAGE, AgentHandler, EvalContext, InitContext, Reward
from workers.handlers.fields import (
    Answers,
    Problem,
    RowTask,
    object_of,
    tell_of_rows,
    with_problem_and_answer,
)
from workers.handlers.packages import require
from workers.handlers.search import load_search
from workers.scoring import score, score_or_blame

JUDGE = "workers.scoring.short_answers:judge"
CHECK = "workers.scoring.short_answers:check"
SCORE_S = 10.0

Kind = Literal["choice", "numeric", "exact", "set"]

_NUMBER = re.compile(
    r"\s*[+−-]?\s*(?:\\[dt]?frac\s*(?:\{[^{}]*\}\s*\{[^{}]*\}|\d\s*\d)|\d[\d,]*(?:\.\d*)?(?:\s*/\s*\d+)?|\.\d+)"
    r"(?:[eE][+-]?\d+|\s*(?:\\times|\\cdot|×|·|\*|x)\s*10\s*\^?\s*\{?[+−-]?\d+\}?)?"
)
_BETWEEN_UNITS = re.compile(r"[\s·*/(){}^~\\,;.−-]+")
_UNIT = re.compile(r"[A-Za-zµμΩ°%Å⁻¹²³]+\d?|\d{1,2}")
_HOW: dict[str, str] = {
    "choice": "the letter of the right choice",
    "numeric": "a number{unit}",
    "exact": "a word or a short phrase",
    "set": "all items, separated by commas",
}


def _lettered(choices: object) -> object:
    if isinstance(choices, list):
        return dict(zip(ascii_uppercase, map(str, choices), strict=False))
    if isinstance(choices, dict):
        return {str(letter).strip().upper(): str(text) for letter, text in choices.items()}
    return choices


_CHOICE = {"type": ["string", "number"]}
Choices = Annotated[
    dict[str, str],
    BeforeValidator(_lettered),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": _CHOICE, "maxProperties": 26},
                {"type": "array", "items": _CHOICE, "maxItems": 26},
            ]
        }
    ),
]


def _tell(schema: dict[str, Any]) -> None:
    # Its default is told by the other fields.
    del schema["properties"]["kind"]["default"]
    tell_of_rows(schema)


class StemTask(RowTask):
    """A question and its answer."""

    model_config = ConfigDict(json_schema_extra=_tell)

    problem: Problem
    answer: Answers
    """One answer or several: all of a set and of a choice, any one of the other kinds."""
    kind: Kind = "exact"
    """Left out: `choice` with `choices`, `set` of a list, `numeric` if it starts so, else `exact`."""
    choices: Choices = Field(default_factory=dict, max_length=26)
    """By letter; a list is lettered from A."""
    unit: str = ""
    """Of the answer, if the answer does not name it."""
    unit_required: bool = False
    """Whether a number without a unit is wrong; else it is taken in the answer's unit."""
    rel_tolerance: float = Field(0.01, ge=0, le=1)
    """Part of the answer by which a number may differ."""
    abs_tolerance: float = Field(0.0, ge=0)
    """What it may differ by at least, in the answer's unit."""

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> dict[str, Any]:
        """What else the row has of a task may be in its `extra_info`."""
        extra = object_of(row, "extra_info")
        own = cls.model_fields.keys() - {"problem", "answer"}
        row = {name: extra[name] for name in own if extra.get(name) is not None} | row
        row = with_problem_and_answer(row)
        return row if row.get("kind") else row | {"kind": _kind(row)}

    @model_validator(mode="after")
    def _whole(self) -> StemTask:
        if self.kind == "choice" and len(self.choices) < 2:
            raise ValueError("a question of the kind 'choice' needs two `choices` or more")
        if any(len(letter) != 1 or letter not in ascii_uppercase for letter in self.choices):
            raise ValueError("`choices` go by one letter each")
        return self

    def judged(self, answer: str) -> dict[str, Any]:
        """What the scorer's process needs to judge an answer."""
        return {"gold": self.answer, "answer": answer} | self.model_dump(exclude={"problem", "answer"})


def _kind(row: Mapping[str, Any]) -> Kind:
    """The kind of a row that names none."""
    answer = row.get("answer")
    if row.get("choices"):
        return "choice"
    if isinstance(answer, list):
        return "set"
    if row.get("unit") or isinstance(answer, int | float) or _is_quantity(str(answer)):
        return "numeric"
    return "exact"


class Stem(AgentHandler[StemTask]):
    """Science without tools: a choice, a quantity, words or a set; reward 1 when it is right."""

    name = "stem"
    repeatable = EVERY_STAGE
    Task = StemTask

    async def init(self, ctx: InitContext[StemTask]) -> None:
        """Raises:
        TaskError: The answer cannot be read, so that none could ever be right.
        HandlerError: pint is not installed.
        """
        require("pint", extra="stem", handler=self.name)
        verdict = await score(CHECK, ctx.task.judged(""), timeout_s=SCORE_S)
        if verdict["problem"]:
            raise TaskError(f"task.answer: {verdict['problem']}")
        await super().init(ctx)

    def prompt(self, task: StemTask) -> list[Message]:
        return [Message(role="user", content=f"{_asked(task)}\n\nReason step by step, and {_put(task)}.")]

    def solution(self, task: StemTask) -> str:
        """The answer in a box; all of a set, and of a question with several right choices."""
        return in_box(_known(task))

    async def evaluate(self, ctx: EvalContext[StemTask]) -> Reward:
        task = ctx.task
        answer = boxed_answer(ctx.trajectory) or declared(last_words(ctx.trajectory))
        if answer is None:
            return Reward(0.0, {"correct": 0.0, "answered": 0.0})
        verdict = await score_or_blame(
            JUDGE, task.judged(answer), known=task.judged(_known(task)), timeout_s=SCORE_S
        )
        correct = float(verdict is not None and verdict["correct"])
        return Reward(correct, {"correct": correct, "answered": 1.0})


def _known(task: StemTask) -> str:
    whole = task.kind in ("set", "choice")
    return ", ".join(task.answer) if whole else task.answer[0]


def _is_quantity(text: str) -> bool:
    """Whether a text looks like a number with at most a unit: `2-butanol` and `1s2 2s2` do not."""
    if (number := _NUMBER.match(text)) is None:
        return False
    rest = text[number.end() :].rstrip()
    if rest[:1] and rest[0] in "-−,;:'.":
        return False
    return all(_UNIT.fullmatch(part) for part in _BETWEEN_UNITS.split(rest) if part)


def _asked(task: StemTask) -> str:
    lines = [f"{letter}. {text}" for letter, text in task.choices.items()]
    return "\n".join([task.problem, "", *lines]) if lines else task.problem


def _put(task: StemTask) -> str:
    how = _HOW[task.kind].format(unit=f" in {task.unit}" if task.unit else " with its unit, if it has one")
    if task.kind == "choice" and len(task.answer) > 1:
        how = "the letters of all right choices, separated by commas"
    return f"put your final answer, {how}, within \\boxed{{}}"


class StemTools(Stem):
    """Science with Python, a shell and, where the deployment has one, a search."""

    name = "stem_tools"
    uses_sandbox = True

    def __init__(self) -> None:
        search = load_search(settings())
        searches: Sequence[Tool] = (search,) if search else ()
        self.tools = (ExecuteIPythonCell(), ExecuteBash(), *searches, Think(), Finish())

    def prompt(self, task: StemTask) -> list[Message]:
        how = (
            f"Use the tools where they help. When you are done, call finish and {_put(task)} in its message."
        )
        return [Message(role="user", content=f"{_asked(task)}\n\n{how}")]
