"""What a client is given so that another can go on in its sandbox: numbers, a fence and a record."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol

from sandbox import connection
from sandbox.errors import SandboxError

NUMBERED = frozenset(
    (
        *("bash", "exec", "input", "interrupt", "reset", "setup", "write_file", "editor"),
        *("ipython", "ipython_interrupt", "ipython_restart"),
    )
)
"""Operations that change something. All others may be repeated."""
REFUSALS = ("SandboxTaken", "SandboxAhead")
"""Errors that are no outcome: nothing was done."""
ABANDON_TIMEOUT_S = 3.0
"""For what tells the sandbox that a call was given up; a cancelled task waits no longer for that."""


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


async def round_trip(
    journal: Journal,
    line: connection.Line,
    address: connection.Address,
    request: dict[str, Any],
    timeout: float,
) -> dict[str, Any] | None:
    """`connection.round_trip` of the journal's next operation, whose reply it keeps. One that is given up
    (cancelled, overdue) is abandoned, unless the journal leaves it.
    """
    number, fence, reply = journal.number(), journal.fence, None
    request |= {"number": number, "fence": fence, "known": journal.known}
    try:
        reply = await connection.round_trip(line, address, request, timeout)
    finally:
        if reply is None and not journal.leaves:
            # A task of its own, as another cancellation may end the wait for it.
            await asyncio.wait([asyncio.create_task(_abandon(address, number, fence))])
    if reply is not None and reply.get("error", {}).get("type") not in REFUSALS:
        journal.keep(number, reply)
    return reply


async def _abandon(address: connection.Address, number: int, fence: int) -> None:
    """End an operation as the end of its connection ends an unnumbered one, if that can be."""
    request = {"op": "abandon", "number": number, "fence": fence}
    with contextlib.suppress(SandboxError, TimeoutError):
        async with asyncio.timeout(ABANDON_TIMEOUT_S):
            await connection.exchange(address, request, ABANDON_TIMEOUT_S)
