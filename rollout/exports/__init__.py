"""Ended rollouts in the formats of others: ATIF, Inspect's `.eval`, Harbor's jobs, OpenTelemetry's spans.

They are written from the records alone, with the standard library; only tests need the formats' own readers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from rollout.errors import RolloutError
from rollout.schema import Rollout

FORMATS = {"atif": ".json", "inspect": ".eval", "harbor": "", "otel": ".otel.json"}
"""What can be written, each with the end of its usual name."""


def write(rollouts: Iterable[Rollout], path: str | Path, kind: str, *, replace: bool = False) -> int:
    """Write rollouts, which are read one by one, and say how many: each id is written once.

    Args:
        path: Of a file; of `harbor`, and of `atif` with several rollouts, a directory.
        kind: One of `FORMATS`.
        replace: Whether a file that is there is replaced. A directory with something in it never is.

    Raises:
        RolloutError: Something is at `path`, there is no such format or no rollout, or one has not ended.
        OSError: It cannot be written. Whatever is raised, what was at `path` before is there still.
    """
    if kind not in FORMATS:
        raise RolloutError(f"there is no format {kind!r}: {', '.join(FORMATS)}")
    written: set[str] = set()
    with placed(Path(path), replace) as target:
        import_module(f"rollout.exports.{kind}").write(_ended(rollouts, written), target)
        if not written:
            raise RolloutError("there is no rollout to export")
    return len(written)


@contextmanager
def placed(path: Path, replace: bool) -> Iterator[Path]:
    """Where to write what is to be at `path`: it gets there once it is whole. Raises what `write` does."""
    _refuse_what_is_there(path, replace)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as place:
        target = Path(place, path.name)
        yield target
        _refuse_what_is_there(path, replace)
        target.replace(path)


def _refuse_what_is_there(path: Path, replace: bool) -> None:
    if path.is_dir() and any(path.iterdir()):
        raise RolloutError(f"{path} is a directory with something in it: name one that is not there yet")
    if path.exists() and not path.is_dir() and not replace:
        raise RolloutError(f"{path} is there already: --force replaces it")


def _ended(rollouts: Iterable[Rollout], written: set[str]) -> Iterator[Rollout]:
    for rollout in rollouts:
        if not rollout.state.terminal:
            state = rollout.state.value
            raise RolloutError(f"rollout {rollout.id} is {state}: it can be exported once it has ended")
        if rollout.id not in written:
            written.add(rollout.id)
            yield rollout
