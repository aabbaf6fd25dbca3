"""Task suites: sets of tasks that are directories and not rows, and how they reach the workers."""

from __future__ import annotations

from pathlib import Path

from rollout.datasets import DatasetError

HARBOR = "harbor"
"""The handler of the tasks of `rollout.suites.harbor`."""
OTHER_SETS = ("*.parquet", "*.jsonl", "dataset_dict.json", "state.json")


class SuiteError(DatasetError):
    """A task, or a set of them, cannot be used; the message names the file, and the line or the field."""


def is_suite(path: str | Path) -> bool:
    """Whether a path is a task directory, holds some, or is a registry of them, and no dataset of rows."""
    path = Path(path)
    if not path.is_dir():
        return path.name.endswith("registry.json") and path.is_file()
    return not any(map(any, map(path.glob, OTHER_SETS))) and any(path.rglob("task.toml"))
