"""`rollout submit` and `rollout tasks`: from a dataset into the service."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import click
from pydantic import ValidationError

from rollout.calls import with_id
from rollout.cli.common import WORK_PATIENCE_S, connect, err, url_option
from rollout.client import Client
from rollout.datasets import DatasetError, FieldMap, Row, load_map, problem, published_maps, read, verl_rows
from rollout.errors import problems_of
from rollout.progress import Meter
from rollout.schema import RolloutRequest

F = TypeVar("F", bound=Callable[..., Any])
IN_FLIGHT = 1000


def dataset_options(function: F) -> F:
    """Options of every command that reads tasks; they go to `Tasks` by name."""
    for option in (
        click.option("--map", "map_name", help="Field map: a file, or the name of a published set."),
        click.option("--split", help="Of a dataset with several."),
        click.option("--first", type=click.IntRange(1), help="Only so many rows."),
        click.option("--skip", type=click.IntRange(0), default=0, help="Leave out so many rows first."),
    ):
        function = option(function)
    return function


class Tasks:
    """The requests of a dataset, made anew at each iteration: a large one is never in memory."""

    def __init__(
        self,
        path: str,
        handler: str | None = None,
        *,
        map_name: str | None = None,
        n: int | None = None,
        tags: tuple[str, ...] = (),
        **part: Any,
    ) -> None:
        """With `handler`, or a map, each row is a task; without, a whole request.

        Args:
            part: `split`, `first` and `skip`, as `rollout.datasets.read` has them.

        Raises:
            click.ClickException: The map, or standard input, cannot be used.
        """
        try:
            self._map = load_map(map_name) if map_name else FieldMap()
            self._read = partial(read, path, **part)
            if path == "-":  # standard input cannot be read twice
                rows = list(self._read())
                self._read = lambda: iter(rows)
        except DatasetError as error:
            raise click.ClickException(str(error)) from None
        self.handler = handler or self._map.handler
        if map_name and self.handler is None:
            raise click.UsageError(f"the map {map_name} names no handler: give --handler")
        self._n, self._tags = n, tags

    def rows(self) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Rows, each with its task (or request).

        Raises:
            DatasetError: A row cannot be read, or lacks a field.
        """
        for row in self._read():
            if self._map.wants(row):
                yield row, self._map.apply(row)

    def __iter__(self) -> Iterator[RolloutRequest]:
        """Raises:
        click.ClickException: A row is no task or no valid request; it is named.
        """
        try:
            for row, data in self.rows():
                fields = {"handler": self.handler, "task": data} if self.handler else data
                if self._n is not None:
                    fields["n"] = self._n
                if self._tags:
                    fields["tags"] = [*fields.get("tags", []), *self._tags]
                try:
                    yield RolloutRequest.model_validate(fields)
                except ValidationError as error:
                    raise DatasetError(f"{row.where}: {problems_of(error)}") from None
        except DatasetError as error:
            raise click.ClickException(str(error)) from None


@click.command()
@click.argument("file")
@click.option(
    "-o",
    "--output",
    type=click.File("w", encoding="utf-8"),
    default="-",
    help="Where the rollouts go, one JSON object a line. [default: stdout]",
)
@click.option("--handler", help="Each row of FILE is then a task for this handler, not a whole request.")
@click.option("--n", type=click.IntRange(1, 1000), help="Rollouts per row.")
@click.option("--tag", "tags", multiple=True, help="Tag to add; may be given several times.")
@click.option(
    "--in-flight",
    type=click.IntRange(1),
    default=IN_FLIGHT,
    show_default=True,
    help="Most rollouts submitted and not ended.",
)
@dataset_options
@url_option
def submit(file: str, output: IO[str], in_flight: int, url: str | None, **tasks: Any) -> None:
    """Submit what FILE holds and write each rollout as it ends.

    FILE is JSON lines (- is stdin), Parquet, or a dataset on disk; it is checked to its end before the first
    rollout is submitted, and read row by row.

    What the service accepted survives the end of any of its processes. A power cut of the machine of Redis
    may lose the last second, unless the service was started with ROLLOUT_REDIS_FSYNC=always.
    """
    submit_all(Tasks(file, **tasks), output, in_flight, url, file)


def submit_all(tasks: Tasks, output: IO[str], in_flight: int, url: str | None, name: str) -> None:
    """Submit requests, write the rollouts as they end, cancel the rest at Ctrl-C.

    Raises:
        click.ClickException: A row cannot be submitted; then nothing was.
    """
    total = sum(request.n for request in tasks)
    if not total:
        raise click.ClickException(f"{name} holds no request")
    pending: set[str] = set()

    def noted() -> Iterator[RolloutRequest]:
        for request in tasks:
            request = with_id(request)  # Ctrl-C has to know what to cancel
            pending.update(request.rollout_ids()[1])
            yield request

    with connect(url, WORK_PATIENCE_S) as client, Meter(total, err) as meter:
        try:
            for rollout in client.rollouts(noted(), in_flight, progress=False):
                pending.discard(rollout.id)
                output.write(rollout.model_dump_json() + "\n")
                output.flush()
                meter.add(rollout)
        except KeyboardInterrupt:
            meter.__exit__(None, None, None)  # the question needs the terminal to itself
            _cancel_rest(client, pending)
            raise click.exceptions.Exit(130) from None


def _cancel_rest(client: Client, pending: set[str]) -> None:
    """After Ctrl-C: cancel what has not ended, unless a person at the terminal says no."""
    try:
        question = f"Cancel the {len(pending)} rollouts not ended?"
        person = sys.stdin.isatty() and sys.stderr.isatty()
        if person and not click.confirm(question, default=True, err=True):
            err.print("[dim]they go on; `rollout list` shows them[/]")
            return
    except (click.Abort, KeyboardInterrupt):
        pass  # Ctrl-C again means yes
    done = client.cancel_many(ids=sorted(pending))
    err.print(f"cancelled {done['cancelled']}; {done['already_ended']} had ended")


@click.command()
@click.argument("file")
@click.option("--handler", help="Check against this handler's schema. [default: as the map says]")
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
@click.option("--most-errors", type=click.IntRange(1), default=10, show_default=True, help="Then stop.")
@dataset_options
@url_option
def tasks(
    file: str,
    handler: str | None,
    no_check: bool,
    output: IO[str] | None,
    parquet: Path | None,
    most_errors: int,
    url: str | None,
    **dataset: Any,
) -> None:
    """Check the tasks of a dataset against a handler's schema, and convert them.

    Each task that does not fit is named with its row and field. Ends with 1 when there is one.
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
    good, wrong = 0, 0
    try:
        with verl_rows(parquet, str(source.handler)) if parquet else nullcontext() as add:
            for row, task in source.rows():
                if schema is not None and (words := problem(task, schema, row)):
                    err.print(words, highlight=False, soft_wrap=True, markup=False)
                    wrong += 1
                    if wrong >= most_errors:
                        break
                    continue
                good += 1
                if output is not None:
                    output.write(json.dumps(task, default=str) + "\n")
                if add is not None:
                    add(task)
    except DatasetError as error:
        raise click.ClickException(str(error)) from None
    err.print(f"{good} tasks {'read' if schema is None else 'fit'}, {wrong} do not", highlight=False)
    if wrong:
        raise click.exceptions.Exit(1)
