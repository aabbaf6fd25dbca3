"""Tasks from datasets: JSON lines, Parquet, and Hugging Face datasets on disk; read row by row, never whole.

A field map renames what a set calls otherwise. The maps of published sets are in `field_maps/`.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import IO, Any

BATCH_ROWS = 256
"""Rows of Parquet in memory at a time."""
HINT = "pip install 'rollout-service[datasets]'"
KEYS = ("handler", "fields", "constants", "keep", "where")


class DatasetError(ValueError):
    """A dataset, a row of it or a field map cannot be used; the message names file, row and field."""


@dataclass(frozen=True)
class Row:
    """One task as it stands in its set."""

    number: int
    """From 1."""
    where: str
    """For messages: `train.parquet, row 17`."""
    data: dict[str, Any]


@dataclass(frozen=True)
class FieldMap:
    """How the rows of a set become tasks of a handler."""

    handler: str | None = None
    """The handler that the rows are for; None = whatever the caller says."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Field of the task → path in the row, with dots: `prompt.0.content`, `reward_model.ground_truth`."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields with the same value in every task."""
    keep: bool = False
    """Whether fields of the row that are not named stay in the task."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """Path → value; other rows are left out."""

    def wants(self, row: Row) -> bool:
        """Whether the row is among those that the map is for.

        Raises:
            DatasetError: The row lacks a field that decides it.
        """
        return all(_at(row, path) == value for path, value in self.where.items())

    def apply(self, row: Row) -> dict[str, Any]:
        """The task of a row.

        Raises:
            DatasetError: The row lacks a field.
        """
        if not self.fields and not self.constants:
            return dict(row.data)
        task = dict(row.data) if self.keep else {}
        for name, path in self.fields.items():
            task[name] = _at(row, path)
        return task | dict(self.constants)


def _at(row: Row, path: str) -> Any:
    value: Any = row.data
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            there = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise DatasetError(f"{row.where}: no field {path!r} (at {part!r}; there: {there})") from None
    return value


def published_maps() -> list[str]:
    """Names of the maps that come along."""
    found = resources.files("rollout").joinpath("field_maps").iterdir()
    return sorted(entry.name.removesuffix(".yaml") for entry in found if entry.name.endswith(".yaml"))


def load_map(name: str | Path) -> FieldMap:
    """A field map by the name of a published set, or from a file (YAML or JSON).

    Raises:
        DatasetError: There is none, or it is not one.
    """
    text, where = _map_text(str(name))
    try:
        data = json.loads(text) if where.endswith(".json") else _yaml(text)
    except ValueError as error:
        raise DatasetError(f"{where}: {error}") from None
    if not isinstance(data, dict) or (unknown := set(data) - set(KEYS)):
        what = f"unknown keys {sorted(unknown)}" if isinstance(data, dict) else "not a mapping"
        raise DatasetError(f"{where}: {what}; a field map has {', '.join(KEYS)}")
    for key in ("fields", "constants", "where"):
        if not isinstance(data.get(key) or {}, dict):
            raise DatasetError(f"{where}: {key} must map names to {'paths' if key == 'fields' else 'values'}")
    return FieldMap(
        handler=data.get("handler"),
        fields={str(name): str(path) for name, path in (data.get("fields") or {}).items()},
        constants=data.get("constants") or {},
        keep=bool(data.get("keep")),
        where=data.get("where") or {},
    )


def _map_text(name: str) -> tuple[str, str]:
    if name in published_maps():
        return resources.files("rollout").joinpath("field_maps", f"{name}.yaml").read_text(
            "utf-8"
        ), f"{name}.yaml"
    path = Path(name)
    if not path.is_file():
        raise DatasetError(f"no field map {name!r}: give a file, or one of {', '.join(published_maps())}")
    return path.read_text("utf-8"), str(path)


def _yaml(text: str) -> Any:
    yaml = _import("yaml", "a field map in YAML")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {error}") from None


def _import(module: str, what: str) -> Any:
    try:
        return __import__(module, fromlist=["_"])
    except ImportError as error:
        raise DatasetError(f"{what} needs the package {error.name}: {HINT}") from None


def read(
    path: str | Path, *, split: str | None = None, first: int | None = None, skip: int = 0
) -> Iterator[Row]:
    """Rows of a set, one at a time.

    Args:
        path: `.jsonl`, `.json` (a list), either with `.gz`; `.parquet`, or a directory of them; a directory
            that `datasets.Dataset.save_to_disk` wrote; `-` for JSON lines on standard input.
        split: Of a directory with several (`train`, `test` …).
        first: Only so many rows.
        skip: Rows to leave out at the start.

    Raises:
        DatasetError: The set or a row cannot be read.
    """
    return islice(_rows(str(path), split), skip, None if first is None else skip + first)


def _rows(path: str, split: str | None) -> Iterator[Row]:
    if path == "-":
        yield from _json_lines(sys.stdin, "stdin")
        return
    found = Path(path)
    if found.is_dir():
        yield from _directory(found, split)
        return
    if not found.is_file():
        raise DatasetError(f"{path}: there is no such file or directory")
    name = found.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        yield from _parquet([found])
        return
    with _opened(found) as file:
        yield from (_json_list if name.endswith(".json") else _json_lines)(file, found.name)


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _json_lines(file: IO[str], name: str) -> Iterator[Row]:
    try:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{name}, line {number}"
                try:
                    data = json.loads(line)
                except ValueError as error:
                    raise DatasetError(f"{where}: {error}") from None
                yield _row(number, where, data)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{name}: is not UTF-8 text ({error.reason})") from None


def _json_list(file: IO[str], name: str) -> Iterator[Row]:
    text = file.read()
    try:
        data = json.loads(text)
    except ValueError:  # JSON lines under the other name are common
        yield from _json_lines(iter(text.splitlines()), name)  # type: ignore[arg-type]
        return
    for number, entry in enumerate(data if isinstance(data, list) else [data], 1):
        yield _row(number, f"{name}, row {number}", entry)


def _row(number: int, where: str, data: Any) -> Row:
    if not isinstance(data, dict):
        raise DatasetError(f"{where}: expected a JSON object, got {type(data).__name__}")
    return Row(number, where, data)


def _parquet(files: list[Path]) -> Iterator[Row]:
    parquet = _import("pyarrow.parquet", "Parquet")
    pyarrow = _import("pyarrow", "Parquet")
    number = 0
    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                at = 0
                for batch in file.iter_batches(BATCH_ROWS):
                    for data in batch.to_pylist():
                        number, at = number + 1, at + 1
                        yield Row(number, f"{path.name}, row {at}", data)
        except (pyarrow.ArrowException, OSError) as error:
            raise DatasetError(f"{path}: {error}") from None


def _directory(path: Path, split: str | None) -> Iterator[Row]:
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if split is None and len(splits) > 1:
            raise DatasetError(f"{path} has the splits {', '.join(splits)}: name one")
        path /= _one_of(splits, split, path)
    if (path / "state.json").is_file():
        yield from _saved(path)
        return
    files = sorted(path.glob("**/*.parquet"))
    if split is not None:
        # `train-00000-of-00002.parquet` or `train/0.parquet`, as hubs lay them out.
        files = [
            one for one in files if one.name.startswith(f"{split}-") or split in (one.stem, one.parent.name)
        ]
    if not files:
        what = f"of split {split!r} " if split else ""
        raise DatasetError(f"{path} holds no Parquet files {what}and no dataset written by save_to_disk")
    yield from _parquet(files)


def _one_of(splits: list[str], wanted: str | None, path: Path) -> str:
    if wanted is None:
        return splits[0]
    if wanted not in splits:
        raise DatasetError(f"{path} has no split {wanted!r}, only {', '.join(splits)}")
    return wanted


def _saved(path: Path) -> Iterator[Row]:
    datasets = _import("datasets", "a dataset on disk")
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: {error}") from None
    for number, data in enumerate(found, 1):
        yield Row(number, f"{path.name}, row {number}", data)


def user_text(messages: list[Any]) -> str:
    """What the user says in chat messages, or in the input of a Responses request."""
    texts = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in (None, "user"):
            continue
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if isinstance(content, str) and content:
            texts.append(content)
    return "\n\n".join(texts)


def problem(task: Mapping[str, Any], schema: Mapping[str, Any], row: Row) -> str | None:
    """What of a task does not fit a handler's schema, naming row and field; None = it fits.

    Raises:
        DatasetError: The package jsonschema is missing.
    """
    jsonschema = _import("jsonschema", "checking tasks")
    validator = jsonschema.Draft202012Validator(schema)
    error = jsonschema.exceptions.best_match(validator.iter_errors(task))
    if error is None:
        return None
    name = ".".join(map(str, error.absolute_path)) or "task"
    return f"{row.where}: {name}: {error.message[:300]}"
