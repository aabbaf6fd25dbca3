"""Whether a final answer in mathematics says the same as the accepted ones: math-verify, and what it misses.

Runs in scorer processes: math-verify needs the main thread and hangs on some expressions. Its own time-outs
are off, because they turn a slow machine into a wrong answer; the process's limit takes their place.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)

# LaTeX only: the extraction of plain expressions hands a model's words to sympy's `parse_expr`, and that
# evaluates them as Python.
_EXTRACTION = [LatexExtractionConfig()]

MAX_ANSWER_CHARS = 2000
"""A longer answer is wrong, unless an accepted one is about as long."""

_SYMBOLS = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": r"\div ",
    "±": r"\pm ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "∞": r"\infty ",
    "π": r"\pi ",
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "°": r"^\circ ",
    "²": "^2",
    "³": "^3",
    "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "\u00a0": " ",
    "\u2009": " ",
    "\u202f": " ",
    r"\varnothing": r"\emptyset ",
    r"\log_e": r"\ln ",
    r"\log_{e}": r"\ln ",
}
_TRANSLATED = re.compile("|".join(re.escape(sign) + r"(?![A-Za-z])" * (sign[0] == "\\") for sign in _SYMBOLS))

_DELIMITERS = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"), ("**", "**")]
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_MIXED = re.compile(r"(?<![\d.,/^_{])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,\\!|\{,\}|\\,|\\ |~| |,)\d{3})+(?![\d])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*(?:\{(\d+)\}|(\d))")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\\\d.])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})(?![\d.A-Za-z])")
_DEGREES_OF = re.compile(
    r"\\(sin|cos|tan|cot|sec|csc)\s*[({]?\s*(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*[)}]?"
)
_UNITS = re.compile(
    r"(\\?[$€£]?[-+]?[\d.,]*\d)\s+((?:[A-Za-z]{3,}|[A-Za-z]{1,3}/[A-Za-z]{1,3})(?:\s+[A-Za-z]{2,})*)"
)
_NO_UNIT = re.compile(r"^(?:or|and|mod|sin|cos|tan|log|exp|sqrt|choose|over|plus|minus|times|to)\b")
_WORD = re.compile(r"[A-Za-z][A-Za-z '-]{2,}[A-Za-z]")
"""To sympy a word is the product of its letters, and `east` the same as `seat`."""
_CHOICE = re.compile(r"[(\[]?([A-Z])[)\].:]?")
_CHOICE_AND_TEXT = re.compile(r"(?:[(\[]([A-Z])[)\]]|([A-Z])[).:])\s*\S.*", re.DOTALL)


def judge(payload: dict[str, Any]) -> dict[str, bool]:
    """Whether `answer` equals one of `gold`. `as_formulas`: by math-verify even where the words agree."""
    answer, gold = payload["answer"], payload["gold"]
    if len(answer) > max([MAX_ANSWER_CHARS, *(4 * len(accepted) for accepted in gold)]):
        return {"correct": False}
    as_formulas = payload.get("as_formulas", False)
    return {"correct": any(_same(accepted, answer, as_formulas) for accepted in gold)}


def check(payload: dict[str, Any]) -> dict[str, Any]:
    """Accepted answers of `gold` that can never be met, because they do not parse."""
    return {"unreadable": [gold for gold in payload["gold"] if not _readable(gold)]}


def _readable(gold: str) -> bool:
    readings = _readings(gold)
    if not readings or not _same(gold, readings[0]):
        return False
    words = re.fullmatch(r"[\w :'-]+", _words(readings[0]))
    return bool(words) or any(not isinstance(value, str) for value in _parsed(readings[0]))


def _same(gold: str, answer: str, as_formulas: bool = False) -> bool:
    golds, answers = _readings(gold), _readings(answer)
    if not golds or not answers:
        return False
    if not as_formulas:
        if _plain(golds[0]) == _plain(answers[0]):
            return True
        if letter := _CHOICE.fullmatch(_words(golds[0])):
            words = _words(answers[0])
            choice = _CHOICE.fullmatch(words) or _CHOICE_AND_TEXT.fullmatch(words)
            return choice is not None and next(filter(None, choice.groups())) == letter[1]
        if _WORD.fullmatch(_words(golds[0])):
            return False
    return any(_verified(left, right) for left in golds for right in answers)


def _verified(gold: str, answer: str) -> bool:
    try:
        return verify(
            _parsed(gold),
            _parsed(answer),
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
    except MemoryError:
        raise
    except Exception:
        # sympy gives up on some comparisons, by errors of every kind: then nothing shows them equal.
        return False


def _parsed(text: str) -> list[Any]:
    if r"\boxed" in text or not _balanced(text):
        # It would leave the box, and be several answers of which one may do.
        return []
    try:
        return parse(rf"\boxed{{{text}}}", _EXTRACTION, parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return []


def _readings(text: str) -> list[str]:
    """The text as LaTeX that math-verify reads; several where it may mean more than one thing."""
    text = _stripped(text)
    text = _TRANSLATED.sub(lambda sign: _SYMBOLS[sign[0]], text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3]}}}", text)
    text = _PI.sub(r"\\pi ", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _THOUSANDS.sub(_joined, text)
    text = _REPEATING.sub(_fraction, text)
    text = _DEGREES_OF.sub(r"\\\1{(\\frac{\2\\pi}{180})}", text)
    readings = [text] if text else []
    if _SCIENTIFIC.search(text):
        # `2e-3` is a number, or twice e less three.
        readings.append(_SCIENTIFIC.sub(r"\1\\times 10^{\2}", text))
    if (unit := _UNITS.fullmatch(text)) and not _NO_UNIT.match(unit[2]):
        readings.append(unit[1])
    return readings


def _stripped(text: str) -> str:
    """Without delimiters of formulas, emphasis and a full stop around it."""
    before = None
    while before != text:
        before = text
        text = text.strip().removesuffix(".").rstrip()
        for left, right in _DELIMITERS:
            inner = text[len(left) : -len(right)]
            around = text.startswith(left) and text.endswith(right)
            if around and inner and left not in inner and _balanced(inner):
                text = inner
    return text


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def _joined(match: re.Match[str]) -> str:
    """A number without the marks between its thousands. Bare commas stay: math-verify knows them."""
    number = match[0]
    return number if re.fullmatch(r"[\d,]+", number) else re.sub(r"\D", "", number)


def _fraction(match: re.Match[str]) -> str:
    whole, fixed, period = match[1] or "0", match[2], match[3] or match[4]
    nines = 10 ** len(fixed) * (10 ** len(period) - 1)
    value = Fraction(int(whole + fixed + period) - int(whole + fixed), nines)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _words(text: str) -> str:
    """Without the commands that only set text, and what spaces it."""
    return re.sub(r"\\[ ,;!]|\s+", " ", _TEXT.sub(r"\1", text)).strip()


def _plain(text: str) -> str:
    """For the comparison of words: no spaces, no case, except of single letters, which are names."""
    text = _words(text).replace(" ", "").removesuffix(".")
    return text if len(text) == 1 else text.casefold()


# The grammar and the regular expressions are built at first use, which no call's time limit should pay for.
_verified(r"\frac{1}{2}", "0.5+x")
