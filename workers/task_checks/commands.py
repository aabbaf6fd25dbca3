"""`rollout tasks check`: an entry point of the group `rollout.commands.tasks`."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import Callable, Collection, Iterator
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
from rollout.schema import Limits, RolloutRequest
from rollout.suites import HARBOR, SuiteError, is_suite
from rollout.suites.harbor.dataset import Source, read, sources
from rollout.suites.imported import located
from services.settings import SettingsError
from services.settings import settings as read_settings
from workers.bundles import keep
from workers.errors import StageError
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
@click.option("--limits", default="{}", help='Of each rollout, such as {"eval_timeout_s": 1800}.')
@click.option(
    "--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write the report there."
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
    limits: str,
    target: Path | None,
    **dataset: Any,
) -> None:
    """Check that tasks can be solved, and not by doing nothing, in real sandboxes.

    Each task's own solution is played twice and must earn 1; doing nothing must earn less; and what is hidden
    from an agent (tests, solution, later commits, keys) must not be found in its sandbox. Ends with 1 when a
    task is not fit to be trained on.
    """
    try:
        bounds = Limits.model_validate_json(limits)
        settings = read_settings()
    except ValidationError as error:
        raise click.UsageError(f"--limits: {problems_of(error)}") from None
    except SettingsError as error:
        raise click.ClickException(str(error)) from error
    handler, count, cases = _tasks(file, handler, bounds, **dataset)
    loaded = load_handler(handler, settings)
    if not count:
        raise click.ClickException(f"{file} holds no task")
    numbers = random.Random(seed).sample(range(count), min(sample or count, count))
    report = Report(source=file, handler=loaded.name)
    checker = Checker(loaded, settings, jobs=jobs or os.cpu_count() or 1, repeat=repeat, thorough=thorough)
    before, logs = signal.signal(signal.SIGTERM, as_interrupt), structlog.get_config()
    # Lines of each rollout would hide the progress.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        with _progress() as progress:
            bar = progress.add_task("checking", total=len(numbers))
            chosen = cases(frozenset(numbers))
            asyncio.run(checker.check_all(chosen, report, lambda _: progress.advance(bar)))
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        signal.signal(signal.SIGTERM, before)
        structlog.configure(**logs)
    show_view(view(report, everything))
    if target is not None:
        try:
            target.write_text(report.model_dump_json(indent=1) + "\n", "utf-8")
        except OSError as error:
            raise click.ClickException(f"{target} cannot be written: {error.strerror}") from None
    if report.interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    if report.faulty:
        raise click.exceptions.Exit(1)


Cases = Callable[[Collection[int]], Iterator[Case]]
"""Makes the cases of these numbers, in their order, when they are asked for."""


def _tasks(file: str, handler: str | None, limits: Limits, **dataset: Any) -> tuple[str, int, Cases]:
    """The handler, how many tasks there are, and what makes cases of some.

    A row, or a directory, that is no task is a case, too; a file that cannot be read is none.
    """
    path, known = located(file)
    if is_suite(path):
        name, first, skip = dataset["map_name"], dataset["first"], dataset["skip"]
        field_map = load_map(name) if name else FieldMap(keep=True)
        found = sources(path, dataset["split"], dataset["clones"])
        places = list(islice(found, skip, first and skip + first))

        def directories(numbers: Collection[int]) -> Iterator[Case]:
            for number, place in enumerate(places):
                if number in numbers:
                    yield _of_directory(place, field_map, limits)

        return handler or field_map.handler or known or HARBOR, len(places), directories
    source = Tasks(file, handler, **dataset)
    if source.handler is None:
        raise click.UsageError("give --handler, or a --map or dataset that names one")

    def rows(numbers: Collection[int]) -> Iterator[Case]:
        for number, (row, task) in enumerate(source.rows()):
            if number in numbers:
                yield _case(row, task, limits)

    return source.handler, sum(1 for _ in source.rows()), rows


def _of_directory(place: Source, field_map: FieldMap, limits: Limits) -> Case:
    try:
        task = read(place)
        keep(task.bundle())
    except (SuiteError, StageError) as error:
        return Case(place.where, None, str(error))
    row = Row(0, place.where, {"bundle": task.digest, "name": task.name}, task)
    return _case(row, field_map.apply(row), limits)


def _case(row: Row, task: dict[str, Any], limits: Limits) -> Case:
    try:
        # The checker knows the handler.
        fields = {"handler": "any", "task": task, "limits": limits}
        return Case(row.where, RolloutRequest.model_validate(fields))
    except ValidationError as error:
        return Case(row.where, None, problems_of(error))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
