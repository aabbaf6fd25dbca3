"""Looking at what the operations of a sandbox print, beside whoever runs them."""

from __future__ import annotations

from typing import Any

from sandbox.connection import Address, BlockingConnection

MOST_PIECES = 4
"""That one look brings: as many operations as a sandbox keeps the output of."""


class Peek:
    """A connection of its own to a sandbox, and how far it has looked. It disturbs and waits for nothing."""

    def __init__(self, address: str | Address, timeout_s: float) -> None:
        """
        Raises:
            NotListening: Nobody is there.
        """
        self._line = BlockingConnection(address, timeout_s).__enter__()
        self._seen: dict[str, Any] = {}

    def look(self) -> list[dict[str, Any]]:
        """What is new, as `sandbox/server/tape.py` has it; at first what the latest operation has printed.

        Raises:
            SandboxGone: The sandbox is not there any more.
            SandboxTimeout: Its server does not answer.
            SandboxRequestError: It is of a release that has no `peek`.
        """
        pieces: list[dict[str, Any]] = []
        while len(pieces) < MOST_PIECES and (piece := self._line.ask("peek", **self._seen)):
            pieces.append(piece)
            self._seen = {name: piece[name] for name in ("operation", "running")} | {"offset": piece["end"]}
        return pieces

    def close(self) -> None:
        """Hang up."""
        self._line.__exit__()
