"""`rollout tasks`: datasets, what is known of them, and what of them is here."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click
from pydantic import ValidationError

from rollout.cli.common import complete_handlers, connect, url_option
from rollout.cli.points import PointGroup
from rollout.cli.tasks import Tasks, dataset_options
from rollout.datasets import DatasetError, problem, published_maps, write_verl
from rollout.errors import problems_of
from rollout.schema import Limits

TASKS_GROUP = "rollout.commands.tasks"
"""Entry points of further commands of `rollout tasks`."""
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
    schema: dict[str, Any] | None = None
    if not no_check:
        if source.handler is None:
            raise click.UsageError(f"give --handler, --no-check, or a --map: {', '.join(published_maps())}")
        with connect(url) as client:
            schemas = {info.name: info.task_schema for info in client.handlers()}
        if source.handler not in schemas:
            names = ", ".join(sorted(schemas))
            raise click.ClickException(f"the service has no handler {source.handler!r}; it has: {names}")
        schema = schemas[source.handler]
    if parquet is not None and source.handler is None:
        raise click.UsageError("--verl needs --handler or a --map, for each row names its handler")
    try:
        bounds = Limits.model_validate_json(limits or "{}").model_dump(exclude_unset=True)
    except ValidationError as error:
        raise click.UsageError(f"--limits: {problems_of(error)}") from None
    good, wrong = 0, 0

    def fitting() -> Iterator[dict[str, Any]]:
        nonlocal good, wrong
        for row, task in source.rows():
            if schema is not None and (words := problem(task, schema, row)):
                click.echo(words, err=True)
                wrong += 1
                if wrong >= most_errors:
                    break
                continue
            good += 1
            if output is not None:
                output.write(json.dumps(task, default=str) + "\n")
            yield task
        if wrong and parquet is not None:
            raise DatasetError(f"{good} tasks fit, {wrong} do not: {parquet} is not written")

    if parquet is not None:
        write_verl(parquet, str(source.handler), fitting(), bounds)
    else:
        deque(fitting(), maxlen=0)
    click.echo(f"{good} tasks {'read' if schema is None else 'fit'}, {wrong} do not", err=True)
    if wrong:
        raise click.exceptions.Exit(1)
