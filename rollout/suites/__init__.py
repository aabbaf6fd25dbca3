"""Task suites: sets of tasks that are directories and not rows, and how they reach the workers."""

from __future__ import annotations

from rollout.datasets import DatasetError


class SuiteError(DatasetError):
    """A task, or a set of them, cannot be used; the message names the file, and the line or the field."""
