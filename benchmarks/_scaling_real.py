"""One and two virtual nodes with real sandboxes: each node has a sandbox host of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks._latency import private_directory
from benchmarks._scaling_nodes import Nodes, Slots
from benchmarks._scaling_work import durations
from tests.helpers.sandboxes import leftovers

SLOTS = 4
WAVES = 8
RUN_S = 4.0
"""Mean: two cores start and end the sandboxes of both nodes beside it."""
COMMAND = "echo $((6 * 7)) > answer && cat answer"


def measure() -> dict[str, Any]:
    """Weak scaling from one node to two.

    Raises:
        RuntimeError: A sandbox was left over.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        private_directory() as sandboxes,
    ):
        with Nodes(Path(directory), sandboxes, 2, Slots(SLOTS, SLOTS, SLOTS), real=True) as nodes:
            nodes.init_env = {"ROLLOUT_READY_AHEAD": str(SLOTS)}
            found = {}
            for size in (1, 2):
                nodes.use(size)
                # The first ones unpack the image and bring the pools up.
                nodes.work([{"command": COMMAND}] * SLOTS * size, f"{size} real nodes, first")
                run = durations(size * SLOTS * WAVES, RUN_S, 0)
                tasks = [{"run_s": one, "command": COMMAND} for one in run]
                found[size] = nodes.work(tasks, f"{size} real nodes")
        left = [path for number in range(2) for path in leftovers(sandboxes / f"n{number}")]
    if left:
        raise RuntimeError(f"sandboxes left something: {left}")
    return {
        "weak_efficiency_2": round(found[2].per_s / (2 * found[1].per_s), 4),
        "per_s": {size: round(outcome.per_s, 3) for size, outcome in found.items()},
        "slots": SLOTS,
        "rollouts": {size: outcome.count for size, outcome in found.items()},
        "run_s": RUN_S,
    }
