"""A worker that has grown too large starts anew: what a handler leaked goes, its rollouts go on elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import threading

import psutil
import structlog

log = structlog.get_logger("worker")

LOOK_EVERY_S = 2.0

_renew = False


def watch(most_mb: int, stopping: threading.Event) -> None:
    """Until the worker stops, or is asked to because it holds more than that; 0 = never."""
    global _renew
    me = psutil.Process()
    while most_mb and not stopping.wait(LOOK_EVERY_S):
        held = me.memory_info().rss >> 20
        if held > most_mb:
            log.error(
                "the worker is too large and starts anew; its rollouts are handed back",
                resident_mb=held,
                most_mb=most_mb,
            )
            _renew = True
            # As an operator would: Celery takes no more messages, and the rollouts in hand are handed back.
            os.kill(os.getpid(), signal.SIGTERM)
            return


def go_on() -> None:
    """At the end of a worker that stopped in order to start anew: be that worker. Returns if it did not."""
    if _renew:
        # In place, so that whoever supervises the process, or wrote its id down, need not know.
        os.execv(sys.executable, sys.orig_argv)
