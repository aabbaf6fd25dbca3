"""Progress bars on standard error, for the client's iterators and for the command line.

Apart from the client, because rich takes 40 ms to import.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sized
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollout.calls import Request
from rollout.schema import Batch, Rollout

if TYPE_CHECKING:
    from rollout.calls import Requests

TELL_S = 5.0
"""Between two lines on how far it is, where no bar can be drawn."""


class _Bar(Progress):
    unit: str
    """What is counted."""

    def __init__(self, total: int | None = None, console: Console | None = None) -> None:
        note = TextColumn("{task.fields[note]}")
        columns = (TextColumn(self.unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), note)
        super().__init__(*columns, console=console or Console(stderr=True))
        self.add_task("", total=total, note="")


class Meter(_Bar):
    """How many rollouts ended, in which states, and the mean reward so far."""

    unit = "rollouts"

    def __init__(self, total: int | None = None, console: Console | None = None) -> None:
        super().__init__(total, console)
        self._told = time.monotonic()
        self.states: Counter[str] = Counter()
        self.rewards: list[float] = []
        if total and not self.console.is_terminal:  # where the first word may be minutes away
            self.console.print(f"waits for {total} rollouts", highlight=False)

    def add(self, rollout: Rollout) -> None:
        """Count a rollout that ended."""
        self.states[rollout.state.value] += 1
        if rollout.reward is not None:
            self.rewards.append(rollout.reward)
        self.update(self.task_ids[0], advance=1, note=self.text())
        # A bar is drawn in a terminal alone.
        if not self.console.is_terminal and time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            self.console.print(f"so far {self.text()}", highlight=False)

    def text(self) -> str:
        """States and mean reward, in words."""
        words = [f"{count} {name}" for name, count in sorted(self.states.items())]
        if self.rewards:
            words.append(f"mean reward {sum(self.rewards) / len(self.rewards):.3f}")
        return ", ".join(words) or "none has ended"


class BatchMeter(_Bar):
    """How many groups a batch has kept, and what became of the others."""

    unit = "groups"

    def show(self, batch: Batch) -> None:
        """The counters of the batch as they are now."""
        counts = {
            "filtered": batch.filtered,
            "failed": batch.failed,
            "under way": batch.open,
            "carried in": batch.carried_in,
            "rollouts in flight": batch.in_flight,
        }
        notes = ["paused"] if batch.paused else []
        notes += [f"{count} {name}" for name, count in counts.items() if count]
        self.update(self.task_ids[0], completed=batch.kept, total=batch.wanted, note=", ".join(notes))


def expected(requests: Requests) -> int | None:
    """How many rollouts the requests ask for; None where that cannot be known before they are read."""
    if isinstance(requests, Request):
        return requests.n
    # What has a length can be read twice.
    return sum(request.n for request in requests) if isinstance(requests, Sized) else None
