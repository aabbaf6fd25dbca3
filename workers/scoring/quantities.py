"""Numbers with units as people write them: `9.81 m/s^2`, `1.2\\times10^{-3}\\,\\text{mol}`, `3/4`, `50%`.

Runs in scorer processes: units are parsed by pint.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

import pint

MAX_CHARS = 200
MAX_EXPONENT = 400

_units = pint.UnitRegistry(autoconvert_offset_to_baseunit=True)

_LATEX = [
    (re.compile(r"\^\s*\{\s*\\circ\s*\}"), "°"),
    (re.compile(r"\^\s*\{([^{}]*)\}"), r"^\1"),
    (re.compile(r"\\(?:text|mathrm|mathit|mathbf|textbf|rm|operatorname)\s*\{([^{}]*)\}"), r" \1"),
    (re.compile(r"\\(?:mathrm|text)\s+"), " "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}"), r"(\1)/(\2)"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
    (re.compile(r"\^\s*\\circ"), "°"),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\\(?:approx|sim|simeq|cong)(?![A-Za-z])"), "="),
    (re.compile(r"\\pm(?![A-Za-z])"), "±"),
    (re.compile(r"\\Omega(?![A-Za-z])"), "ohm"),
    (re.compile(r"\\mu(?![A-Za-z])\s*"), "µ"),
    (re.compile(r"\\AA|\\angstrom"), "angstrom"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"\\[ ,;:!]|~|\\quad"), " "),
    (re.compile(r"\\(?:left|right)"), ""),
    (re.compile(r"[$]"), ""),
]
_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "≈": "=", "μ": "µ", "Å": "angstrom"}
)
_RAISED = re.compile("[⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LEAD = re.compile(r"^(?:about|approximately|approx\.?|roughly|around|circa|ca\.)\s*", re.IGNORECASE)
_MANTISSA = r"[+-]?\s*(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"\(?\s*(?P<mantissa>{_MANTISSA})\s*\)?"
    rf"(?:\s*/\s*\(?\s*(?P<denominator>{_MANTISSA})\s*\)?(?!\s*[A-Za-z]*\d*\s*/))?"
    r"(?:[eE](?P<e>[+-]?\d+)|\s*[*x]\s*10\s*(?:\^|\*\*)?\s*\(?(?P<power>[+-]?\d+)\)?)?"
)
_POWER_OF_TEN = re.compile(r"10\s*(?:\^|\*\*)\s*\(?(?P<power>[+-]?\d+)\)?")
_UNCERTAINTY = re.compile(rf"\s*(?:±|\+/-|\+-)\s*{_MANTISSA}")
_UNIT = re.compile(r"[A-Za-zµ°Ω%/*^().\s\d-]*")
_NEGATIVE_POWER = re.compile(r"(?<=[A-Za-zµΩ])-(\d)(?!\d)")
_POWER = re.compile(r"(?<=[A-Za-zµΩ])(\d)(?![\dA-Za-z])")
_SPELLED = {
    r"°\s*C\b|\b(?:deg(?:rees?)?\s*)?(?:Celsius|celsius)\b|\bdegrees?\s+C\b": "degC",
    r"°\s*F\b|\b(?:deg(?:rees?)?\s*)?(?:Fahrenheit|fahrenheit)\b|\bdegrees?\s+F\b": "degF",
    r"\bAU\b": "astronomical_unit",
    r"\bKelvins?\b": "kelvin",
    r"\bK([JgmWV])\b": r"k\1",
}


@dataclass(frozen=True)
class Quantity:
    """A number and what follows it."""

    value: float
    unit: Any
    """pint's; None: there is none, or none that pint knows."""
    words: str
    """What follows the number, as it is written."""


def read(text: str) -> Quantity | None:
    """The quantity that a text is; None: it is something else, or more than one."""
    if len(text) > MAX_CHARS:
        return None
    text = unicodedata.normalize("NFC", text).translate(_SIGNS)
    text = _RAISED.sub(lambda raised: "^" + unicodedata.normalize("NFKC", raised[0]).replace("−", "-"), text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _LEAD.sub("", text.rsplit("=", 1)[-1].strip()).strip().rstrip(".")
    number = _POWER_OF_TEN.match(text) or _NUMBER.match(text)
    if number is None:
        return None
    value = _value(number)
    rest = text[number.end() :]
    if uncertainty := _UNCERTAINTY.match(rest):
        rest = rest[uncertainty.end() :].lstrip(" )")
    words = rest.strip()
    if value is None or not _UNIT.fullmatch(words):
        return None
    known_unit = unit(words)
    if known_unit is None and re.search(r"\d|\b(?:or|and|to)\b", words):
        # `5 or 6`, `5-6`: not one number.
        return None
    return Quantity(value, known_unit, words)


def _value(number: re.Match[str]) -> float | None:
    groups = number.groupdict().items()
    parts = {name: (text or "").replace(",", "").replace(" ", "") for name, text in groups}
    power = parts.get("power") or parts.get("e") or "0"
    if abs(int(power)) > MAX_EXPONENT:
        return None
    try:
        value = float(parts.get("mantissa") or 1) / float(parts.get("denominator") or 1)
        return value * 10.0 ** int(power)
    except (ZeroDivisionError, OverflowError):
        return None


def unit(words: str) -> Any:
    """Read pint's unit; None: it knows none of these words."""
    words = words.strip()
    if not words:
        return None
    for pattern, name in _SPELLED.items():
        words = re.sub(pattern, name, words)
    words = _POWER.sub(r"^\1", _NEGATIVE_POWER.sub(r"^-\1", words))
    if re.search(r"\d{3}", words):
        return None
    try:
        return _units.parse_units(words)
    except Exception:
        # pint raises what its tokenizer, its parser or arithmetic do.
        return None


def same(gold: Quantity, answer: Quantity, relative: float, absolute: float, unit_required: bool) -> bool:
    """Whether two quantities agree within the larger tolerance, which is taken in the gold one's unit.

    A number without a unit is taken in the gold one's unit, unless a unit is required.
    """
    values = [answer.value]
    if gold.unit is None and gold.words:
        # `3 bonds`: a number of something.
        if _label(answer.words) != _label(gold.words) and (answer.words or unit_required):
            return False
    elif gold.unit is not None:
        if answer.words:
            values = _converted(gold, answer)
        elif unit_required:
            return False
        elif gold.unit.dimensionless:
            # A share for a percentage, radians for degrees.
            values.append(_units.Quantity(answer.value, "").to(gold.unit).magnitude)
    tolerance = max(absolute, relative * abs(gold.value), 1e-12 * abs(gold.value))
    return any(abs(value - gold.value) <= tolerance for value in values)


def _label(words: str) -> str:
    return words.casefold().removesuffix("s")


def _converted(gold: Quantity, answer: Quantity) -> list[float]:
    if answer.unit is None:
        return []
    unit = answer.unit
    if str(gold.unit) in ("degree_Celsius", "degree_Fahrenheit") and answer.words in ("C", "F"):
        unit = _units.parse_units("deg" + answer.words)
    try:
        return [_units.Quantity(answer.value, unit).to(gold.unit).magnitude]
    except Exception:
        # Another dimension, or offsets that do not multiply.
        return []
