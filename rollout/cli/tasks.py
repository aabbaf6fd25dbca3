"""`rollout submit` and `fetch`: from a dataset into the service, and rollouts out of it."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click
from pydantic import ValidationError

from rollout.calls import with_id
from rollout.cli.common import (
    PATIENCE_S,
    WORK_PATIENCE_S,
    complete_handlers,
    connect,
    err,
    output_option,
    url_option,
)
from rollout.cli.rollouts import select
from rollout.client import Client
from rollout.datasets import DatasetError, FieldMap, Row, load_map, read
from rollout.errors import ApiError, RolloutError, Unavailable, problems_of
from rollout.http import NOT_FOUND
from rollout.progress import Meter
from rollout.schema import Rollout, RolloutRequest, Submitted
from rollout.suites import HARBOR, is_suite
from rollout.suites.imported import located

if TYPE_CHECKING:
    from rollout.suites.harbor import HarborTask

F = TypeVar("F", bound=Callable[..., Any])
IN_FLIGHT = 1000
PUTS_AT_ONCE = 8
"""Bundles on the way: a suite may have thousands."""
SERVER_FAULT = 500
"""HTTP status from which on an answer does not say what became of a request."""


def dataset_options(function: F) -> F:
    """Options of every command that reads tasks; they go to `Tasks` by name."""
    for option in (
        click.option("--map", "map_name", help="Field map: a file, or the name of a published set."),
        click.option("--split", help="Of a dataset with several."),
        click.option("--first", type=click.IntRange(1), help="Only so many rows."),
        click.option("--skip", type=click.IntRange(0), default=0, help="Leave out so many rows first."),
        click.option("--clones", type=click.Path(file_okay=False), help="Repositories of a registry.json."),
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
        """With `handler`, a map, or an imported dataset, each row is a task; without, a whole request.

        Args:
            path: A file, a directory, or the name of an imported dataset.
            part: `split`, `first`, `skip` and `clones`, as `rollout.datasets.read` has them.

        Raises:
            DatasetError: The map, or standard input, cannot be used.
            click.UsageError: The map names no handler, and none is given.
        """
        self._map = load_map(map_name) if map_name else FieldMap()
        path, known = located(path)
        self._read = partial(read, path, **part)
        suite = is_suite(path)
        if path == "-" or suite:  # standard input cannot be read twice, and directories take long
            rows = list(self._read())
            self._read = lambda: iter(rows)
        self.where = ""
        """The row of the request that was read last."""
        self.handler = handler or self._map.handler or known or (HARBOR if suite else None)
        if map_name and self.handler is None:
            raise click.UsageError(f"the map {map_name} names no handler: give --handler")
        self._n, self._tags = n, tags

    def rows(self) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Rows, each with its task (or request). Raises DatasetError for one that cannot be read."""
        for row in self._read():
            if self._map.wants(row):
                yield row, self._map.apply(row)

    def put_bundles(self, put: Callable[[HarborTask], Any]) -> None:
        """Have the bundle of each task that is a directory put; what it has and is not heeded is told."""
        found = [row.directory for row, _ in self.rows() if row.directory is not None]
        for warning in (warning for directory in found for warning in directory.warnings):
            click.secho(warning, err=True, dim=True)
        pool = ThreadPoolExecutor(PUTS_AT_ONCE)
        try:
            deque(pool.map(put, found), maxlen=0)
        finally:
            pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[RolloutRequest]:
        """Raises DatasetError for a row that is no task or no valid request; it is named."""
        for row, data in self.rows():
            self.where = row.where
            fields = {"handler": self.handler, "task": data} if self.handler else data
            if self._n is not None:
                fields["n"] = self._n
            if self._tags:
                fields["tags"] = [*fields.get("tags", []), *self._tags]
            try:
                yield RolloutRequest.model_validate(fields)
            except ValidationError as error:
                raise DatasetError(f"{row.where}: {problems_of(error)}") from None


@click.command()
@click.argument("file")
@output_option
@click.option(
    "--handler",
    shell_complete=complete_handlers,
    help="Each row of FILE is then a task for this handler, not a whole request.",
)
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

    FILE is JSON lines (- is stdin), Parquet, a dataset on disk, or a suite of task directories, whose bundles
    are sent first. It is checked to its end before the first rollout is submitted, and read row by row.

    What the service accepted survives the end of any of its processes. A power cut of the machine of Redis
    may lose the last second, unless the service was started with ROLLOUT_REDIS_FSYNC=always.
    """
    submit_all(Tasks(file, **tasks), output, in_flight, url, file)


def submit_all(tasks: Tasks, output: IO[str], in_flight: int, url: str | None, name: str) -> None:
    """Submit requests, write the rollouts as they end, cancel the rest at Ctrl-C, and sum them up.

    Raises:
        RolloutError: A row cannot be submitted; then nothing was.
        click.ClickException: There is no row, or the output cannot be opened; nothing was submitted. Or the
            gateway or the output fails later; then it says how to get the rest.
    """
    total = sum(request.n for request in tasks)
    if not total:
        raise click.ClickException(f"{name} holds no request")
    lines = _Lines(output)
    begun = time.monotonic()
    unwritten: dict[str, str] = {}  # ids of what was sent; of what no answer has accepted yet, with its row

    def sent() -> Iterator[RolloutRequest]:
        for request in map(with_id, tasks):  # Ctrl-C has to know what to cancel
            unwritten.update(dict.fromkeys(request.rollout_ids()[1], tasks.where))
            yield request

    def accepted(entries: list[Submitted]) -> None:
        unwritten.update((entry.id, "") for entry in entries)

    def rest() -> str:
        return _rest(unwritten, total - lines.count - len(unwritten))

    with connect(url, WORK_PATIENCE_S) as client:
        tasks.put_bundles(client.put_bundle)
        try:
            with Meter(total, err) as meter:
                for rollout in client.rollouts(sent(), in_flight, progress=False, announce=accepted):
                    lines.write(rollout)
                    del unwritten[rollout.id]
                    meter.add(rollout)
                lines.close()
        except RolloutError as error:
            rows = dict.fromkeys(filter(None, unwritten.values()))
            fields = {f"requests.{index}": where for index, where in enumerate(rows)}
            refused = isinstance(error, ApiError) and error.status < SERVER_FAULT  # a call is, whole
            if refused or isinstance(error, DatasetError):  # of which no call was sent
                unwritten = {rollout_id: "" for rollout_id, where in unwritten.items() if not where}
            reason = error.reason if isinstance(error, Unavailable) else str(error)
            reason = re.sub(r"\brequests\.\d+", lambda field: fields.get(field[0], field[0]), reason)
            raise click.ClickException(f"{reason}\n{lines.text()}. {rest()}") from None
        except KeyboardInterrupt:
            _cancel(client, list(unwritten), rest)
            raise click.exceptions.Exit(130) from None
    click.echo(f"{meter.text()}; {lines.text()}, after {time.monotonic() - begun:.1f} s", err=True)
    if unscored := lines.count - len(meter.rewards):
        click.echo(f"{unscored} have no reward: `rollout show ID` says why", err=True)


class _OutputError(RolloutError):
    """The output takes no more."""


class _Lines:
    """The file that rollouts are written to, one JSON object a line; opened here and not at the first one."""

    def __init__(self, output: IO[str]) -> None:
        """Raises click.FileError when it cannot be opened."""
        begin = getattr(output, "open", None)  # click's files are opened at their first use
        self._file: IO[str] = begin() if begin else output
        self._ours = begin is not None
        self.count = 0

    def write(self, rollout: Rollout) -> None:
        """Raises _OutputError when there is no room; then the file ends with the rollout before."""
        # What the shell opened for us may be anything, or opened to append.
        whole = self._file.tell() if self._ours and self._file.seekable() else None
        try:
            self._file.write(rollout.model_dump_json() + "\n")
            self._file.flush()
        except OSError as error:
            with suppress(OSError):
                self._file.close()  # it would try to write the rest at the end
            with suppress(OSError):  # a device has no length
                if whole is not None:
                    os.truncate(self._file.name, whole)
            raise _OutputError(f"{self._file.name} cannot be written: {error.strerror}") from None
        self.count += 1

    def close(self) -> None:
        """Raises _OutputError when a file system finds out only now that it had no room."""
        try:
            if self._ours:
                self._file.close()
        except OSError as error:
            fault = f"cannot be written: {error.strerror}; what was written last may be missing"
            raise _OutputError(f"{self._file.name} {fault}") from None

    def text(self) -> str:
        return f"{self.count} rollouts are in {self._file.name}"


def _rest(unwritten: dict[str, str], unsent: int) -> str:
    """How to get what was submitted and not written. A full disk need not be that of temporary files."""
    refused = f"{unsent} were not submitted"
    if not unwritten:
        return refused
    ids = "\n".join(unwritten) + "\n"
    try:
        with tempfile.NamedTemporaryFile("w", prefix="rollout-ids-", suffix=".txt", delete=False) as file:
            file.write(ids)
        place = file.name
    except OSError:
        click.echo(ids, err=True)
        place = "FILE, with the ids above"
    doubtful = sum(map(bool, unwritten.values()))
    doubt = f", and {doubtful} whose submission was not answered" if doubtful else ""
    return (
        f"{len(unwritten) - doubtful} that go on, or have ended meanwhile{doubt}, are named in {place}:\n"
        f"  rollout fetch --ids {place} -o REST     writes them as they end\n"
        f"  xargs rollout cancel < {place}     ends them\n{refused}"
    )


def _cancel(client: Client, ids: list[str], rest: Callable[[], str]) -> None:
    """After Ctrl-C: cancel what has not ended, unless a person at the terminal says no.

    What has ended and is not in the file, or could not be cancelled, is named.
    """
    with suppress(click.Abort, KeyboardInterrupt):  # Ctrl-C again means yes
        question = f"Cancel the {len(ids)} rollouts not ended?"
        person = sys.stdin.isatty() and sys.stderr.isatty()
        if person and ids and not click.confirm(question, default=True, err=True):
            click.echo(rest(), err=True)
            return
    client.retry_for = PATIENCE_S
    try:
        done = client.cancel_many(ids)
        click.echo(f"cancelled {done['cancelled']}; {done['already_ended']} had ended", err=True)
        if done["already_ended"]:
            click.echo(rest(), err=True)
    except (RolloutError, KeyboardInterrupt) as error:
        click.echo(f"not cancelled: {error}\n{rest()}", err=True)


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--ids", "file", type=click.File("r"), help="A file of ids, one a line; - is stdin.")
@click.option("--group", "group_id", help="All rollouts of a group.")
@click.option("--tag", help="All rollouts with a tag.")
@output_option
@url_option
def fetch(ids: tuple[str, ...], file: IO[str] | None, output: IO[str], url: str | None, **of: Any) -> None:
    """Wait for rollouts that were submitted before, and write them as `submit` does.

    By id, by group or by tag. Ends with 1 when one is unknown, or not kept any more.
    """
    if sum(map(bool, (ids, file, *of.values()))) != 1:
        raise click.UsageError("give ids, or --ids, or --group, or --tag: exactly one of them")
    unknown: list[str] = []
    with connect(url, WORK_PATIENCE_S) as client:
        chosen = [*ids, *(file.read().split() if file else ())]
        if any(of.values()):
            chosen = [item.id for item in select(client, sys.maxsize, **of)]
        chosen = [*dict.fromkeys(chosen)]
        lines = _Lines(output)
        with Meter(len(chosen), err) as meter:
            try:
                for rollout in _as_they_end(client, chosen, unknown):
                    lines.write(rollout)
                    meter.add(rollout)
                lines.close()
            except _OutputError as error:
                raise click.ClickException(f"{error}. {lines.text()}") from None
    click.echo(f"{meter.text()}; {lines.text()}", err=True)
    if file and not chosen:
        raise click.ClickException(f"{file.name} names no rollout")
    if unknown or not chosen:
        raise click.ClickException(f"not known, or not kept any more: {', '.join(unknown) or 'any of these'}")


def _as_they_end(client: Client, ids: list[str], unknown: list[str]) -> Iterator[Rollout]:
    """Those that have ended, then the others in order of completion; ids that are not known are noted."""
    cursor = client.results("$", limit=1, include="summary").cursor
    waiting = []
    for rollout_id in ids:
        try:
            rollout = client.get(rollout_id)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            unknown.append(rollout_id)
            continue
        if rollout.state.terminal:
            yield rollout
        else:
            waiting.append(rollout_id)
    yield from client.stream(waiting, cursor=cursor)
