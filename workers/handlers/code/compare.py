"""Whether a program's answer is the expected one. Runs on the worker: what is expected never leaves it."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

TOLERANCE = 1e-6
"""Absolute or relative, where the expected number is not an integer."""


def same_output(said: str, wanted: str) -> bool:
    """Printed text: equal line by line but for spaces; fractional numbers may differ by a millionth.

    Case counts, and so does the order of lines.
    """
    ours, theirs = _lines(said), _lines(wanted)
    if ours == theirs:
        return True
    if len(ours) != len(theirs):
        return False
    return all(_same_line(a, b) for a, b in zip(ours, theirs, strict=True))


def _lines(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.replace("\0", "").splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(said: list[str], wanted: list[str]) -> bool:
    return len(said) == len(wanted) and all(map(_same_word, said, wanted))


def _same_word(said: str, wanted: str) -> bool:
    if said == wanted:
        return True
    try:
        ours, theirs = Decimal(said), Decimal(wanted)
    except InvalidOperation:
        return False
    if not (ours.is_finite() and theirs.is_finite()):
        return False
    if wanted.lstrip("+-").isdigit():  # an integer is exact, however it is written
        return ours == theirs
    return math.isclose(float(ours), float(theirs), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_value(said: Any, wanted: Any) -> bool:
    """What a function returned, as JSON carries it: tuples are lists, keys are text."""
    if isinstance(wanted, bool) or isinstance(said, bool):
        return said is wanted
    if isinstance(wanted, int | float) and isinstance(said, int | float):
        if isinstance(wanted, int) and isinstance(said, int):
            return said == wanted
        return math.isclose(said, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(wanted, list) and isinstance(said, list):
        return len(said) == len(wanted) and all(map(same_value, said, wanted))
    if isinstance(wanted, dict) and isinstance(said, dict):
        theirs = {str(key): value for key, value in wanted.items()}
        return said.keys() == theirs.keys() and all(same_value(said[key], theirs[key]) for key in said)
    return type(said) is type(wanted) and said == wanted
