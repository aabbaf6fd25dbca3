"""`rollout tasks`: datasets, what is known of them, and what of them is here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any

import click
from pydantic import ValidationError
from rich.text import Text

from rollout.cli.common import Column, Sheet, complete_handlers, connect, json_option, show_view, url_option
from rollout.cli.points import PointGroup
from rollout.cli.tasks import Tasks, dataset_options
from rollout.datasets import DatasetError, Row, problem, published_maps, write_verl
from rollout.errors import problems_of
from rollout.schema import Limits
from rollout.suites.catalogue import catalogue
from rollout.suites.imported import Imported, home, imported, named, place, write, writing

TASKS_GROUP = "rollout.commands.tasks"
"""Entry points of further commands of `rollout tasks`."""
IMAGE_READERS = "rollout.image_readers"
"""Entry points of what reads the images that a dataset needs; see `rollout images build --dataset`."""
SHOWN = 5
"""Images that are named, where more are missing."""
SAMPLE_CHARS = 2000
OPERATOR_HELP = {"check": "Check that tasks can be solved, and not by doing nothing, in real sandboxes."}


@click.group(cls=PointGroup, points=TASKS_GROUP, helps=OPERATOR_HELP, path="tasks")
def tasks() -> None:
    """Datasets of tasks: convert, import and check them, and see which ones there are."""


@tasks.command()
@click.argument("file")
@click.option(
    "--handler",
    shell_complete=complete_handlers,
    help="Check against this handler's schema. [default: as the map says]",
)
@click.option("--no-check", is_flag=True, help="Only convert; needs no service.")
@click.option(
    "-o", "--output", type=click.File("w", encoding="utf-8"), help="Write the tasks as JSON lines, for later."
)
@click.option(
    "--verl",
    "parquet",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the tasks as Parquet rows that verl trains on.",
)
@click.option("--limits", help='For --verl: limits of each rollout, such as {"max_turns": 50}.')
@click.option("--most-errors", type=click.IntRange(1), default=10, show_default=True, help="Then stop.")
@dataset_options
@url_option
def convert(
    file: str,
    handler: str | None,
    no_check: bool,
    output: IO[str] | None,
    parquet: Path | None,
    limits: str | None,
    most_errors: int,
    url: str | None,
    **dataset: Any,
) -> None:
    """Check the tasks of a dataset against a handler's schema, and convert them.

    Each task that does not fit is named with its row and field. When there is one, it ends with 1, and --verl
    writes nothing.
    """
    source = Tasks(file, handler, **dataset)
    fitting = _Fitting(source, None if no_check else _schema(source, url), most_errors)
    if parquet is not None and source.handler is None:
        raise click.UsageError("--verl needs --handler or a --map, for each row names its handler")
    try:
        bounds = Limits.model_validate_json(limits or "{}").model_dump(exclude_unset=True)
    except ValidationError as error:
        raise click.UsageError(f"--limits: {problems_of(error)}") from None

    def converted() -> Iterator[dict[str, Any]]:
        for _, task in fitting:
            if output is not None:
                output.write(json.dumps(task, default=str) + "\n")
            yield task
        if fitting.wrong and parquet is not None:
            raise DatasetError(f"{fitting}: {parquet} is not written")

    if parquet is not None:
        write_verl(parquet, str(source.handler), converted(), bounds)
    else:
        deque(converted(), maxlen=0)
    click.echo(fitting, err=True)
    if fitting.wrong:
        raise click.exceptions.Exit(1)
    if not no_check and (output or parquet):  # what the rows name has to be there when they are submitted
        with connect(url) as client:
            source.put_bundles(client.put_bundle)


@tasks.command("import")
@click.argument("path")
@click.option("--name", required=True, help="Under which it stands in the place of a file from now on.")
@click.option("--handler", shell_complete=complete_handlers, help="Of its tasks. [default: as the map says]")
@click.option("--no-check", is_flag=True, help="Do not check the tasks against the handler's schema.")
@click.option("--replace", is_flag=True, help="Take the place of what has this name.")
@click.option("--images", is_flag=True, help="Make the images that its tasks lack here, too.")
@dataset_options
@url_option
def import_(
    path: str,
    name: str,
    handler: str | None,
    no_check: bool,
    replace: bool,
    images: bool,
    url: str | None,
    **dataset: Any,
) -> None:
    """Copy the dataset at PATH to below $ROLLOUT_HOME/tasks, and say which images its tasks lack here.

    A task that does not fit the handler's schema is named, and nothing is imported then.
    """
    source = Tasks(path, handler, **dataset)
    if source.handler is None:
        raise click.UsageError("give --handler, or a --map that names one")
    fitting = _Fitting(source, None if no_check else _schema(source, url), sys.maxsize)
    described = Imported(name=name, handler=source.handler, source=str(Path(path).absolute()))
    with writing(described, replace) as part:
        write(described, fitting, part)
        if fitting.wrong or not fitting.good:
            raise DatasetError(f"{fitting}: nothing is imported")
    click.echo(f"{name}: {fitting.good} tasks of {source.handler} in {place(described)}", err=True)
    command = _images_command(described)
    if command and images:
        raise click.exceptions.Exit(
            subprocess.run([sys.executable, "-m", "rollout.cli", *command]).returncode
        )
    if command:
        click.echo(f"  rollout {shlex.join(command)}     makes them", err=True)


class _Fitting:
    """The tasks of a set that fit a schema (None: any does); others are named, up to so many."""

    def __init__(self, source: Tasks, schema: dict[str, Any] | None, most: int) -> None:
        self._source, self._schema, self._most = source, schema, most
        self.good = self.wrong = 0

    def __iter__(self) -> Iterator[tuple[Row, dict[str, Any]]]:
        for row, task in self._source.rows():
            if self._schema is not None and (words := problem(task, self._schema, row)):
                click.echo(words, err=True)
                self.wrong += 1
                if self.wrong >= self._most:
                    break
                continue
            self.good += 1
            yield row, task

    def __str__(self) -> str:
        return f"{self.good} tasks {'read' if self._schema is None else 'fit'}, {self.wrong} do not"


def _schema(source: Tasks, url: str | None) -> dict[str, Any]:
    """The schema of the tasks' handler, as the service has it."""
    if source.handler is None:
        raise click.UsageError(f"give --handler, --no-check, or a --map: {', '.join(published_maps())}")
    with connect(url) as client:
        schemas = {info.name: info.task_schema for info in client.handlers()}
    if source.handler not in schemas:
        names = ", ".join(sorted(schemas))
        raise click.ClickException(f"the service has no handler {source.handler!r}; it has: {names}")
    return schemas[source.handler]


def _images_command(dataset: Imported) -> list[str]:
    """Say which images are not here, and answer what makes them; [] = none is missing, or nobody can tell."""
    point = next((p for p in entry_points(group=IMAGE_READERS) if p.name == dataset.handler), None)
    here = Path(os.environ.get("ROLLOUT_IMAGES") or home().with_name("images"))
    try:
        wanted = [name for name, _ in point.load()(place(dataset))] if point else []
    except Exception as error:  # of a package that is no part of the client, and may not be installed
        click.echo(f"its images were not looked for: {error}", err=True)
        return []
    missing = [name for name in wanted if not any((here / f"{name}{end}").exists() for end in ("", ".sif"))]
    if not missing:
        return []
    some = ", ".join(missing[:SHOWN]) + (" …" if len(missing) > SHOWN else "")
    click.echo(f"{len(missing)} of {len(wanted)} images are not in {here}: {some}", err=True)
    return ["images", "build", "--dataset", str(place(dataset)), "--reader", dataset.handler]


@tasks.command("list")
@json_option
def list_(as_json: bool) -> None:
    """Show the datasets that are known, and those imported here."""
    here = {dataset.name: dataset for dataset in imported()}
    own = [dataset for dataset in here.values() if dataset.name not in {known.name for known in catalogue()}]
    sheet = Sheet(
        [
            Column("name", lambda item: item.name, whole=True),
            Column("handler", lambda item: item.handler),
            Column("form", lambda item: getattr(item, "form", "imported"), drop=2),
            Column("here", lambda item: str(here[item.name].tasks) if item.name in here else "", number=True),
            Column("licence", lambda item: getattr(item, "licence", ""), drop=3),
            Column("from", lambda item: getattr(item, "origin", "") or item.source, drop=1),
        ],
        [*own, *catalogue()],
    )
    value = {"imported": [*here.values()], "known": [*catalogue()]}
    show_view(sheet, value, as_json)


@tasks.command()
@click.argument("name", shell_complete=lambda *_: _names())
@json_option
def show(name: str, as_json: bool) -> None:
    """Show what is known of the dataset NAME: fields, map, a row, how to get it, and what of it is here."""
    known = next((item for item in catalogue() if item.name == name), None)
    here = named(name)
    if known is None and here is None:
        raise click.ClickException(f"no dataset {name!r}: there are {', '.join(_names())}")
    lines: list[str] = []
    if known is not None:
        lines += [f"{known.name}: {known.form} for the handler {known.handler}, from {known.origin}"]
        lines += [f"licence: {known.licence}", f"checked: {known.checked}"]
        lines += [f"images: {known.images}"] if known.images else []
        lines += [f"map: --map {known.map}"] if known.map else []
        lines += ["get it:", *(f"  {step}" for step in known.get), "fields of a task:"]
        lines += [f"  {field}: {text}" for field, text in known.fields.items()]
        lines += ["a row:", f"  {json.dumps(known.sample, ensure_ascii=False)}"]
    if here is not None:
        lines += [f"here: {here.tasks} tasks of {here.handler} in {place(here)}, from {here.source}"]
        lines += ["its first task:", f"  {json.dumps(here.sample, ensure_ascii=False)[:SAMPLE_CHARS]}"]
    show_view(Text("\n".join(lines)), {"known": known, "imported": here}, as_json)


def _names() -> list[str]:
    return sorted({item.name for item in (*imported(), *catalogue())})
