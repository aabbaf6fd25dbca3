"""What a client is given so that another can go on in its sandbox: numbers, a fence and a record."""

from __future__ import annotations

from typing import Any, Protocol

NUMBERED = frozenset(
    (
        *("bash", "exec", "input", "interrupt", "reset", "setup", "write_file", "editor"),
        *("ipython", "ipython_interrupt", "ipython_restart"),
    )
)
"""Operations that change something. All others may be repeated."""
REFUSALS = ("SandboxTaken", "SandboxAhead")
"""Errors that are no outcome: nothing was done."""


class Journal(Protocol):
    """What numbers the operations of one client and keeps their outcomes. A reply frame is as
    `server/wire.py` has it; one that carries an error is an outcome, too.
    """

    fence: int
    """Of the claim under which the sandbox is driven; an older one is refused."""
    known: int
    """Outcomes up to this number are in the caller's record, and the sandbox drops them."""
    leaves: bool
    """Whether a cancelled call leaves its operation running, for whoever collects it."""

    def recall(self) -> dict[str, Any] | None:
        """The reply frame that the record has of the next operation; then nothing is asked. None when it has
        none.
        """

    def number(self) -> int:
        """The number of the next operation, from 1; asked for when its request is about to be sent."""

    def keep(self, number: int, reply: dict[str, Any]) -> None:
        """The reply frame of that operation has arrived."""
