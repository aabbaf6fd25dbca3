"""Tasks from datasets: JSON lines, Parquet, and Hugging Face datasets on disk; read row by row, never whole.

A field map renames what a set calls otherwise. The maps of published sets are in `field_maps/`.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.errors import RolloutError, problems_of

BATCH_ROWS = 256
"""Rows of Parquet in memory at a time."""
OPTIONAL = "?"
"""At the end of a path of a field map."""
HINT = "pip install 'rollout-service[datasets]'"
_MAPS = resources.files("rollout") / "field_maps"


class DatasetError(RolloutError, ValueError):
    """A dataset, a row of it or a field map cannot be used; the message names file, row and field."""


@dataclass(frozen=True)
class Row:
    """One task as it stands in its set."""

    number: int
    """From 1."""
    where: str
    """For messages: `train.parquet, row 17`."""
    data: dict[str, Any]
    directory: Any = None
    """Of a task that is a directory: its `rollout.suites.harbor.HarborTask`, whose bundle has to be put."""


class FieldMap(BaseModel):
    """How the rows of a set become tasks of a handler."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)
    handler: str | None = None
    """The handler that the rows are for; None = whatever the caller says."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Field of the task → path in the row, with dots: `prompt.0.content`, `reward_model.ground_truth`.
    One that ends with `?` may be missing in a row; then the task has no such field."""
    constants: dict[str, Any] = Field(default_factory=dict)
    """Fields with the same value in every task."""
    keep: bool = False
    """Whether fields of the row that are not named stay in the task."""
    where: dict[str, Any] = Field(default_factory=dict)
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
        whole = self.keep or not (self.fields or self.constants)
        fields = {}
        for name, path in self.fields.items():
            with suppress(DatasetError) if path.endswith(OPTIONAL) else nullcontext():
                fields[name] = _at(row, path.removesuffix(OPTIONAL))
        return (dict(row.data) if whole else {}) | fields | self.constants


def _at(row: Row, path: str) -> Any:
    value: Any = row.data
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            names = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise DatasetError(f"{row.where}: no field {path!r} (at {part!r}; there: {names})") from None
    return value


def published_maps() -> list[str]:
    """Names of the maps that come along."""
    return sorted(Path(entry.name).stem for entry in _MAPS.iterdir() if entry.name.endswith(".yaml"))


def load_map(name: str | Path) -> FieldMap:
    """A field map by the name of a published set, or from a file (YAML or JSON).

    Raises:
        DatasetError: There is none, or it is not one.
    """
    if str(name) in published_maps():
        where, text = f"{name}.yaml", (_MAPS / f"{name}.yaml").read_text("utf-8")
    elif (path := Path(name)).is_file():
        where, text = str(path), path.read_text("utf-8")
    else:
        raise DatasetError(
            f"no field map {str(name)!r}: give a file, or one of {', '.join(published_maps())}"
        )
    try:
        data = json.loads(text) if where.endswith(".json") else _yaml(text)
        if not isinstance(data, dict):
            raise ValueError("not a mapping")
        return FieldMap.model_validate({key: value for key, value in data.items() if value is not None})
    except ValidationError as error:
        keys = ", ".join(FieldMap.model_fields)
        raise DatasetError(f"{where}: {problems_of(error)}; a field map has {keys}") from None
    except ValueError as error:
        raise DatasetError(f"{where}: {error}") from None


def _yaml(text: str) -> Any:
    yaml = import_of("yaml", "a field map in YAML")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {error}") from None


def import_of(module: str, what: str) -> Any:
    """A module that the light install does not have. Raises DatasetError naming what needs it."""
    try:
        return __import__(module, fromlist=["_"])
    except ImportError as error:
        raise DatasetError(f"{what} needs the package {error.name}: {HINT}") from None


def read(
    path: str | Path,
    *,
    split: str | None = None,
    first: int | None = None,
    skip: int = 0,
    clones: str | Path | None = None,
) -> Iterator[Row]:
    """Rows of a set, one at a time.

    Args:
        path: `.jsonl`, `.json` (a list), either with `.gz`; `.parquet`, or a directory of them; a directory
            that `datasets.Dataset.save_to_disk` wrote; `-` for JSON lines on standard input; a suite, that is
            a directory with a `task.toml` or with some below it, or a `registry.json` of those.
        split: Of a directory with several (`train`, `test` …), or of a registry.
        first: Only so many rows.
        skip: Rows to leave out at the start.
        clones: Directory with the repositories that a registry names.

    Raises:
        DatasetError: The set or a row cannot be read.
    """
    return islice(_rows(str(path), split, clones), skip, None if first is None else skip + first)


def _rows(path: str, split: str | None, clones: str | Path | None) -> Iterator[Row]:
    from rollout.suites import is_suite

    if is_suite(path):
        from rollout.suites.harbor import dataset

        yield from dataset.rows(path, split, clones)
        return
    if path == "-":
        yield from _json_lines(sys.stdin, "stdin")
        return
    source = Path(path)
    if source.is_dir():
        yield from _directory(source, split)
        return
    if not source.is_file():
        raise DatasetError(f"{path}: there is no such file or directory")
    name = source.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        yield from _parquet([source])
        return
    opened = gzip.open if source.suffix == ".gz" else open
    with opened(source, "rt", encoding="utf-8") as file:
        yield from (_json_list if name.endswith(".json") else _json_lines)(file, source.name)


def _json_lines(lines: Iterable[str], name: str) -> Iterator[Row]:
    try:
        for number, line in enumerate(lines, 1):
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
        yield from _json_lines(text.splitlines(), name)
        return
    for number, entry in enumerate(data if isinstance(data, list) else [data], 1):
        yield _row(number, f"{name}, row {number}", entry)


def _row(number: int, where: str, data: Any) -> Row:
    if not isinstance(data, dict):
        raise DatasetError(f"{where}: expected a JSON object, got {type(data).__name__}")
    return Row(number, where, data)


def _parquet(files: list[Path]) -> Iterator[Row]:
    parquet = import_of("pyarrow.parquet", "Parquet")
    pyarrow = import_of("pyarrow", "Parquet")
    number = 0
    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                batches = (batch.to_pylist() for batch in file.iter_batches(BATCH_ROWS))
                for at, data in enumerate(chain.from_iterable(batches), 1):
                    number += 1
                    yield Row(number, f"{path.name}, row {at}", data)
        except (pyarrow.ArrowException, OSError) as error:
            raise DatasetError(f"{path}: {error}") from None


def _directory(path: Path, split: str | None) -> Iterator[Row]:
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        if split is None and len(splits) > 1:
            raise DatasetError(f"{path} has the splits {', '.join(splits)}: name one")
        if split is not None and split not in splits:
            raise DatasetError(f"{path} has no split {split!r}, only {', '.join(splits)}")
        path /= split or splits[0]
    if (path / "state.json").is_file():
        yield from _saved(path)
        return
    files = sorted(path.glob("**/*.parquet"))
    if split is not None:
        # `train-00000-of-00002.parquet` or `train/0.parquet`, as hubs lay them out.
        files = [f for f in files if f.name.startswith(f"{split}-") or split in (f.stem, f.parent.name)]
    if not files:
        which = f"of split {split!r} " if split else ""
        raise DatasetError(f"{path} holds no Parquet files {which}and no dataset written by save_to_disk")
    yield from _parquet(files)


def _saved(path: Path) -> Iterator[Row]:
    datasets = import_of("datasets", "a dataset on disk")
    try:
        rows = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: {error}") from None
    for number, data in enumerate(rows, 1):
        yield Row(number, f"{path.name}, row {number}", data)


TEXTS = ("problem_statement", "question", "problem", "instruction", "prompt")
"""Fields of tasks that say what is asked, of which verl shows the first."""


def write_verl(
    path: Path, handler: str, tasks: Iterable[Mapping[str, Any]], limits: Mapping[str, float] | None = None
) -> None:
    """Write tasks as Parquet rows of verl; the file is there when all are.

    A row has `prompt`, `data_source`, `agent_name` and `extra_info` with `handler`, `index`, `limits` (the
    same in all) and `task`. The task is JSON text, because Parquet would give all tasks all fields of any.

    Raises:
        DatasetError: pyarrow is missing, a text is not Unicode, or the file cannot be written. Then, and
            when `tasks` raises, a file that was there before stays as it is.
    """
    if path.exists() and not path.is_file():
        raise DatasetError(f"{path} is no regular file: name one that Parquet can be written to")
    pyarrow, parquet = import_of("pyarrow", "Parquet"), import_of("pyarrow.parquet", "Parquet")
    text = pyarrow.string()
    info = {"handler": text, "task": text, "index": pyarrow.int64()}
    if limits:
        info["limits"] = pyarrow.struct(dict.fromkeys(limits, pyarrow.float64()))
    chat = pyarrow.list_(pyarrow.struct({"role": text, "content": text}))
    columns = {"data_source": text, "agent_name": text, "extra_info": pyarrow.struct(info)}
    schema = pyarrow.schema({"prompt": chat} | columns)

    def row(index: int, task: Mapping[str, Any]) -> dict[str, Any]:
        whole = json.dumps(task, default=str)
        content = next((str(task[name]) for name in TEXTS if task.get(name)), whole)
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise DatasetError(f"{path}: task {index + 1} is no Unicode text: {error}") from None
        extra = {"handler": handler, "task": whole, "index": index, "limits": limits}
        names = {"data_source": handler, "agent_name": "rollout_service", "extra_info": extra}
        return {"prompt": [{"role": "user", "content": content}]} | names

    rows = (row(index, task) for index, task in enumerate(tasks))
    part = path.with_name(f"{path.name}.part")
    try:
        with parquet.ParquetWriter(part, schema) as writer:
            while batch := list(islice(rows, BATCH_ROWS)):
                writer.write_table(pyarrow.Table.from_pylist(batch, schema))
        part.replace(path)
    except OSError as error:
        raise DatasetError(f"{path}: {error}") from None
    finally:
        part.unlink(missing_ok=True)


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
    jsonschema = import_of("jsonschema", "checking tasks")
    validator = jsonschema.Draft202012Validator(schema)
    error = jsonschema.exceptions.best_match(validator.iter_errors(task))
    if error is None:
        return None
    name = ".".join(map(str, error.absolute_path)) or "task"
    return f"{row.where}: {name}: {error.message[:300]}"
