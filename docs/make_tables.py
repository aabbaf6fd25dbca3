"""Makes the tables of docs/cli.md, redis.md, settings.md and suites.md: `python -m docs.make_tables`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import click
from pydantic import SecretStr

from rollout.cli import main
from rollout.suites.catalogue import catalogue
from services.settings import ENV_PREFIX, Settings
from services.state import keys

BEGIN, END = "<!-- made by python -m docs.make_tables -->\n", "<!-- end of what is made -->"


def described_keys() -> dict[str, str]:
    """Each key as a pattern with its parameters in capitals, and what it holds.

    Raises:
        ValueError: A key has no docstring; the message names it.
    """
    texts = {}
    body = ast.parse(inspect.getsource(keys)).body
    for node, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not isinstance(node, ast.Assign):
            continue
        key, text = getattr(keys, node.targets[0].id), ast.get_docstring(ast.Module([following], []))
        if isinstance(key, keys.Key):
            key = key(*("[/POLICY]" if name == "of" else name.upper() for name in key.names))
        if not text:
            raise ValueError(f"services/state/keys.py: {key} has no docstring that says what the key holds")
        texts[key] = " ".join(text.split())
    return texts


def _settings() -> list[str]:
    rows = ["| variable | default | |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
        shown = "the host name" if field.default_factory else "none" if default == "" else f"`{default}`"
        text = " ".join((field.description or "").split())
        rows.append(f"| `{ENV_PREFIX}{name.upper()}` | {shown} | {text} |")
    return rows


def commands(command: click.Command, path: str = "rollout") -> Iterator[tuple[str, click.Command]]:
    """Every command of `rollout` that does something, with its path."""
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, f"{path} {name}")


def _commands() -> list[str]:
    rows = ["| command | what it does | for example |", "|---|---|---|"]
    for path, command in commands(main):
        example = (command.epilog or path).partition("Example:")[2].strip().replace("|", "\\|")
        rows.append(f"| `{path}` | {command.get_short_help_str(200)} | `{example}` |")
    return rows


def _suites() -> list[str]:
    rows = ["| name | handler | form | from | licence | checked |", "|---|---|---|---|---|---|"]
    for known in catalogue():
        cells = (
            f"`{known.name}`",
            f"`{known.handler}`",
            known.form,
            known.origin,
            known.licence,
            known.checked,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def pages() -> dict[Path, str]:
    """Each page with its table made anew."""
    of_keys = [f"| `{key}` | {text} |" for key, text in sorted(described_keys().items())]
    of_redis = ["| key | type: what it holds |", "|---|---|", *of_keys]
    tables = {"cli": _commands(), "redis": of_redis, "settings": _settings(), "suites": _suites()}
    paths = {Path(__file__).with_name(f"{name}.md"): table for name, table in tables.items()}
    made = {}
    for path, table in paths.items():
        before, rest = path.read_text().split(BEGIN)
        made[path] = before + BEGIN + "\n".join(table) + "\n" + END + rest.split(END)[1]
    return made


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
