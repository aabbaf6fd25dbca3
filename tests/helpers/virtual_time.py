"""An asyncio loop whose clock jumps to the next timer: hours of waiting take no time at all.

Only timers and tasks work in it. Sockets and threads would need the real clock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits for something that no timer will bring."""


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise Deadlock(f"at virtual time {self.now:.3f} s no task can go on and no timer is set")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s; asyncio.sleep and timeouts cost nothing."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` under virtual time.

    Raises:
        Deadlock: All tasks wait for each other.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
