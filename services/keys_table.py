"""Writes the table of keys in docs/redis.md from services/state/keys.py: `python -m services.keys_table`."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from services.state import keys

PAGE = Path(__file__).resolve().parents[1] / "docs" / "redis.md"
BEGIN, END = "<!-- keys: made by python -m services.keys_table -->", "<!-- end of keys -->"


def described() -> dict[str, str]:
    """Each key as a pattern with its parameters in capitals, and what it holds.

    Raises:
        ValueError: A key has no docstring; the message names it.
    """
    found = {}
    body = ast.parse(inspect.getsource(keys)).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Assign):
            name = node.targets[0].id
            key = getattr(keys, name)
            text = following.value.value if _is_text(following) else None
        elif isinstance(node, ast.FunctionDef):
            name = node.name
            function = getattr(keys, name)
            key = function(*(parameter.upper() for parameter in inspect.signature(function).parameters))
            text = ast.get_docstring(node)
        else:
            continue
        if not isinstance(key, str):
            continue
        if not text:
            raise ValueError(f"services/state/keys.py: {name} has no docstring that says what the key holds")
        found[key] = " ".join(text.split())
    return found


def _is_text(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def patterns() -> list[re.Pattern[str]]:
    """What the name of every key in a Redis of the service matches, those of Celery aside.

    A helper that belongs to one key is named in that key's description, in backticks.
    """
    names = set(described())
    for text in described().values():
        names |= set(re.findall(r"`([a-z_]+:[A-Za-z:_]+)`", text))
    return [re.compile(re.sub(r"[A-Z]+(_[A-Z]+)*", ".+", re.escape(name))) for name in sorted(names)]


def table() -> str:
    """The table, markers included."""
    rows = [f"| `{key}` | {text} |" for key, text in sorted(described().items())]
    return "\n".join([BEGIN, "| key | type: what it holds |", "|---|---|", *rows, END])


def page(text: str) -> str:
    """A page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
