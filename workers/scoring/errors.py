"""What `score` raises. None of it is ever a reward of 0 by itself."""

from __future__ import annotations

from workers.errors import HandlerError, InfrastructureError


class ScorerError(HandlerError):
    """The function raised, cannot be imported, or answered with what JSON cannot carry."""

    outcome = "error"
    """Of the call, among the metrics."""


class ScorerTimeout(InfrastructureError):
    """The function took longer than it may; its process was killed.

    Machine or answer, nobody knows yet: a handler whose scorer can be slowed down by what a model wrote takes
    a second look (see `score_or_blame`). Left alone, it is a failure that is tried again.
    """

    outcome = "timeout"


class ScorerCrashed(InfrastructureError):
    """The function's process died, did not start, or ran out of memory."""

    outcome = "crashed"


class ScorerOutOfMemory(ScorerCrashed):
    """The function ran into the memory limit of its process."""
