"""`rollout tasks check`: an entry point of the group `rollout.commands.tasks`."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import structlog
from pydantic import ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollout.cli.common import err, show_view
from rollout.cli.tasks import Tasks, dataset_options
from rollout.datasets import DatasetError
from rollout.errors import problems_of
from rollout.schema import RolloutRequest
from services.settings import SettingsError
from services.settings import settings as read_settings
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
    source = Tasks(file, handler, **dataset)
    if source.handler is None:
        raise click.UsageError("give --handler, or a --map or dataset that names one")
    try:
        settings = read_settings()
    except SettingsError as error:
        raise click.ClickException(str(error)) from error
    loaded = load_handler(source.handler, settings)
    # Lines of each rollout would hide the progress.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    cases = list(_cases(source, loaded.name))
    if sample is not None and sample < len(cases):
        chosen = sorted(random.Random(seed).sample(range(len(cases)), sample))
        cases = [cases[number] for number in chosen]
    if not cases:
        raise click.ClickException(f"{file} holds no task")
    report = Report(source=file, handler=loaded.name)
    checker = Checker(loaded, settings, jobs=jobs or os.cpu_count() or 1, repeat=repeat, thorough=thorough)
    before = signal.signal(signal.SIGTERM, as_interrupt)
    try:
        with _progress() as progress:
            bar = progress.add_task("checking", total=len(cases))
            asyncio.run(checker.check_all(iter(cases), report, lambda _: progress.advance(bar)))
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


def _cases(source: Tasks, handler: str) -> Iterator[Case]:
    """The tasks of a set. A row that is none is a case, too; one that cannot be read ends the set."""
    try:
        for row, task in source.rows():
            try:
                yield Case(row.where, RolloutRequest.model_validate({"handler": handler, "task": task}))
            except ValidationError as error:
                yield Case(row.where, None, problems_of(error))
    except DatasetError as error:
        raise click.ClickException(str(error)) from None


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
