"""`rollout tasks check`: an entry point of the group `rollout.commands.tasks`."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import structlog
from pydantic import ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollout.cli.common import err, show_view
from rollout.cli.tasks import Tasks, dataset_options
from rollout.datasets import FieldMap, Row, load_map
from rollout.errors import problems_of
from rollout.schema import RolloutRequest
from rollout.suites import HARBOR, SuiteError, is_suite
from rollout.suites.harbor.dataset import read, sources
from rollout.suites.imported import located
from services.settings import SettingsError
from services.settings import settings as read_settings
from workers.bundles import keep
from workers.handler_commands import as_interrupt, load_handler
from workers.task_checks.checker import Case, Checker
from workers.task_checks.report import Report, view

INTERRUPTED = 130


@click.command()
@click.argument("file", metavar="PATH|DATASET")
@click.option("--handler", help="Name, module:Class or file.py:Class. [default: as the map says]")
@click.option("--sample", type=click.IntRange(1), help="Only so many tasks, drawn by chance.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of --sample.")
@click.option("--jobs", type=click.IntRange(1, 256), help="Tasks at once. [default: one a processor]")
@click.option("--repeat", type=click.IntRange(1, 20), default=2, show_default=True, help="Solutions a task.")
@click.option("--thorough", is_flag=True, help="Look for leaks in the system's own directories, too.")
@click.option("--all", "everything", is_flag=True, help="A row for each task, not only for those not ok.")
@click.option(
    "--json",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report there.",
)
@dataset_options
def check(
    file: str,
    handler: str | None,
    sample: int | None,
    seed: int,
    jobs: int | None,
    repeat: int,
    thorough: bool,
    everything: bool,
    target: Path | None,
    **dataset: Any,
) -> None:
    """Check that tasks can be solved, and not by doing nothing, in real sandboxes.

    Each task's own solution is played twice and must earn 1; doing nothing must earn less; and what is hidden
    from an agent (tests, solution, later commits, keys) must not be found in its sandbox. Ends with 1 when a
    task is not fit to be trained on.
    """
    handler, numbers, case_of = _tasks(file, handler, **dataset)
    try:
        settings = read_settings()
    except SettingsError as error:
        raise click.ClickException(str(error)) from error
    loaded = load_handler(handler, settings)
    # Lines of each rollout would hide the progress.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if sample is not None and sample < len(numbers):
        numbers = sorted(random.Random(seed).sample(numbers, sample))
    if not numbers:
        raise click.ClickException(f"{file} holds no task")
    report = Report(source=file, handler=loaded.name)
    checker = Checker(loaded, settings, jobs=jobs or os.cpu_count() or 1, repeat=repeat, thorough=thorough)
    before = signal.signal(signal.SIGTERM, as_interrupt)
    try:
        with _progress() as progress:
            bar = progress.add_task("checking", total=len(numbers))
            asyncio.run(checker.check_all(map(case_of, numbers), report, lambda _: progress.advance(bar)))
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        signal.signal(signal.SIGTERM, before)
    if target is not None:
        try:
            target.write_text(report.model_dump_json(indent=1) + "\n", "utf-8")
        except OSError as error:
            raise click.ClickException(f"{target} cannot be written: {error.strerror}") from None
    show_view(view(report, everything))
    if report.interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    if report.faulty:
        raise click.exceptions.Exit(1)


def _tasks(
    file: str, handler: str | None, **dataset: Any
) -> tuple[str, Sequence[int], Callable[[int], Case]]:
    """The handler, the numbers of the tasks, and what makes a case of a number.

    A row, or a directory, that is no task is a case, too; a file that cannot be read is none.
    """
    path, known = located(file)
    if not is_suite(path):
        source = Tasks(file, handler, **dataset)
        if source.handler is None:
            raise click.UsageError("give --handler, or a --map or dataset that names one")
        rows = list(source.rows())
        return source.handler, range(len(rows)), lambda number: _case(*rows[number])

    name = dataset["map_name"]
    field_map = load_map(name) if name else FieldMap()
    first, skip = dataset["first"], dataset["skip"]
    found = islice(sources(path, dataset["split"], dataset["clones"]), skip, first and skip + first)
    places = list(found)

    def case_of(number: int) -> Case:
        place = places[number]
        try:
            task = read(place)
            keep(task.bundle())
        except SuiteError as error:
            return Case(place.where, None, str(error))
        data = {"bundle": task.digest, "name": task.name}
        row = Row(number + 1, place.where, data, task)
        return _case(row, field_map.apply(row) if name else data)

    return handler or field_map.handler or known or HARBOR, range(len(places)), case_of


def _case(row: Row, task: dict[str, Any]) -> Case:
    try:
        # The checker knows the handler.
        return Case(row.where, RolloutRequest.model_validate({"handler": "any", "task": task}))
    except ValidationError as error:
        return Case(row.where, None, problems_of(error))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
