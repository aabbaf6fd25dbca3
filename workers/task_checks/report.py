"""What a check says of tasks: for people a table, for programs JSON."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from pydantic import BaseModel, Field
from rich.console import Group, RenderableType
from rich.text import Text

from rollout.cli.common import Column, Sheet, or_dash
from workers.task_checks.leaks import Searched

SCHEMA_VERSION = 1


class Verdict(StrEnum):
    """What a task is found to be; of several the first in this order is the task's."""

    BROKEN = "broken"
    """It does not fit its handler's schema, or cannot be begun."""
    NO_REWARD = "no reward"
    """Its verifier gave none."""
    ORACLE_FAILS = "oracle fails"
    """Its own solution does not earn what the task is worth."""
    FLAKY = "flaky"
    """The same was done twice, and earned something else."""
    NOP_EARNS = "nop earns"
    """Doing nothing earns as much as the solution."""
    LEAKS = "leaks"
    """What is hidden from the agent can be found in its sandbox."""
    NOT_CHECKABLE = "not checkable"
    """It brings no solution; what else can be checked is fine."""
    OK = "ok"

    @property
    def faulty(self) -> bool:
        """Whether the task should not be trained on."""
        return self not in (Verdict.OK, Verdict.NOT_CHECKABLE)


class Fault(BaseModel):
    """One thing that is wrong with a task."""

    verdict: Verdict
    detail: str


class TaskCheck(BaseModel):
    """What was found of one task."""

    name: str
    where: str
    """File and row, or directory."""
    verdict: Verdict = Verdict.OK
    faults: list[Fault] = Field(default_factory=list)
    best: float = 1.0
    """What the solution should earn: the row's `max_reward`, or 1."""
    oracle: list[float | None] = Field(default_factory=list)
    """Reward of each time that the solution was played; None = there was none."""
    nop: list[float | None] = Field(default_factory=list)
    """The same of doing nothing."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """`init`, `oracle` and `verify` of the first time that the solution was played, `total` of the check."""
    searched: Searched | None = None
    """How the agent's sandbox was looked through; None = nothing is known to be hidden, or there is none."""
    notes: list[str] = Field(default_factory=list)
    log: str = ""
    """The end of what the verifier said of a solution that failed."""

    def blame(self, verdict: Verdict, detail: str) -> None:
        """Note a fault. The gravest is the task's verdict."""
        order = list(Verdict)
        self.faults.append(Fault(verdict=verdict, detail=detail))
        self.verdict = min(self.verdict, verdict, key=order.index)


class Report(BaseModel):
    """What was found of a set of tasks."""

    schema_version: int = SCHEMA_VERSION
    source: str
    handler: str
    tasks: list[TaskCheck] = Field(default_factory=list)
    """In the order in which they stand in their set."""
    verdicts: dict[str, int] = Field(default_factory=dict)
    """How many tasks have each verdict."""
    seconds: float = 0.0
    tasks_per_min: float = 0.0
    interrupted: bool = False
    """Whether it was ended before all tasks were checked."""

    @property
    def faulty(self) -> bool:
        return any(task.verdict.faulty for task in self.tasks)

    def close(self, seconds: float) -> None:
        """Count, once the last task is in."""
        self.verdicts = dict(Counter(task.verdict.value for task in self.tasks))
        self.seconds = round(seconds, 3)
        self.tasks_per_min = round(60 * len(self.tasks) / seconds, 1) if seconds else 0.0


def view(report: Report, everything: bool) -> RenderableType:
    """The table: a row for each task that is not ok, or for all, and a line that sums them up."""
    tasks = [task for task in report.tasks if everything or task.verdict is not Verdict.OK]
    columns = [
        Column("task", lambda task: task.name, whole=True),
        Column("verdict", lambda task: Text(task.verdict.value, _style(task.verdict)), whole=True),
        Column("oracle", lambda task: _rewards(task.oracle), number=True),
        Column("nop", lambda task: _rewards(task.nop), number=True),
        Column("init s", lambda task: _seconds(task, "init"), number=True, drop=3),
        Column("oracle s", lambda task: _seconds(task, "oracle"), number=True, drop=4),
        Column("verify s", lambda task: _seconds(task, "verify"), number=True, drop=2),
        Column("what", _what),
    ]
    counts = ", ".join(f"{report.verdicts[v]} {v.value}" for v in reversed(Verdict) if v in report.verdicts)
    rate = f"{len(report.tasks)} tasks in {report.seconds:.1f} s ({report.tasks_per_min:g} a minute)"
    stopped = "; interrupted before all were checked" if report.interrupted else ""
    summary = Text(f"{rate}: {counts or 'none'}{stopped}")
    return Group(Sheet(columns, tasks), summary) if tasks else summary


def _style(verdict: Verdict) -> str:
    return "red" if verdict.faulty else "green" if verdict is Verdict.OK else "yellow"


def _rewards(values: list[float | None]) -> str:
    """Each value once: the same twice is what one expects."""
    shown = [or_dash(value, "{:g}") for value in values]
    return " ".join(shown[:1] if len(set(shown)) == 1 else shown)


def _seconds(task: TaskCheck, name: str) -> str:
    return or_dash(task.seconds.get(name), "{:.1f}")


def _what(task: TaskCheck) -> str:
    return "; ".join([*(fault.detail for fault in task.faults), *task.notes]).replace("\n", " ")
