"""How many small tasks `rollout tasks check` gets through in a minute: those made from real packages."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from rollout.schema import RolloutRequest
from rollout.suites.harbor import tasks
from services.settings import settings
from tests.helpers.package_tasks import write_all
from workers.bundles import keep
from workers.handlers.harbor import Harbor
from workers.task_checks.checker import Case, Checker
from workers.task_checks.report import Report


def check_tasks_per_min(directory: Path, count: int | None = None) -> float:
    """Check all of them as the command does by default, in sandboxes of the host that the environment names.

    Args:
        count: So many of them only.

    Raises:
        AssertionError: One of them is not ok.
    """
    write_all(directory, count)
    cases = []
    for task in tasks(directory):
        keep(task.bundle())
        cases.append(Case(task.source.where, RolloutRequest(handler="harbor", task=task.request().task)))
    checker = Checker(Harbor(), settings(), jobs=os.cpu_count() or 1)
    warm, report = Report(source="", handler="harbor"), Report(source=str(directory), handler="harbor")
    asyncio.run(checker.check_all(iter(cases[:1]), warm))  # unpacks the image, and starts the host
    asyncio.run(checker.check_all(iter(cases), report))
    assert not report.faulty, report.verdicts
    return report.tasks_per_min
