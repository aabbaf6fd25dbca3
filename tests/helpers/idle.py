"""What is promised in seconds: held to the letter on an idle machine, and loosely where others compute.

The kernel says for how long anybody has waited for a processor or a disk (`/proc/pressure`), and for how long
the hypervisor has given our processors to others. `TEST_IDLE=1`, as `make idle` sets it, holds to the letter
whatever it says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PRESSURE = Path("/proc/pressure")
BUSY_SHARE = 0.25
"""Of the time measured, in which somebody waited; what is measured computes and writes a little, too."""


def _waited_s() -> float:
    """Seconds, since the machine was started, in which some task waited, or an average processor was away."""
    texts = [(PRESSURE / name).read_text() for name in ("cpu", "io")]
    waits = [int(text.partition("total=")[2].split()[0]) / 1e6 for text in texts]
    return sum(waits) + psutil.cpu_times().steal / psutil.cpu_count()


def is_busy(since_s: float, took_s: float) -> bool:
    """Whether others had the processors or disks meanwhile; `since_s` is what `_waited_s` said before."""
    return _waited_s() - since_s > BUSY_SHARE * took_s


@contextmanager
def in_time(seconds: float, busy_s: float) -> Iterator[None]:
    """Assert that the block takes less than `seconds`, or than `busy_s` where others compute."""
    to_the_letter = bool(os.environ.get("TEST_IDLE")) or not PRESSURE.exists()
    waited, began = 0.0 if to_the_letter else _waited_s(), time.monotonic()
    yield
    took = time.monotonic() - began
    most = busy_s if not to_the_letter and is_busy(waited, took) else seconds
    assert took < most, f"it took {took:.2f} s, and may take {most:g}"
