"""Whether a program's answer is the expected one. Runs on the worker: what is expected never leaves it."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

TOLERANCE = 1e-6
"""Absolute or relative, where the expected number is not an integer."""


def same_output(given: str, expected: str) -> bool:
    """Printed text: equal line by line but for spaces; fractional numbers may differ by a millionth.

    Case counts, and so does the order of lines.
    """
    lines, right = _lines(given), _lines(expected)
    return len(lines) == len(right) and all(map(_same_line, lines, right))


def _lines(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.replace("\0", "").splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(given: list[str], expected: list[str]) -> bool:
    return len(given) == len(expected) and all(map(_same_word, given, expected))


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    try:
        number, right = Decimal(given), Decimal(expected)
    except InvalidOperation:
        return False
    if not (number.is_finite() and right.is_finite()):
        return False
    if expected.lstrip("+-").isdigit():  # an integer is exact, however it is written
        return number == right
    return math.isclose(float(number), float(right), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_value(given: Any, expected: Any) -> bool:
    """What a function returned, as JSON carries it: tuples are lists, keys are text."""
    if isinstance(expected, bool) or isinstance(given, bool):
        return given is expected
    if isinstance(expected, int | float) and isinstance(given, int | float):
        if isinstance(expected, int) and isinstance(given, int):
            return given == expected
        return math.isclose(given, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(expected, list) and isinstance(given, list):
        return len(given) == len(expected) and all(map(same_value, given, expected))
    if isinstance(expected, dict) and isinstance(given, dict):
        right = {str(key): value for key, value in expected.items()}
        return given.keys() == right.keys() and all(same_value(given[key], right[key]) for key in given)
    return type(given) is type(expected) and given == expected
