"""What benchmarks share: the machine's description, CPU accounting, and the result line."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable
from typing import Any

import psutil


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system seconds that these processes and their children have used so far."""
    total = 0.0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                times = one.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


def summary(values: list[float]) -> dict[str, float]:
    """Median, least and largest of repeated measurements."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def report(name: str, results: dict[str, float], **details: Any) -> None:
    """Print the last line: figures under `results`, everything else beside them."""
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    print(json.dumps({"benchmark": name, "results": results, "machine": machine, **details}))
