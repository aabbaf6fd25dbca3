"""Scoring in killable child processes: `await score("package.module:function", payload, timeout_s=10)`.

A scorer judges what a model wrote, with libraries that hang, crash, eat memory or need the main thread for
SIGALRM. So it runs in a child that can be killed, never on the worker's event loop or its threads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.scoring.pool import ScorerPool, score, score_or_blame
    from workers.scoring.process import ScorerCrashed, ScorerError, ScorerOutOfMemory, ScorerTimeout

__all__ = [
    "ScorerCrashed",
    "ScorerError",
    "ScorerOutOfMemory",
    "ScorerPool",
    "ScorerTimeout",
    "score",
    "score_or_blame",
]


def __getattr__(name: str) -> Any:
    # On demand: the child imports this package too, and must not load the worker's libraries.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.pool"), name)
