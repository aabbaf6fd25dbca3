"""What the latency benchmarks share: taking turns, spreads, and an end that comes also on a signal."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sandbox.host_client import HostClient, SyncHostClient


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of all values do not exceed; no interpolation."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def spread_ms(seconds: list[float]) -> dict[str, float]:
    """Median, 95th percentile and number of repetitions, in milliseconds, of times in seconds."""
    return {
        "p50_ms": round(statistics.median(seconds) * 1e3, 3),
        "p95_ms": round(percentile(seconds, 0.95) * 1e3, 3),
        "n": len(seconds),
    }


def take_turns(
    methods: Mapping[str, Callable[[], float]], repetitions: Mapping[str, int], turn: int = 1
) -> dict[str, list[float]]:
    """Call each method `repetitions[name]` times and collect what it returns.

    Round-robin, so that a noisy moment of the machine meets all: at most `turn` times in a row where all
    repetitions are equal, and fewer of a method that has fewer. Each round begins with another method.
    """
    rounds = -(-max(repetitions.values()) // turn)
    names = list(methods)
    values: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            count = (number + 1) * repetitions[name] // rounds - number * repetitions[name] // rounds
            values[name] += [methods[name]() for _ in range(count)]
    return values


def timed(action: Callable[[], object]) -> float:
    """Seconds that the action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def say(text: str) -> None:
    """Progress goes to standard error; standard output is for the result."""
    print(text, file=sys.stderr, flush=True)


def end_in_order_on_sigterm() -> None:
    """SIGTERM as Ctrl-C: what was started is ended by the `with` blocks it was started in."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory with a short path, for Unix sockets, that is removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="sbxb-", dir="/tmp"))
    path.chmod(0o711)  # for the user whom root starts sandboxes as
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def private_host(state: Path, warm: int) -> Iterator[HostClient]:
    """A sandbox host of our own in `state` that keeps `warm` sandboxes ready; its end is the end of all its
    sandboxes. It is started by the first request, which has to come before the next such block is entered.
    """
    os.environ["ROLLOUT_SANDBOX_WARM"] = str(warm)
    state.mkdir(exist_ok=True)
    try:
        yield HostClient(state)
    finally:
        SyncHostClient(state).stop()
