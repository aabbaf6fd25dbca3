"""Tests that run in a short form each time and whole when a variable asks: `make long` lists what that adds.

    ROLLOUTS = CHAOS("rollouts", short=100, long=400)

    @SLURM.only
    def test_a_head_comes_back_with_what_it_knew(): ...

Whatever a test leaves to its long form goes through here, so the list is what the tests themselves say.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Entry:
    """What a file leaves to a long form: another value, or a whole test (`short` is None)."""

    form: LongForm
    file: str
    what: str
    short: Any
    long: Any


REGISTRY: list[Entry] = []
"""In the order in which files are imported."""


@dataclass(frozen=True)
class LongForm:
    """A form that `variable` asks for in the environment, and the command that does so."""

    variable: str
    command: str

    def __bool__(self) -> bool:
        return bool(os.environ.get(self.variable))

    def __call__(self, what: str, *, short: T, long: T) -> T:
        """The value of the form that is run; `what` it is the number of, or what it holds."""
        self._enter(_caller(), what, short, long)
        return long if self else short

    def only(self, test: Callable[..., Any]) -> Callable[..., Any]:
        """Mark a test that has no short form."""
        self._enter(sys.modules[test.__module__].__file__, test.__name__, None, "whole")
        reason = f"takes too long for each run; `{self.command}` runs it"
        return pytest.mark.may_skip(pytest.mark.skipif(not self, reason=reason)(test))

    def _enter(self, file: str, what: str, short: Any, long: Any) -> None:
        name = str(Path(file).resolve().relative_to(ROOT))
        REGISTRY.append(Entry(self, name, what, short, long))


def _caller() -> str:
    return sys._getframe(2).f_globals["__file__"]


CHAOS = LongForm("CHAOS_LONG", "make chaos")
ATTACKS = LongForm("ATTACKS_LONG", "python -m tests.attacks")
CAPTURE = LongForm("CAPTURE_LONG", "CAPTURE_LONG=1 python -m pytest tests/integration/test_capture.py")
COMPOSE = LongForm("COMPOSE_LONG", "make compose-test")
SLURM = LongForm("SLURM_LONG", "make slurm-test")
TASKS = LongForm("TASKS_LONG", "TASKS_LONG=1 python -m pytest tests/task_checks tests/swe")
TRAINING = LongForm(
    "TRAIN_LONG",
    "TRAIN_LONG=1 python -m pytest tests/integration/test_training.py tests/integration/test_verl_path.py",
)
SOAK = LongForm("SOAK_LONG", "make soak")
TRAINERS = LongForm("TRAINERS_LONG", "make trainers-test")
BENCHMARKS = LongForm("BENCH_LONG", "make bench")
MODELS_LONG = LongForm(
    "MODELS_LONG", "MODELS_LONG=1 python -m pytest tests/integration/test_rollouts.py -k such_a_model"
)
HARNESSES = LongForm(
    "HARNESSES_LONG",
    "HARNESSES_LONG=1 python -m pytest tests/integration/test_harness_programs.py "
    "tests/integration/test_harness_pack.py tests/integration/test_driven_handlers.py",
)


def main() -> None:
    """Print what only the long forms cover, by the command that runs them."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "tests.helpers.long_forms import" in path.read_text():
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for form in dict.fromkeys(entry.form for entry in REGISTRY):
        print(f"{form.command}")
        for entry in REGISTRY:
            if entry.form is form:
                short = "not run" if entry.short is None else _text(entry.short)
                print(f"    {entry.file}: {entry.what}: {_text(entry.long)}, else {short}")


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_text, value)) or "their defaults"
    return str(value)


if __name__ == "__main__":
    # The registry of the tests is that of the module by its name, not of this one.
    importlib.import_module("tests.helpers.long_forms").main()
