"""Tasks of reasoning-gym, made and scored by the package itself.

Runs in scorer processes: imports take seconds, and some of its scorers evaluate what a model wrote as Python.
Those get evaluators here that only know numbers, lists and the functions of school mathematics.
"""

from __future__ import annotations

import ast
import difflib
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from typing import Any

import reasoning_gym
import sympy
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

# -- no evaluation of what a model wrote -----------------------------------------------------------

MAX_EXPRESSION_CHARS = 10_000
_EXPRESSION = re.compile(r"(?:[\d\s+\-*/^(),!]|\.(?!\s*[A-Za-z_])|[A-Za-z]\w*)*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FUNCTIONS = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth"),
    *("asin", "acos", "atan", "acot", "asec", "acsc", "asinh", "acosh", "atanh", "acoth"),
    *("exp", "log", "ln", "sqrt", "cbrt", "Abs", "sign", "floor", "ceiling", "factorial", "pi", "oo"),
    *("erf", "erfi", "Ei", "li", "Si", "Ci", "Shi", "Chi"),
}
_sympy_parse_expr = sympy.parse_expr


def parse_expr(text: str, *args: Any, **kwargs: Any) -> Any:
    """sympy's `parse_expr`, which runs its text as Python, for texts that are formulas and nothing else.

    Raises:
        ValueError: The text has other names, strings, attributes or brackets in it.
    """
    if len(text) > MAX_EXPRESSION_CHARS or not _EXPRESSION.fullmatch(text):
        raise ValueError("not a formula")
    unknown = [name for name in _NAME.findall(text) if len(name) > 1 and name not in _FUNCTIONS]
    if unknown:
        raise ValueError(f"unknown name {unknown[0]!r} in a formula")
    return _sympy_parse_expr(text, *args, **kwargs)


_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}


def evaluate(text: str) -> Any:
    """Literals, lists and integer arithmetic, in the place of `eval`.

    Raises:
        ValueError, SyntaxError: There is something else in it.
    """

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](number(node.left), number(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](number(node.operand))
        return ast.literal_eval(node)

    def number(node: ast.AST) -> Any:
        operand = value(node)
        if not isinstance(operand, int | float):
            raise ValueError("arithmetic takes numbers")
        return operand

    return value(ast.parse(text.strip(), mode="eval").body)


_EVALUATING = (
    "algorithmic.binary_matrix",
    "algorithmic.number_sorting",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "arithmetic.bitwise_arithmetic",
    "games.n_queens",
)
_PARSING = ("games.countdown", "games.puzzle24")


def _disarm() -> None:
    for name in _EVALUATING:
        # A module's own name goes before the builtin one.
        vars(import_module(f"reasoning_gym.{name}"))["eval"] = evaluate
    for name in _PARSING:
        vars(import_module(f"reasoning_gym.{name}"))["parse_expr"] = parse_expr
    sympy.parse_expr = parse_expr


_disarm()

# -- tasks -----------------------------------------------------------------------------------------


_EXECUTING = {"codeio"}
"""Their entries are made by running code, as the user of the worker and with all that it may do."""


class Refused(Exception):
    """The task's data make no entry."""


@lru_cache(maxsize=128)
def _dataset(name: str, options: str) -> ProceduralDataset:
    if name in _EXECUTING:
        raise Refused(f"the dataset {name!r} runs programs that its package brings, which nothing here may")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 3) or sorted(DATASETS)
        raise Refused(f"reasoning-gym has no dataset {name!r}; there are {', '.join(map(repr, near))}")
    config = json.loads(options)
    try:
        if name == "composite":
            parts = [DatasetSpec(**{"config": {}, "weight": 1, **part}) for part in config["datasets"]]
            if executing := _EXECUTING & {part.name for part in parts}:
                raise Refused(f"the dataset {executing.pop()!r} runs programs, which nothing here may")
            config["datasets"] = parts
        return reasoning_gym.create_dataset(name, **config)
    except (AssertionError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise Refused(f"the dataset {name!r} cannot be made with {options}: {error}") from error


def _made(task: dict[str, Any]) -> tuple[ProceduralDataset, dict[str, Any]]:
    """The dataset and the entry of a task, which names a place in it or is an entry as a row of a file.
    Refused where there is no such dataset, configuration or entry."""
    options = dict(task.get("config") or {})
    if (entry := task.get("entry")) is not None:
        if task["dataset"] in _TUPLES:
            entry = {**entry, "metadata": _tuples(entry["metadata"])}
        return _dataset(task["dataset"], json.dumps(options, sort_keys=True)), entry
    if task.get("size") is not None:
        options["size"] = task["size"]
    dataset = _dataset(task["dataset"], json.dumps({**options, "seed": task["seed"]}, sort_keys=True))
    index = task["index"]
    if task.get("size") is None and index >= dataset.size:
        options["size"] = index + 1
        dataset = _dataset(task["dataset"], json.dumps({**options, "seed": task["seed"]}, sort_keys=True))
    if not 0 <= index < dataset.size:
        raise Refused(f"index {index} is outside of a dataset of {dataset.size} entries")
    return dataset, dataset[index]


_TUPLES = {"arc_agi", "rearc"}
"""Their scorers compare tuples with tuples, and JSON has made them lists."""


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def entry(task: dict[str, Any]) -> dict[str, Any]:
    """The question of a task; or `refused`, the reason why there is none."""
    try:
        return {"question": _made(task)[1]["question"]}
    except Refused as refused:
        return {"refused": str(refused)}


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """The answer of a task that its scorer takes for right; or `refused`, the reason why there is none."""
    try:
        return {"answer": solution(_made(task)[1])}
    except Refused as refused:
        return {"refused": str(refused)}


def judge(payload: dict[str, Any]) -> dict[str, Any]:
    """The package's own score of `answer` to `task`; of its own solution if `answer` is None.

    `asked` is what the model was asked, where that is known: `other` says that the task made here asks for
    something else.
    """
    dataset, made = _made(payload["task"])
    if payload["asked"] is not None and made["question"] not in payload["asked"]:
        return {"other": made["question"]}
    answer = solution(made) if payload["answer"] is None else payload["answer"]
    return {"score": _score(dataset, made, answer)}


def _score(dataset: ProceduralDataset, made: dict[str, Any], answer: str) -> float:
    name = made["metadata"].get("source_dataset")
    if name in _LOOSE and not _LOOSE[name](answer, made):
        return 0.0
    try:
        return float(dataset.score_answer(answer, made))
    except MemoryError:
        raise
    except Exception:
        # Some raise on what is not of their form. It is the answer's fault if they can score their own.
        dataset.score_answer(solution(made), made)
        return 0.0


def solution(made: dict[str, Any]) -> str:
    """A right answer; the empty string where the package knows none (`boxnet`, `rush_hour`)."""
    if made["answer"] is not None:
        return made["answer"]
    metadata = made["metadata"]
    for key in ("example_answer", "example_correct_answer", "possible_answer"):
        if key in metadata:
            return metadata[key] if isinstance(metadata[key], str) else json.dumps(metadata[key])
    return ""


# -- where the package's scorer takes nearly anything ------------------------------------------------


def _same_word(answer: str, made: dict[str, Any]) -> bool:
    return answer.strip().rstrip(".").casefold() == made["answer"].casefold()


def _same_number(answer: str, made: dict[str, Any]) -> bool:
    try:
        number, right = Fraction(answer.replace(",", "")), Fraction(made["answer"])
    except (ValueError, ZeroDivisionError):
        return False
    return abs(number - right) <= Fraction(1, 10_000)


def _given_numbers(answer: str, made: dict[str, Any]) -> bool:
    used = [int(digits) for digits in re.findall(r"\d+", answer)]
    return sorted(used) == sorted(made["metadata"]["numbers"])


_LOOSE: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    # 0.1.25 compares the truth of two non-empty strings: everything is right.
    "game_of_life_halting": _same_word,
    # 0.1.25 gives full marks to every prefix of the number, such as `0`.
    "coin_flip": _same_number,
    # 0.1.25 takes any four numbers that make 24, such as 1, 1, 4 and 6, whatever the question gave.
    "puzzle24": _given_numbers,
}
