"""What a handler may know of its tasks besides their schema: how one is solved, and what no agent may see.

These are optional methods of a handler, and only `rollout tasks check` calls them. No worker does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from rollout.trajectory import FinishReason
from workers.handlers.base import RunContext


class NoOracle(Exception):
    """A task that its handler could solve, had it brought a solution; the message says what it lacks."""


@dataclass(frozen=True)
class Hidden:
    """Something that must not be found in the agent's sandbox."""

    what: str
    """For people: `tests/test_outputs.py`, `the fix (patch)`."""
    content: str | bytes
    """What to look for: of a text its most telling lines, of bytes some pieces."""
    secret: bool = False
    """Whether it is one value, such as a key, which may be a part of a line or a variable."""
    given: bool = False
    """Whether the agent may have been given it, as data that tests compare with: found, it is no fault."""
    repository: str | None = None
    """Directory of a git repository that must hold no commit to which its HEAD and tags do not lead."""


@runtime_checkable
class Says(Protocol):
    """A handler whose tasks are solved by words."""

    def solution(self, task: Any) -> str | Sequence[str] | None:
        """The final words that solve a task, or those of each turn; None = the task brings no solution."""


@runtime_checkable
class Solves(Protocol):
    """A handler whose tasks are solved by what is done in the sandbox."""

    async def solve(self, ctx: RunContext[Any]) -> FinishReason:
        """Take the place of `run`, and do what the task's own solution does.

        Raises:
            NoOracle: The task brings no solution.
            TaskError: The solution cannot be carried out.
        """


@runtime_checkable
class Knows(Protocol):
    """A handler some of whose tasks need a part that a check does not have, such as a simulated user."""

    def known(self, task: Any) -> Any:
        """The task with something fixed in the place of that part, in which doing nothing is played, too."""


@runtime_checkable
class Hides(Protocol):
    """A handler that knows what of a task is hidden from the agent."""

    def hidden(self, task: Any) -> Sequence[Hidden] | Awaitable[Sequence[Hidden]]:
        """What the agent's sandbox must not hold when the agent comes: tests, solution, keys."""


def changed_lines(patch: str, sign: Literal["+", "-"] = "+") -> str:
    """The lines that a diff adds, which a tree has that holds its other side; `-`: that it takes away."""
    lines = [line for line in patch.splitlines() if line.startswith(sign)]
    return "\n".join(line[1:] for line in lines if not line.startswith(f"{sign * 3} "))
