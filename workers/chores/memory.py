"""A worker that has grown too large starts anew: what a handler leaked goes, its rollouts go on elsewhere."""

from __future__ import annotations

import os
import signal
import sys

import psutil

from workers.chores.base import Chore

_renew = False


class Memory(Chore):
    """Ends a worker that holds more than it may."""

    name = "memory"
    setting = "worker_max_memory_mb"
    interval_s = 2.0

    def tick(self) -> None:
        """Have the worker stop, and start anew, when it is too large."""
        global _renew
        most_mb = self._services.settings.worker_max_memory_mb
        resident_mb = psutil.Process().memory_info().rss >> 20
        if resident_mb > most_mb and not _renew:
            self.log.error(
                "the worker is too large and starts anew; its rollouts are handed back",
                resident_mb=resident_mb,
                most_mb=most_mb,
            )
            _renew = True
            # As an operator would: Celery takes no more messages, and the rollouts in hand are handed back.
            os.kill(os.getpid(), signal.SIGTERM)


def go_on() -> None:
    """At the end of a worker that stopped in order to start anew: be that worker. Returns if it did not."""
    if _renew:
        # In place, so that whoever supervises the process, or wrote its id down, need not know.
        os.execv(sys.executable, sys.orig_argv)
