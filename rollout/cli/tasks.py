"""`rollout submit` and `rollout tasks`: from a dataset into the service."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, TypeVar

import click
from pydantic import ValidationError

from rollout.cli.common import err, problems_of, url_option
from rollout.client import Client
from rollout.datasets import DatasetError, FieldMap, Row, load_map, problem, published_maps, read
from rollout.progress import Meter
from rollout.schema import Rollout, RolloutRequest, new_id

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
        split: str | None = None,
        first: int | None = None,
        skip: int = 0,
        n: int | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        """With `handler`, or a map, each row is a task; without, a whole request.

        Raises:
            click.ClickException: The map, or standard input, cannot be used.
        """
        try:
            self._map = load_map(map_name) if map_name else None
            # Standard input cannot be read twice.
            self._rows = list(read(path, first=first, skip=skip)) if path == "-" else None
        except DatasetError as error:
            raise click.ClickException(str(error)) from None
        self.handler = handler or (self._map.handler if self._map else None)
        if self._map and self.handler is None:
            raise click.UsageError(f"the map {map_name} names no handler: give --handler")
        self._n, self._tags = n, tags
        self._path, self._split, self._first, self._skip = path, split, first, skip

    def rows(self) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Rows, each with its task (or request).

        Raises:
            DatasetError: A row cannot be read, or lacks a field.
        """
        field_map = self._map or FieldMap()
        rows: Iterable[Row] | None = self._rows
        if rows is None:
            rows = read(self._path, split=self._split, first=self._first, skip=self._skip)
        for row in rows:
            if field_map.wants(row):
                yield row, field_map.apply(row)

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
def submit(
    file: str,
    output: IO[str],
    handler: str | None,
    n: int | None,
    tags: tuple[str, ...],
    in_flight: int,
    url: str | None,
    **dataset: Any,
) -> None:
    """Submit what FILE holds and write each rollout as it ends.

    FILE is JSON lines (- is stdin), Parquet, or a dataset on disk; it is checked to its end before the first
    rollout is submitted, and read row by row.

    What the service accepted survives the end of any of its processes. A power cut of the machine of Redis
    may lose the last second, unless the service was started with ROLLOUT_REDIS_FSYNC=always.
    """
    submit_all(Tasks(file, handler, n=n, tags=tags, **dataset), output, in_flight, url, file)


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
            # With an id, so that sending one twice creates nothing twice, and Ctrl-C knows what to cancel.
            request = request if request.id else request.model_copy(update={"id": new_id()})
            pending.update(request.rollout_ids()[1])
            yield request

    with Client(url) as client, Meter(total, err) as meter:
        try:
            for rollout in client.rollouts(noted(), in_flight, progress=False):
                pending.discard(rollout.id)
                _write(rollout, output)
                meter.add(rollout)
        except KeyboardInterrupt:
            meter.__exit__(None, None, None)  # the question needs the terminal to itself
            _cancel_rest(client, pending)
            raise click.exceptions.Exit(130) from None


def _write(rollout: Rollout, output: IO[str]) -> None:
    output.write(rollout.model_dump_json() + "\n")
    output.flush()


def _cancel_rest(client: Client, pending: set[str]) -> None:
    """After Ctrl-C: cancel what has not ended, unless a person at the terminal says no."""
    try:
        asked = sys.stdin.isatty() and sys.stderr.isatty()
        if asked and not click.confirm(
            f"Cancel the {len(pending)} rollouts not ended?", default=True, err=True
        ):
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
@click.option("--most-errors", type=click.IntRange(1), default=10, show_default=True, help="Then stop.")
@dataset_options
@url_option
def tasks(
    file: str,
    handler: str | None,
    no_check: bool,
    output: IO[str] | None,
    most_errors: int,
    url: str | None,
    **dataset: Any,
) -> None:
    """Check the tasks of a dataset against a handler's schema, and convert them.

    Each task that does not fit is named with its row and field. Ends with 1 when there is one.
    """
    found = Tasks(file, handler, **dataset)
    schema: dict[str, Any] | None = None
    if not no_check:
        if found.handler is None:
            raise click.UsageError(f"give --handler, --no-check, or a --map: {', '.join(published_maps())}")
        with Client(url) as client:
            schemas = {info.name: info.task_schema for info in client.handlers()}
        if found.handler not in schemas:
            known = ", ".join(sorted(schemas))
            raise click.ClickException(f"the service has no handler {found.handler!r}; it has: {known}")
        schema = schemas[found.handler]
    good, wrong = 0, 0
    try:
        for row, task in found.rows():
            if schema is not None and (words := problem(task, schema, row)):
                err.print(words, highlight=False, soft_wrap=True, markup=False)
                wrong += 1
                if wrong >= most_errors:
                    break
                continue
            good += 1
            if output is not None:
                output.write(json.dumps(task, default=str) + "\n")
    except DatasetError as error:
        raise click.ClickException(str(error)) from None
    err.print(f"{good} tasks {'read' if schema is None else 'fit'}, {wrong} do not", highlight=False)
    if wrong:
        raise click.exceptions.Exit(1)
