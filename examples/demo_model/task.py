"""The calculator task: a question in words, one bash call, the number as the answer.

Invariant: `make_tasks(n, seed)` is a pure function of its arguments, on every machine.

    user       37 times 85
    assistant  <tool_call>{"name": "execute_bash", "arguments": {"command": "echo $((37*85))"}}</tool_call>
    tool       3145
    assistant  3145
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

LARGEST = 99
"""Operands are drawn from 1 to this; two digits keep a conversation below 100 tokens."""

OPERATORS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", lambda a, b: a + b),
    "minus": ("-", lambda a, b: a - b),
    "times": ("*", lambda a, b: a * b),
    # Both operands are positive, so Python's floor and bash's truncation agree.
    "over": ("/", lambda a, b: a // b),
}
"""Word in the question → operator in bash's `$(( ))`, and what it computes."""

_QUESTION = re.compile(r"(\d+) (\w+) (\d+)")
_NUMBER = re.compile(r"-?\d+")


def make_tasks(n: int, seed: int) -> list[dict[str, str]]:
    """Draw `n` tasks, `{"question": "37 times 85", "answer": "3145"}`.

    Operators are uniform, operands are uniform in 1..LARGEST; repeats are possible.
    """
    rng = random.Random(seed)
    words = sorted(OPERATORS)
    tasks = []
    for _ in range(n):
        a, word, b = rng.randint(1, LARGEST), rng.choice(words), rng.randint(1, LARGEST)
        tasks.append({"question": f"{a} {word} {b}", "answer": str(OPERATORS[word][1](a, b))})
    return tasks


def parse_question(question: str) -> tuple[int, str, int]:
    """`"37 times 85"` → `(37, "times", 85)`; ValueError for any other text."""
    match = _QUESTION.fullmatch(question.strip())
    if match is None or match[2] not in OPERATORS:
        raise ValueError(
            f"question {question!r} is not of this task; expected `<number> <{'|'.join(OPERATORS)}> <number>`"
        )
    return int(match[1]), match[2], int(match[3])


def bash_command(a: int, symbol: str, b: int) -> str:
    """The command a trained policy writes, e.g. `echo $((37*85))`."""
    return f"echo $(({a}{symbol}{b}))"


def score(final_message: str, answer: str) -> float:
    """1.0 when the last number in `final_message` is `answer`, else 0.0."""
    numbers = _NUMBER.findall(final_message)
    return float(bool(numbers) and numbers[-1] == answer)
