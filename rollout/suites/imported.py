"""Datasets that were imported here, each below `$ROLLOUT_HOME/tasks`: its name then stands for its files."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from rollout.datasets import Row
from rollout.suites import SuiteError
from rollout.suites.bundles import unpack

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
DESCRIPTION, ROWS, DIRECTORIES = "dataset.json", "tasks.jsonl", "tasks"
MAX_SLUG = 60


class Imported(BaseModel):
    """A dataset as it was imported."""

    name: str
    handler: str
    source: str
    """What it was read from."""
    tasks: int = 0
    imported_at: float = Field(default_factory=time.time)
    """Seconds since the epoch."""
    sample: dict[str, Any] = Field(default_factory=dict)
    """Its first task."""


def home() -> Path:
    """`$ROLLOUT_HOME/tasks`; without the variable `.local/tasks` of the checkout."""
    root = os.environ.get("ROLLOUT_HOME") or Path(__file__).resolve().parents[2] / ".local"
    return Path(root) / "tasks"


def imported() -> list[Imported]:
    """All of them, by name; what is not whole is left out."""
    found = []
    for path in sorted(home().glob(f"*/{DESCRIPTION}")):
        with suppress(OSError, ValidationError):
            found.append(Imported.model_validate_json(path.read_bytes()))
    return found


def named(name: str) -> Imported | None:
    """The one of that name; None = there is none."""
    return next((dataset for dataset in imported() if dataset.name == name), None)


def located(path: str) -> tuple[str, str | None]:
    """Where the tasks are that a path or a name of an imported dataset stands for, and of which handler."""
    known = None if path == "-" or Path(path).exists() else named(path)
    return (str(place(known)), known.handler) if known else (path, None)


def place(dataset: Imported) -> Path:
    """The file or directory that its tasks are read from."""
    directory = home() / dataset.name
    rows = directory / ROWS
    return rows if rows.is_file() else directory / DIRECTORIES


def write(dataset: Imported, rows: Iterable[tuple[Row, dict[str, Any]]], part: Path) -> None:
    """Write the tasks of a dataset into a directory: rows as lines, directories as they are in their bundles.

    Raises:
        SuiteError: A directory cannot be packed.
        OSError: There is no room.
    """
    for row, task in rows:
        dataset.tasks += 1
        dataset.sample = dataset.sample or task
        if row.directory is None:
            with (part / ROWS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(task, default=str) + "\n")
        else:
            bundle = row.directory.bundle()
            slug = re.sub(r"[^A-Za-z0-9._-]+", "-", row.directory.name)[-MAX_SLUG:]
            (part / DIRECTORIES).mkdir(exist_ok=True)
            unpack(bundle.content, bundle.digest, part / DIRECTORIES / f"{row.number:06}-{slug}")


@contextmanager
def writing(dataset: Imported, replace: bool = False) -> Iterator[Path]:
    """Where to `write` a dataset, which is there once the block has ended well, whole or not at all.

    Raises:
        SuiteError: The name is none for a directory, or is taken.
    """
    if not NAME.fullmatch(dataset.name):
        raise SuiteError(f"{dataset.name!r} is no name: letters, digits, `.`, `_` and `-`, at most 100")
    target = home() / dataset.name
    if target.exists() and not replace:
        raise SuiteError(f"{dataset.name} is imported already: --replace does it again")
    part = target.with_name(f".{dataset.name}.{os.getpid()}")
    part.mkdir(parents=True)
    try:
        yield part
        (part / DESCRIPTION).write_text(dataset.model_dump_json(indent=1) + "\n", "utf-8")
        if target.exists():
            old = target.with_name(f"{part.name}.old")
            target.rename(old)
            shutil.rmtree(old)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
