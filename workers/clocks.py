"""The clocks of a stage's own limits, which stand still while the stage waits for something of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

_running: ContextVar[tuple[_Clock, ...]] = ContextVar("running", default=())


class _Clock:
    """An `asyncio.timeout` that can be stopped; several may ask for it at once."""

    def __init__(self, scope: asyncio.Timeout) -> None:
        self._scope = scope
        self._stopped = 0
        self._left = 0.0

    def stop(self) -> None:
        self._stopped += 1
        when = self._scope.when()
        if self._stopped == 1 and when is not None and not self._scope.expired():
            self._left = when - asyncio.get_running_loop().time()
            self._reschedule(None)

    def go_on(self) -> None:
        self._stopped -= 1
        if not self._stopped and self._scope.when() is None:
            self._reschedule(asyncio.get_running_loop().time() + self._left)

    def _reschedule(self, when: float | None) -> None:
        with suppress(RuntimeError):  # its block has ended, or is being cancelled
            self._scope.reschedule(when)


@contextmanager
def counted(scope: asyncio.Timeout) -> Iterator[None]:
    """Let a limit be stopped by whatever the block awaits."""
    token = _running.set((*_running.get(), _Clock(scope)))
    try:
        yield
    finally:
        _running.reset(token)


@contextmanager
def stopped() -> Iterator[None]:
    """Around an await that must not count towards the limits of the stage."""
    clocks = _running.get()
    for clock in clocks:
        clock.stop()
    try:
        yield
    finally:
        for clock in clocks:
            clock.go_on()
