"""Short answers: a choice, a quantity, words, or a set of them. Runs in scorer processes."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from workers.scoring import quantities

MAX_ANSWER_CHARS = 2000

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boxed|ce|emph)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[ ,;:!]|~|\$|\\\(|\\\)|\\\[|\\\]")
_MARKUP = re.compile(r"[*_`{}^\\]")
_ARTICLE = re.compile(r"^(?:the|an|a)\s+")
_EDGES = " \t\n.,;:!?\"'“”‘’()[]"
_FORMULA = re.compile(r"(?:[A-Z][a-z]?\d*|[()]\d*)+[+-]?")
_LETTER_SAID = re.compile(
    r"(?:(?:option|choice|answer|letter)\s*:?\s*)?[(\[]?\s*([A-Za-z])\s*[)\]]?\s*[.:)]?", re.IGNORECASE
)
_LETTER_AND_TEXT = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?(?:[(\[]\s*([A-Za-z])\s*[)\]]\s*[.:]?|([A-Za-z])\s*[).:])\s*(\S.*)",
    re.IGNORECASE | re.DOTALL,
)
_SEPARATOR = re.compile(r"\s*(?:,|;|\n|&|\band\b)\s*")


def judge(payload: dict[str, Any]) -> dict[str, bool]:
    """Whether `answer` is right by the task's `kind` and `gold`; see `workers/handlers/stem.py`."""
    answer = payload["answer"]
    correct = len(answer) <= MAX_ANSWER_CHARS and _KINDS[payload["kind"]](payload, answer)
    return {"correct": bool(correct)}


def check(payload: dict[str, Any]) -> dict[str, str | None]:
    """What is wrong with a task, so that no answer could be right; None: nothing."""
    for gold in payload["gold"]:
        answer = ", ".join(payload["gold"]) if payload["kind"] in ("set", "choice") else gold
        if not _KINDS[payload["kind"]](payload, answer):
            return {"problem": f"{gold!r} cannot be read as an answer of the kind {payload['kind']!r}"}
    if payload["kind"] == "numeric" and payload["unit"] and quantities.unit(payload["unit"]) is None:
        return {"problem": f"pint knows no unit {payload['unit']!r}"}
    return {"problem": None}


# -- choices ---------------------------------------------------------------------------------------


def _choice(payload: dict[str, Any], answer: str) -> bool:
    choices = payload["choices"]
    right = {letter for gold in payload["gold"] if (letter := _letter(gold, choices))}
    if len(payload["gold"]) > 1:
        parts = (
            re.findall(r"[A-Za-z]", answer) if re.fullmatch(r"\s*[A-Z]{2,}\s*", answer) else _split(answer)
        )
        letters = [_letter(part, choices) for part in parts]
        return len(right) == len(payload["gold"]) == len(letters) and set(letters) == right
    return bool(right) and _letter(answer, choices) in right


def _letter(text: str, choices: dict[str, str]) -> str | None:
    """The letter of the choice that a text names; None: of none, or of two."""
    plain = _plain(text)
    if (named := _LETTER_SAID.fullmatch(plain)) and named[1].upper() in choices:
        return named[1].upper()
    by_text = [letter for letter, choice in choices.items() if words(choice) == words(text)]
    if len(by_text) == 1:
        return by_text[0]
    if named := _LETTER_AND_TEXT.fullmatch(plain):
        letter, content = (named[1] or named[2]).upper(), words(named[3])
        elsewhere = any(words(choice) == content for key, choice in choices.items() if key != letter)
        if letter in choices and (words(choices[letter]) == content or not elsewhere):
            return letter
    return None


# -- quantities ------------------------------------------------------------------------------------


def _numeric(payload: dict[str, Any], answer: str) -> bool:
    quantity = quantities.read(answer)
    golds = (_gold(text, payload["unit"]) for text in payload["gold"])
    limits = (payload["rel_tolerance"], payload["abs_tolerance"], payload["unit_required"])
    return quantity is not None and any(
        gold is not None and quantities.same(gold, quantity, *limits) for gold in golds
    )


def _gold(text: str, unit: str) -> quantities.Quantity | None:
    read = quantities.read(text)
    if read is not None and not read.words and unit:
        return quantities.Quantity(read.value, quantities.unit(unit), unit)
    return read


# -- words and sets --------------------------------------------------------------------------------


def _exact(payload: dict[str, Any], answer: str) -> bool:
    return any(_same_words(gold, answer) for gold in payload["gold"])


def _same_words(gold: str, answer: str) -> bool:
    if words(gold) != words(answer) or not words(gold):
        return False
    formula, text = _tight(gold), _tight(answer)
    if _FORMULA.fullmatch(formula) and text not in (text.lower(), text.upper()):
        return formula == text  # Co is not CO
    return True


def _tight(text: str) -> str:
    return _plain(text).strip(_EDGES).replace(" ", "")


def _plain(text: str) -> str:
    """Without markup of LaTeX and Markdown, signs in their common form (`H₂O` as `H2O`)."""
    before = None
    while before != text:
        before, text = text, _WRAPPER.sub(r"\1", text)
    text = unicodedata.normalize("NFKC", _SPACING.sub(" ", text)).replace("−", "-").replace("–", "-")
    return " ".join(_MARKUP.sub("", text).split())


def words(text: str) -> str:
    """For comparison: no markup, case, article, hyphens, or punctuation around it."""
    text = _plain(text).casefold().strip(_EDGES)
    return " ".join(_ARTICLE.sub("", text).replace("-", " ").split()) if len(text) > 2 else text


def _split(answer: str) -> list[str]:
    inner = _plain(answer.replace(r"\{", " ").replace(r"\}", " ")).strip(" .[]()")
    return [part for part in _SEPARATOR.split(inner) if part.strip()]


def _set(payload: dict[str, Any], answer: str) -> bool:
    """Every item once, in any order."""
    golds, items = list(payload["gold"]), _split(answer)
    if len(items) != len(golds):
        return False
    for item in items:
        match = next((gold for gold in golds if _same_item(payload, gold, item)), None)
        if match is None:
            return False
        golds.remove(match)
    return True


def _same_item(payload: dict[str, Any], gold: str, item: str) -> bool:
    return _same_words(gold, item) or _numeric({**payload, "gold": [gold]}, item)


_KINDS = {"choice": _choice, "numeric": _numeric, "exact": _exact, "set": _set}
